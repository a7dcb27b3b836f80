"""Convolutions of DTensors that are replicated or sharded over the batch, with every option."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor

from fixtures.placements import MORE_OPERATORS
from harness import Rank, World, assert_same, dyadic, requirement

pytestmark = pytest.mark.needs(torch=MORE_OPERATORS)
LAYERS: dict[str, tuple[type[nn.Module], dict[str, Any], tuple[int, ...]]] = {
    "line": (nn.Conv1d, {"kernel_size": 3, "padding": 1}, (4, 4, 7)),
    "image": (nn.Conv2d, {"kernel_size": 3, "padding": 1}, (4, 4, 5, 6)),
    "larger steps": (nn.Conv2d, {"kernel_size": 4, "stride": 4}, (2, 4, 8, 12)),
    "a kernel for each channel": (nn.Conv2d, {"kernel_size": 3, "padding": 1, "groups": 4}, (4, 4, 5, 6)),
    "gaps": (nn.Conv2d, {"kernel_size": (2, 3), "dilation": 2, "bias": False}, (3, 4, 5, 6)),
    "volume": (nn.Conv3d, {"kernel_size": 2, "padding": 1}, (2, 4, 3, 4, 3)),
    "transposed": (nn.ConvTranspose2d, {"kernel_size": 3, "stride": 2}, (2, 4, 3, 4)),
}
"""Layers of four channels with their options, and the sizes of their inputs."""


@requirement(
    "TP-CONV-01",
    "A convolution of a DTensor that is replicated or sharded over the batch has one device's output and gradients, "
    "with any options.",
    source="torch.distributed.tensor.DTensor; torch.nn: Conv1d, Conv2d, Conv3d; test_convolution_ops.py",
)
@pytest.mark.world(2)
def test_convolutions(world: World) -> None:
    """Inputs require a gradient or not; the gradient of the output arrives in the output's layout."""

    def body(rank: Rank) -> None:
        for name, (kind, options, shape) in LAYERS.items():
            plain: Any = kind(4, 4, **options).to(rank.device)
            with torch.no_grad():
                for key, parameter in enumerate(plain.parameters()):
                    parameter.copy_(dyadic(*parameter.shape, key=key, dtype=torch.float32, span=2))
            x = dyadic(*shape, key="x", dtype=torch.float32, span=2).to(rank.device)
            for layout in Replicate(), Shard(0):
                for grad in False, True:
                    what = f"{name}, {layout}, {grad=}"
                    plain.zero_grad()
                    one = x.clone().requires_grad_(grad)
                    right = plain(one)
                    weights = dyadic(*right.shape, key="w", dtype=torch.float32, span=2).to(rank.device)
                    (right * weights).sum().backward()
                    layer = distribute_module(copy.deepcopy(plain), rank.mesh())
                    layer.zero_grad()
                    given = distribute_tensor(x, rank.mesh(), [layout], src_data_rank=None).requires_grad_(grad)
                    found = layer(given)
                    assert found.placements == (layout,), what
                    assert_same(right.detach(), found.full_tensor().detach() + 0, what)
                    found.backward(distribute_tensor(weights, rank.mesh(), [layout], src_data_rank=None))
                    assert (given.grad is None) == (one.grad is None), what
                    pairs: list[Any] = [*zip(plain.parameters(), layer.parameters(), strict=True)]
                    pairs += [(one, given)] if grad else []
                    for i, (original, own) in enumerate(pairs):
                        assert_same(original.grad, own.grad.full_tensor() + 0, f"gradient {i} of {what}")

    world.run(body)
