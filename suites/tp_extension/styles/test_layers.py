"""Tensor-parallel layers without FSDP, and the averages of FSDP1 over ranks, in every floating-point dtype."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

from fixtures.layers import layer
from fixtures.operators import floats
from fixtures.placements import part
from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks import tp_extension

DTYPES = ("float32", "float64", "bfloat16", "float16")
HIDDEN = 12
"""A number of features that two, three and four ranks divide."""


def two_layers(dtype: torch.dtype) -> nn.Sequential:
    """Create two layers with biases, whose parameters are small whole numbers."""
    model = nn.Sequential(nn.Linear(2, HIDDEN), nn.Linear(HIDDEN, 2)).to(dtype)
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.copy_((torch.arange(parameter.numel()).reshape(parameter.shape) + i) % 3 - 1)
    return model


def trained(model: nn.Module, dtype: torch.dtype, device: torch.device) -> list[Any]:
    """Run one backward and return the output and the gradients of the input and of every parameter, unsharded."""
    x = torch.tensor([[1.0, 2.0], [-1.0, 3.0]], dtype=dtype, device=device, requires_grad=True)
    output = model(x)
    (output * torch.tensor([1.0, 2.0], dtype=dtype, device=device)).sum().backward()
    tensors = [output, x.grad, *(p.grad for p in model.parameters())]
    return [(t.full_tensor() if isinstance(t, DTensor) else t).tolist() for t in tensors if t is not None]


@requirement(
    "TP-LAYER-01",
    "A column-wise layer followed by a row-wise one, with biases, has the output and gradients of one device.",
    source="torch.distributed.tensor.parallel: ColwiseParallel, RowwiseParallel",
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.world(1, 2, 3, 4)
@pytest.mark.each_choice
def test_columns_and_rows(world: World, dtype: str) -> None:
    """All ranks have the same rows; compare the gradient of the input as well."""
    kind = getattr(torch, dtype)

    def body(rank: Rank) -> list[Any]:
        model = two_layers(kind).to(rank.device)
        parallelize_module(model, rank.mesh(names=("tp",)), {"0": ColwiseParallel(), "1": RowwiseParallel()})
        return trained(model, kind, rank.device)

    assert_on_ranks([trained(two_layers(kind), kind, torch.device("cpu"))] * world.size, world.run(body))


@requirement(
    "TP-LAYER-02",
    "Gradients are averaged over data-parallel ranks in the dtype of the parameters.",
    source="torch.distributed.fsdp.FullyShardedDataParallel",
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.world(2)
def test_average(world: World, dtype: str) -> None:
    """Averages of integers that differ by rank are integers."""
    kind = getattr(torch, dtype)

    def body(rank: Rank) -> Any:
        model = tp_extension.apply(nn.Sequential(layer().to(kind)), rank, plan={})
        x = torch.full((1, 2), rank.size * (1.0 + rank.index), dtype=kind, device=rank.device)
        model(x).sum().backward()
        gradients = tp_extension.gradients(model)
        assert gradients is not None
        return {name: (str(g.dtype), g.flatten().tolist()) for name, g in gradients.items()}

    average = float(sum(range(1, world.size + 1)))
    assert_on_ranks([{"0.weight": (f"torch.{dtype}", [average] * 4)}] * world.size, world.run(body))


@requirement(
    "TP-LAYER-03",
    "A parallel layer keeps neither its input nor its output alive after an iteration.",
    source="torch.distributed.tensor.parallel: ColwiseParallel, RowwiseParallel, SequenceParallel",
)
@pytest.mark.parametrize("mode", ["train", "evaluate"])
@pytest.mark.world(2, keeps="outputs that nothing waits for")
def test_freed(world: World, mode: str) -> None:
    """Drop inputs and outputs, local and DTensors, of linear layers, an embedding and a norm."""

    def body(rank: Rank) -> None:
        floats, indices = torch.ones(2, 4, device=rank.device), torch.zeros(2, 4, dtype=torch.long, device=rank.device)
        for style, module, x in (
            (ColwiseParallel(), nn.Linear(4, 4), floats),
            (RowwiseParallel(), nn.Linear(8, 4), floats),
            (ColwiseParallel(), nn.Embedding(4, 4), indices),
            (RowwiseParallel(input_layouts=Replicate()), nn.Embedding(4, 4), indices),
            (SequenceParallel(), nn.LayerNorm(4), torch.ones(2, 2, 4, device=rank.device)),
        ):
            layer = parallelize_module(module.to(rank.device), rank.mesh(), style)
            given = x.clone().requires_grad_(mode == "train" and x.is_floating_point())
            with torch.set_grad_enabled(mode == "train"):
                output: Any = layer(given)
            if mode == "train":
                (output.to_local() if isinstance(output, DTensor) else output).sum().backward()
            refs = weakref.ref(given), weakref.ref(output)
            layer.zero_grad()
            del given, output
            gc.collect()
            assert [ref() for ref in refs] == [None, None], style
            kept = [t for t in gc.get_objects() if type(t) is DTensor and not isinstance(t, nn.Parameter)]
            assert not kept, style

    world.run(body)


class BareLinear(nn.Linear):
    """A linear layer that has no attribute for a bias."""

    def __init__(self) -> None:
        super().__init__(4, 4, bias=False)
        del self.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply by the weight."""
        return functional.linear(x, self.weight)


class BareNorm(nn.LayerNorm):
    """A norm that has no attribute for a bias."""

    def __init__(self) -> None:
        super().__init__(4, bias=False)
        del self.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize, and multiply by the weight."""
        return functional.layer_norm(x, (4,), self.weight)


BARE: dict[str, tuple[Callable[[], nn.Module], Callable[[], ParallelStyle], Placement]] = {
    "columns": (BareLinear, lambda: ColwiseParallel(output_layouts=Replicate()), Replicate()),
    "columns, None": (
        lambda: nn.Linear(4, 4, bias=False),
        lambda: ColwiseParallel(output_layouts=Replicate()),
        Replicate(),
    ),
    "rows": (BareLinear, RowwiseParallel, Shard(-1)),
    "rows, None": (lambda: nn.Linear(4, 4, bias=False), RowwiseParallel, Shard(-1)),
    "sequence": (BareNorm, lambda: SequenceParallel(use_local_output=True), Shard(1)),
    "sequence, None": (
        lambda: nn.LayerNorm(4, bias=False),
        lambda: SequenceParallel(use_local_output=True),
        Shard(1),
    ),
    "sequence, no parameters": (
        lambda: nn.LayerNorm(4, elementwise_affine=False),
        lambda: SequenceParallel(use_local_output=True),
        Shard(1),
    ),
}
"""Layers without a bias or without a weight, their styles, and the layouts of their inputs."""


@requirement(
    "TP-LAYER-2300",
    "A style parallelizes a layer whose bias or weight is None or no attribute at all.",
    source="torch.distributed.tensor.parallel: ColwiseParallel, RowwiseParallel, SequenceParallel",
)
@pytest.mark.world(2)
def test_without_bias(world: World) -> None:
    """Compare the output and gradients with those of one device."""

    def body(rank: Rank) -> None:
        x, weights = (floats(3, 4, 4, start=i).float().to(rank.device) for i in range(2))
        for name, (make, style, at) in BARE.items():
            plain, own = make().to(rank.device), make().to(rank.device)
            for module in plain, own:
                for parameter in module.parameters():
                    parameter.data.copy_(floats(*parameter.shape))
            parallelize_module(own, rank.mesh(), style())
            given, leaf = x.clone().requires_grad_(), part(x, rank, at).clone().requires_grad_()
            to = at if name.startswith("sequence") else Replicate()
            expected, found = plain(given), own(leaf)
            torch.testing.assert_close(found, part(expected, rank, to), msg=f"{name}: output")
            (expected * weights).sum().backward()
            (found * part(weights, rank, to)).sum().backward()
            torch.testing.assert_close(leaf.grad, part(given.grad, rank, at), msg=f"{name}: input")  # type: ignore[arg-type]
            assert [key for key, _ in own.named_parameters()] == [key for key, _ in plain.named_parameters()], name
            for one, other in zip(own.parameters(), plain.parameters(), strict=True):
                gradient: Any = one.grad
                torch.testing.assert_close(gradient.full_tensor(), other.grad, msg=f"{name}: weight")

    world.run(body)
