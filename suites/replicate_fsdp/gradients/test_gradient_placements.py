"""Gradients that tensor parallelism places in another way than the parameters that they are of."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fixtures.tensors import numbers
from harness import Rank, World, requirement, unsupported
from harness.results import TorchLacks
from harness.stacks.replicate_fsdp import MESH, replicate

Compute = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
COMPUTED: dict[str, tuple[Compute, Callable[[torch.Tensor], torch.Tensor]]] = {
    "product": (lambda weight, x: weight * x, lambda x: x),
    "product, with the input squared": (lambda weight, x: x * x * weight, lambda x: x * x),
    "difference": (lambda weight, x: x - weight, lambda x: -torch.ones_like(x)),
    "sum": (lambda weight, x: torch.add(x, weight, alpha=3), lambda x: torch.full_like(x, 3.0)),
}
"""What is computed of a weight and an input of its size, and its derivative by the weight."""


class Computed(nn.Module):
    """A weight that is a DTensor."""

    def __init__(self, weight: torch.Tensor, compute: Compute) -> None:
        super().__init__()
        self.weight, self.compute = nn.Parameter(weight), compute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.compute(self.weight, x)


LAYOUTS = {"whole": Replicate(), "rows": Shard(0), "columns": Shard(1)}
BATCHED = {"whole": Replicate(), "rows": Shard(1), "columns": Shard(2)}
"""How a matrix is placed, alone or with a dimension of a batch before it."""


@requirement(
    "RFSDP-TP-800",
    "The gradient of a DTensor parameter is averaged and placed as the parameter, however the input is placed.",
    source="torch.distributed.fsdp.fully_shard; torch.distributed.tensor.parallel",
)
@pytest.mark.parametrize("way", ["sharded", "replicated", "named"])
@pytest.mark.world(4)
def test_placements(world: World, way: str) -> None:
    """Place weight and input by rows, by columns or not, and compute several functions of both."""
    named = way == "named"
    if named and not hasattr(fsdp, "DataParallelMeshDims"):
        unsupported(TorchLacks("dp_mesh_dims"))

    def body(rank: Rank) -> None:
        # A mesh that is equal to one that fully_shard made of two others is taken for it, and refused.
        mesh = rank.mesh(2, 2, names=("parts" if named else "data", "tensor"))
        data, over = mesh[mesh.mesh_dim_names[0]], mesh if named else mesh["tensor"]
        given = torch.stack([numbers(4, 4), numbers(4, 4) + 2]).to(rank.device)
        own = given if named else given[data.get_local_rank()].unsqueeze(0)
        parts, copies = ([Shard(0)], [Replicate()]) if named else ([], [])
        settings = zip(itertools.product(LAYOUTS, LAYOUTS), itertools.cycle(COMPUTED.items()), strict=False)
        for (of_weight, of_input), (name, (compute, derivative)) in settings:
            what = f"{name}: weight {of_weight}, input {of_input}"
            weight = distribute_tensor(numbers(4, 4).to(rank.device), over, [*copies, LAYOUTS[of_weight]])
            model: Any = Computed(weight, compute)
            if named:
                fully_shard(model, mesh=mesh, dp_mesh_dims=fsdp.DataParallelMeshDims(shard="parts"))
            elif way == "sharded":
                fully_shard(model, mesh=data)
            else:
                replicate(model, **{MESH: data})
            x = distribute_tensor(own, over, [*parts, BATCHED[of_input]])
            model(x).redistribute(placements=[*parts, Replicate()]).to_local().sum().backward()
            gradient = model.weight.grad
            assert gradient.placements == model.weight.placements, what
            assert torch.equal(gradient.full_tensor(), derivative(given).mean(0)), what

    world.run(body)
