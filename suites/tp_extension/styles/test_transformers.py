"""A small transformer, tensor or sequence parallel, trains as on one device: whole, in part, or with a tied weight."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

from fixtures.placements import MORE_OPERATORS
from fixtures.tensors import numbers
from harness import Rank, World, requirement
from harness.stacks.dynamo import checkpointed

WORDS, LENGTH, WIDTH, HEADS = 6, 4, 8, 2
R, S1 = Replicate(), Shard(1)


class Attention(nn.Module):
    """Attention with as many heads as a rank's features make."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Any) -> Any:
        """Map [batch, sequence, width] to the same."""
        q, k, v = (p(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for p in (self.q, self.k, self.v))
        weights = (q @ k.transpose(-1, -2) / 2).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and two linear layers, each after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm_2, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: Any) -> Any:
        """Map [batch, sequence, width] to the same."""
        x = x + self.attention(self.norm(x))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))


class Transformer(nn.Module):
    """Embeddings of words and places, blocks, a norm, and a linear layer to words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(1)])
        self.norm, self.output = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.double()
        with torch.no_grad():
            for i, (name, parameter) in enumerate(self.named_parameters()):
                values = (numbers(*parameter.shape) * 7 + 3 * i) % 11 - 5
                parameter.copy_(values / 16 + (1 if "norm" in name and name.endswith("weight") else 0))

    def forward(self, tokens: torch.Tensor) -> Any:
        """Map whole numbers [batch, sequence] to [batch, sequence, words]."""
        x = self.words(tokens) + self.places(torch.arange(LENGTH, device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.output(self.norm(x))


def plan(sequence: bool) -> dict[str, ParallelStyle]:
    """Return the styles of all layers, with activations between them that are sharded over the sequence, or whole."""
    layout = {"output_layouts": S1} if sequence else {}
    styles: dict[str, ParallelStyle] = {
        "words": RowwiseParallel(input_layouts=R, **layout),
        "places": RowwiseParallel(input_layouts=R, **({"output_layouts": Shard(0)} if sequence else {})),
        **{f"blocks.*.attention.{name}": ColwiseParallel() for name in "qkv"},
        "blocks.*.attention.out": RowwiseParallel(**layout),
        "blocks.*.up": ColwiseParallel(**({"input_layouts": S1} if sequence else {})),
        "blocks.*.down": RowwiseParallel(**layout),
        "output": ColwiseParallel(output_layouts=R, **({"input_layouts": S1} if sequence else {})),
    }
    if sequence:
        whole = PrepareModuleInput(input_layouts=S1, desired_input_layouts=R, use_local_output=True)
        local = {"use_local_output": True}
        norms = {f"{name}": SequenceParallel(**local) for name in ("blocks.*.norm", "blocks.*.norm_2", "norm")}
        styles |= {"blocks.*.attention": whole, **norms}
    return styles


def loss(model: Any, step: int, rows: slice = slice(None)) -> torch.Tensor:
    """Compute a loss that is the sum over the rows of a batch."""
    tokens = (torch.arange(2 * LENGTH).reshape(2, LENGTH) * (step + 2) + step) % WORDS
    output = model(tokens[rows].to(next(model.parameters()).device))
    targets = ((tokens * 5 + 1) % WORDS)[rows].to(output.device)
    return functional.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum")


def whole(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def same(alone: nn.Module, model: nn.Module, what: str, *, gradients: bool) -> None:
    """Assert that each parameter, or its gradient, is that of one device."""
    found = {name.replace("_checkpoint_wrapped_module.", ""): p for name, p in model.named_parameters()}
    for name, parameter in alone.named_parameters():
        right, own = (parameter.grad, whole(found[name].grad)) if gradients else (parameter, whole(found[name]))
        assert (right is None) == (own is None), f"{what}: {name}"
        if right is not None:
            torch.testing.assert_close(own.cpu(), right, rtol=1e-9, atol=1e-12, msg=f"{what}: {name}")


REDUCE, SCATTER, GATHER = "all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor"
COLLECTIVES = {
    # embeddings, attention and down; output. Backward: q, k, v, up and output
    False: ([REDUCE] * 4 + [GATHER], [REDUCE] * 5),
    # the same; into attention, up and output, and its result. Backward: q, k and v; up and output; attention and down
    True: ([SCATTER] * 4 + [GATHER] * 4, [REDUCE] * 3 + [SCATTER] * 2 + [GATHER] * 2),
}
"""The collectives that the layers of a transformer take, without and with sequence parallelism, forward and backward.
With it, each embedding that is trained takes one more."""


def counts(mode: CommDebugMode) -> list[str]:
    """Return the names of the collectives that were launched, each as often."""
    found = [str(op).split(".")[-1] for op, times in mode.get_comm_counts().items() for _ in range(times)]
    return sorted(found, key=[REDUCE, SCATTER, GATHER].index)


TRAINED: dict[str, tuple[str, ...]] = {
    "all": ("",),
    "last norm and output": ("norm.", "output."),
    "biases of norms": ("norm.bias", "norm_2.bias"),
    "weights of norms": ("norm.weight", "norm_2.weight"),
    "parts of blocks": ("words.", "attention.v.", "up.bias", "norm_2.bias"),
}
"""What the names of trained parameters begin with, or with the name of a block before it."""


def freeze(model: nn.Module, names: tuple[str, ...]) -> None:
    for name, parameter in model.named_parameters():
        inner = name.split(".", 2)[2] if name.startswith("blocks.") else name
        parameter.requires_grad_(name.startswith(names) or inner.startswith(names))


@requirement(
    "TP-LAYER-04",
    "A tensor- or sequence-parallel transformer has one device's outputs, gradients and steps.",
    source="torch.distributed.tensor.parallel: parallelize_module",
)
@requirement(
    "TP-LAYER-05",
    "Of a parallel model, exactly the parameters that are trained have gradients, which are one device's.",
    source="torch.distributed.tensor.parallel: ColwiseParallel, RowwiseParallel, SequenceParallel; torch.nn.LayerNorm",
)
@requirement(
    "TP-LAYER-37",
    "A tensor- or sequence-parallel transformer takes one collective for each layout that a layer changes, "
    "forward and backward, but none for a frozen embedding.",
    source="torch.distributed.tensor.parallel; CommDebugMode; test_tp_examples.py: test_transformer_training, "
    "test_transformer_req_grad",
)
@pytest.mark.needs(torch=MORE_OPERATORS)
@pytest.mark.world(2)
def test_trained(world: World) -> None:
    """Train everything for two steps with AdamW, or take the gradients of parts, which leaves norms some of them."""

    def body(rank: Rank) -> None:
        for sequence, (trained, names) in itertools.product((False, True), TRAINED.items()):
            if not sequence and trained not in ("all", "parts of blocks"):
                continue
            what = f"{sequence=}, {trained}"
            alone, model = Transformer(), Transformer().to(rank.device)
            parallelize_module(model, rank.mesh(), plan(sequence))
            freeze(alone, names)
            freeze(model, names)
            adams = [torch.optim.AdamW(m.parameters(), lr=0.125, foreach=False) for m in (alone, model)]
            for step in range(2 if trained == "all" else 1):
                with CommDebugMode() as forward:
                    found = loss(model, step)
                expected = loss(alone, step)
                torch.testing.assert_close(found.cpu(), expected, rtol=1e-9, atol=1e-12, msg=what)
                for adam in adams:
                    adam.zero_grad()
                expected.backward()
                with CommDebugMode() as backward:
                    found.backward()
                embeddings = sum(p.requires_grad for p in (model.words.weight, model.places.weight))
                right = COLLECTIVES[sequence]
                assert counts(forward) == right[0], f"{what}: forward"
                assert counts(backward) == right[1] + [GATHER] * (embeddings if sequence else 0), f"{what}: backward"
                if not step:
                    same(alone, model, f"{what}: gradient", gradients=True)
                if trained == "all":
                    with implicit_replication():
                        for adam in adams:
                            adam.step()
            if trained == "all":
                same(alone, model, f"{what}: steps", gradients=False)

    world.run(body)


@requirement(
    "TP-LAYER-06",
    "A parallelized weight that two layers share has the sum of their gradients, and stays shared.",
    source="torch.distributed.tensor.parallel: parallelize_module",
)
@pytest.mark.needs(torch=MORE_OPERATORS)
@pytest.mark.world(2)
def test_tied(world: World) -> None:
    """Share the weight of an embedding and a linear layer, in the same or in other shards, after parallelizing."""

    def body(rank: Rank) -> None:
        tokens = torch.tensor([[0, 5, 2], [2, 1, 0]], device=rank.device)
        for styles in (
            (RowwiseParallel(input_layouts=R), ColwiseParallel(output_layouts=R)),
            (ColwiseParallel(output_layouts=R), RowwiseParallel(input_layouts=R)),
            (ColwiseParallel(output_layouts=R), ColwiseParallel(output_layouts=R)),
            (RowwiseParallel(input_layouts=R), RowwiseParallel(input_layouts=R)),
        ):
            for first in (True, False):
                what = f"{[type(style).__name__ for style in styles]}, {first=}"
                models = [nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6)) for _ in range(2)]
                for module in models:
                    module.double().to(rank.device)
                    with torch.no_grad():
                        for parameter in module.parameters():
                            parameter.copy_(numbers(*parameter.shape) % 5 - 2)
                alone, model = models
                parallelize_module(model, rank.mesh(), dict(zip("01", styles, strict=True)))
                for module in models:
                    kept, other = (module[0], module[1]) if first else (module[1], module[0])
                    other.weight = kept.weight
                sgd = torch.optim.SGD(model.parameters(), lr=0.5, foreach=False)
                alone_sgd = torch.optim.SGD(alone.parameters(), lr=0.5)
                expected, output = alone(tokens), model(tokens)
                assert torch.equal(whole(output), expected), f"{what}: output"
                scale = (numbers(2, 3, 6) % 3).double().to(rank.device)
                (expected * scale).sum().backward()
                (output * scale).sum().backward()
                assert model[0].weight is model[1].weight, what
                weight: Any = model[0].weight
                assert torch.equal(whole(weight.grad), alone[0].weight.grad), f"{what}: gradient"
                alone_sgd.step()
                with implicit_replication():
                    sgd.step()
                assert torch.equal(whole(model(tokens)), alone(tokens)), f"{what}: output after a step"

    world.run(body)


@requirement(
    "TP-LAYER-07",
    "A tensor-parallel transformer under fully_shard trains as on one device, by rows or columns, offloaded or "
    "checkpointed.",
    source="torch.distributed.fsdp.fully_shard: shard_placement_fn, offload_policy; torch.distributed.tensor.parallel",
)
@pytest.mark.needs(torch=MORE_OPERATORS)
@pytest.mark.world(4)
def test_fully_sharded(world: World) -> None:
    """Shard over two ranks or one, over the first dimension or one that tensor parallelism leaves, and take a step."""

    def other(parameter: nn.Parameter) -> Shard | None:
        """Return the last dimension that is not sharded, if two ranks divide it."""
        dims = {p.dim % parameter.ndim for p in getattr(parameter, "placements", ()) if isinstance(p, Shard)}
        free = [d for d in range(parameter.ndim) if d not in dims and parameter.shape[d] % 2 == 0]
        return Shard(free[-1]) if free else None

    ways: dict[str, tuple[int, dict[str, Any], bool, bool]] = {
        "rows, checkpointed": (2, {"reshard_after_forward": False}, True, True),
        "other dimensions": (2, {"shard_placement_fn": other}, False, False),
        "offloaded over one rank": (1, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}, True, False),
    }

    def body(rank: Rank) -> None:
        for name, (data, options, sequence, again) in ways.items():
            mesh = rank.mesh(2 // data, data, 2, names=("apart", "dp", "tp"))
            alone, model = Transformer(), Transformer().to(rank.device)
            parallelize_module(model, mesh["tp"], plan(sequence))
            if again:
                model.blocks = nn.ModuleList(map(checkpointed, model.blocks))
            for block in (*model.blocks, model):
                fully_shard(block, mesh=mesh["dp"], **options)
            at = mesh["dp"].get_local_rank()
            loss(alone, 0).backward()
            (loss(model, 0, slice(at, at + 1) if data > 1 else slice(None)) * data).backward()
            same(alone, model, f"{name}: gradient", gradients=True)
            for each in alone, model:
                torch.optim.SGD(each.parameters(), lr=0.125, foreach=False).step()
            rows = slice(at, at + 1)
            torch.testing.assert_close(
                loss(model, 1, rows).cpu(), loss(alone, 1, rows), rtol=1e-9, atol=1e-12, msg=name
            )

    world.run(body)
