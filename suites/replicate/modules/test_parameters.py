"""Parameters of every kind have averaged gradients."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from harness import Rank, World, assert_on_ranks, assert_same, dyadic, requirement
from harness.stacks import replicate

SOURCE = "torch/distributed/_composable/replicate.py: replicate"


def factors(p: torch.Tensor, name: str, rank: int, step: int) -> torch.Tensor:
    """Return the factors of a parameter on a rank, which are its gradient there."""
    values = dyadic(*p.shape, key=(name, rank, step), denominator=2)
    if p.is_complex():
        return torch.complex(values, dyadic(*p.shape, key=(name, "imaginary", rank, step), denominator=2)).to(p.dtype)
    return values.to(p.dtype)


class Products(nn.Module):
    """A model whose output is the sum of the products of all parameters with the rank's factors."""

    def __init__(self, parameters: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, rank: int, step: int) -> torch.Tensor:
        products = [
            (p * factors(p, name, rank, step).conj().to(p.device)).sum().real.double()
            for name, p in self.named_parameters()
        ]
        return torch.stack(products).sum()


class Own(torch.Tensor):
    """A tensor of a class of the user's own."""


KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "without_dimensions": lambda: torch.tensor(1.0),
    "of_one_element": lambda: torch.ones(1, 1),
    "without_elements": lambda: torch.ones(3, 0),
    "channels_last": lambda: torch.ones(2, 3, 2, 2).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.ones(3, 4).t(),
    "complex_numbers": lambda: torch.ones(3, dtype=torch.complex64),
    "of_bfloat16": lambda: torch.ones(5, dtype=torch.bfloat16),
    "of_a_subclass": lambda: torch.ones(3, 2).as_subclass(Own),
    "large": lambda: torch.ones(300_001),
    "last": lambda: torch.ones(4, dtype=torch.float64),
}


@requirement(
    "REPL-PAR-01",
    "The gradient of a parameter of any kind is averaged element by element, and has the strides of the parameter.",
    source=SOURCE,
)
@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
@pytest.mark.world(2, 3)
def test_kinds(world: World, views: bool) -> None:
    """Train a model with one parameter of each kind for two steps, of which the second has other buckets."""

    def body(rank: Rank) -> list[dict[str, torch.Tensor]]:
        model = Products({name: make() for name, make in KINDS.items()})
        replicate.apply(model, rank, gradient_as_bucket_view=views)
        gradients = []
        for step in range(2):
            (rank.size * model(rank.index, step)).backward()
            for name, p in model.named_parameters():
                assert p.grad is not None
                assert p.grad.stride() == p.stride(), (name, step)
            gradients.append({n: g.to("cpu", copy=True) for n, g in replicate.gradients(model).items()})
            model.zero_grad()
        return gradients

    for step, *ranks in zip(range(2), *world.run(body), strict=True):
        for name, make in KINDS.items():
            right = sum((factors(make(), name, r, step) for r in range(1, world.size)), factors(make(), name, 0, step))
            for rank, gradients in enumerate(ranks):
                assert_same(right, gradients[name], f"step {step}, rank {rank}: gradient of {name}")


@requirement(
    "REPL-PAR-02",
    "Sparse gradients are averaged.",
    source="torch.nn.Embedding, torch.nn.EmbeddingBag: sparse",
)
@pytest.mark.parametrize("how", ["replicate", "DDP"])
@pytest.mark.world(2, 3)
def test_sparse(world: World, how: str) -> None:
    """Ranks look up different rows of an embedding, some of them shared."""

    def rows(rank: int) -> list[int]:
        return [rank, rank + 1, 5]

    def body(rank: Rank) -> torch.Tensor:
        layer = nn.Embedding(8, 2, sparse=True, dtype=torch.float64).to(rank.device)
        model = replicate.apply(layer, rank) if how == "replicate" else DistributedDataParallel(layer)
        looked_up = model(torch.tensor(rows(rank.index), device=rank.device))
        (rank.size * (rank.index + 1) * looked_up).sum().backward()
        gradient = layer.weight.grad
        assert gradient is not None
        return gradient.to_dense().cpu()

    right = torch.zeros(8, 2, dtype=torch.float64)
    for rank in range(world.size):
        right[rows(rank)] += rank + 1
    for rank, averaged in enumerate(world.run(body)):
        assert_same(right, averaged, f"rank {rank}")


BAGS: dict[str, dict[str, Any]] = {
    "sum": {"mode": "sum"},
    "mean": {"mode": "mean"},
    "last offset": {"mode": "sum", "include_last_offset": True},
    "padding": {"mode": "sum", "padding_idx": 5},
    "weights": {"mode": "sum"},
    "embedding": {},
}
"""Layers with sparse gradients: bags of embeddings, and an embedding."""


class Looked(nn.Module):
    """A layer that looks up rows, whose gradient is sparse, between two layers with dense ones."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        options: dict[str, Any] = {"sparse": True, "dtype": torch.float64, **BAGS[kind]}
        self.first, self.last = (nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(2))
        self.rows: nn.Module = (nn.Embedding if kind == "embedding" else nn.EmbeddingBag)(8, 2, **options)
        nn.init.ones_(self.rows.weight)
        self.kind = kind

    def forward(self, rank: int, step: int) -> torch.Tensor:
        device = self.first.device
        wanted = torch.tensor([rank, rank + step, 5, rank + 2], device=device)
        arguments: dict[str, Any] = {}
        if self.kind == "weights":
            arguments["per_sample_weights"] = torch.tensor([1.0, 2.0, 4.0, 8.0], dtype=torch.float64, device=device)
        if self.kind != "embedding":
            ends = [0, 1, 4] if self.kind == "last offset" else [0, 1]
            arguments["offsets"] = torch.tensor(ends, device=device)
        result: torch.Tensor = self.rows(wanted, **arguments) * self.first + self.last
        return (rank + 1) * result.sum()


@requirement(
    "REPL-PAR-02",
    "Sparse gradients are averaged.",
    source="torch.nn.Embedding, torch.nn.EmbeddingBag: sparse",
)
@pytest.mark.world(2)
def test_sparse_layers(world: World) -> None:
    """Run two steps of each layer under DistributedDataParallel, with other rows in the second."""

    def gradients(layer: nn.Module) -> dict[str, torch.Tensor]:
        return {n: p.grad.to_dense().cpu().clone() for n, p in layer.named_parameters() if p.grad is not None}

    def body(rank: Rank) -> dict[str, list[dict[str, torch.Tensor]]]:
        found: dict[str, list[dict[str, torch.Tensor]]] = {}
        for kind in BAGS:
            layer = Looked(kind).to(rank.device)
            model = DistributedDataParallel(layer)
            for step in range(2):
                model(rank.index, step).backward()
                assert layer.rows.weight.grad.is_sparse, kind  # type: ignore[union-attr]
                found.setdefault(kind, []).append(gradients(layer))
                model.zero_grad()
        return found

    ends = world.run(body)
    for kind in BAGS:
        for step in range(2):
            alone = Looked(kind)
            for rank in range(world.size):
                (alone(rank, step) / world.size).backward()
            for rank, found in enumerate(ends):
                for name, right in gradients(alone).items():
                    assert_same(right, found[kind][step][name], f"{kind}, step {step}, rank {rank}: {name}")


@requirement(
    "REPL-PAR-03",
    "Layers that are recomputed in the backward have averaged gradients.",
    source="torch.utils.checkpoint.checkpoint: use_reentrant=False",
)
@pytest.mark.world(2)
def test_checkpointed(world: World) -> None:
    """Train a checkpointed layer between two others for two steps of two micro-batches."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(2, 2, dtype=torch.float64) for _ in range(3))
            with torch.no_grad():
                for name, p in self.named_parameters():
                    p.copy_(dyadic(*p.shape, key=name, denominator=2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layers[0](x)
            x = checkpoint(self.layers[1], x, use_reentrant=False)
            result: torch.Tensor = self.layers[2](x)
            return result

    def inputs(rank: int, turn: int) -> torch.Tensor:
        return dyadic(3, 2, key=("inputs", rank, turn), denominator=2)

    def body(rank: Rank) -> dict[str, torch.Tensor]:
        model = replicate.apply(Model(), rank)
        for turn in range(4):
            model.set_requires_gradient_sync(turn % 2 == 1)
            model(inputs(rank.index, turn).to(rank.device)).sum().backward()
        return {n: g.cpu() for n, g in replicate.gradients(model).items()}

    alone = Model()
    for turn in range(4):
        for rank in range(world.size):
            (alone(inputs(rank, turn)).sum() / world.size).backward()
    for rank, gradients in enumerate(world.run(body)):
        for name, p in alone.named_parameters():
            assert p.grad is not None
            assert_same(p.grad, gradients[name], f"rank {rank}: gradient of {name}")


@requirement(
    "REPL-PAR-04",
    "A post-accumulate gradient hook runs once per backward and does not prevent averaging.",
    source="torch.Tensor.register_post_accumulate_grad_hook",
)
@pytest.mark.world(2)
def test_post_accumulate_hooks(world: World) -> None:
    """Register a hook on one of two parameters and run two steps."""

    def body(rank: Rank) -> tuple[int, list[list[float]]]:
        model = nn.Linear(2, 1, device=rank.device)
        calls: list[int] = []
        model.weight.register_post_accumulate_grad_hook(lambda p: calls.append(1))
        replicate.apply(model, rank)
        gradients = []
        for _ in range(2):
            model(torch.full((1, 2), 1.0 + rank.index, device=rank.device)).sum().backward()
            gradients.append(replicate.gradients(model)["weight"].flatten().tolist())
            model.zero_grad()
        return len(calls), gradients

    assert_on_ranks([(2, [[1.5, 1.5]] * 2)] * 2, world.run(body))


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.5, momentum=0.5, weight_decay=0.5),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=0.5, eps=0.0625),
    "adam": functools.partial(torch.optim.Adam, lr=0.5, eps=0.0625),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.5, eps=0.0625, amsgrad=True),
}


@requirement(
    "REPL-OPT-01",
    "An optimizer updates replicated parameters alike on all ranks, in whichever form it does so, up to rounding.",
    source="torch/optim/optimizer.py: foreach, fused",
)
@pytest.mark.parametrize("kind", [*OPTIMIZERS, "sgd-of-16-bits"])
@pytest.mark.world(2)
def test_optimizers(world: World, kind: str) -> None:
    """Make two steps with each form in each dtype, on parameters of sizes below and above a vector of the processor."""
    made = OPTIMIZERS[kind.partition("-")[0]]
    narrow = {torch.bfloat16, torch.float16}
    dtypes = narrow if "-" in kind else {torch.float32, torch.float64} | (narrow if kind != "sgd" else set())

    def has(form: str, device: torch.device) -> bool:
        """Whether torch has the form for parameters on this device, replicated or not: not every optimizer has each."""
        parameter = nn.Parameter(torch.ones(1, device=device))
        parameter.grad = torch.ones(1, device=device)
        try:
            made([parameter], **{form: True}).step()
        except RuntimeError:
            return False
        return True

    def trained(rank: Rank, dtype: torch.dtype, form: str) -> list[torch.Tensor]:
        model = Products({str(size): torch.ones(size, dtype=dtype) for size in (1, 15, 16, 70)}).to(rank.device)
        replicate.apply(model, rank)
        optimizer = made(model.parameters(), foreach=form == "foreach", fused=form == "fused")
        for step in range(2):
            optimizer.zero_grad()
            model(rank.index, step).backward()
            optimizer.step()
        return [p.detach().cpu() for p in replicate.parameters(model).values()]

    def body(rank: Rank) -> tuple[list[str], list[torch.Tensor]]:
        wrong, everything = [], []
        for dtype in sorted(dtypes, key=str):
            for form in ("foreach", "fused"):
                if not has(form, rank.device):
                    continue
                plain, found = (trained(rank, dtype, each) for each in ("each", form))
                # on an H200, fused Adam was off by 15 epsilons in float32, whose powers and roots are approximate there
                near = (32 if dtype == torch.float32 else 8) * torch.finfo(dtype).eps
                wrong += [
                    f"{form} {dtype} of {len(one)}"
                    for one, other in zip(plain, found, strict=True)
                    if not torch.allclose(one.double(), other.double(), rtol=near, atol=near)
                ]
                everything += found
        return wrong, everything

    ends = world.run(body)
    assert_on_ranks([[]] * world.size, [wrong for wrong, _ in ends])
    for (_, one), (_, other) in itertools.pairwise(ends):
        for here, there in zip(one, other, strict=True):
            assert_same(here, there, "an updated parameter")
