"""Tensor-parallel layers without FSDP, and the averages of FSDP1 over ranks, in every floating-point dtype."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from fixtures.layers import layer
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
@pytest.mark.world(2)
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
