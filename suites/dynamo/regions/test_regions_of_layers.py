"""Layers of one class whose forward is a nested compile region, and that communicate in ways of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from harness import Rank, World, assert_same, dyadic, requirement
from harness.stacks import dynamo
from harness.stacks.collectives import functional
from harness.stacks.limit import runs_with


class Layer(nn.Module):
    """Apply a function of a tensor and of what the layer has, in a region of its own."""

    def __init__(self, does: Callable[[torch.Tensor, Any], torch.Tensor], has: Any) -> None:
        super().__init__()
        self.does, self.has = does, has

    @torch.compiler.nested_compile_region
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map float[2, 2] to float[2, 2]."""
        return self.does(x * 2, self.has) + 1


def _reduced(x: torch.Tensor, group: Any) -> torch.Tensor:
    dist.all_reduce(x, group=group)
    return x


def _by_group(x: torch.Tensor, group: Any) -> torch.Tensor:
    return functional.all_reduce(x, "sum", group)


def _by_name(x: torch.Tensor, name: str) -> torch.Tensor:
    return functional.all_reduce(x, name, dist.group.WORLD)


def _from(x: torch.Tensor, source: int) -> torch.Tensor:
    return functional.broadcast(x, source, dist.group.WORLD)


def _along(x: torch.Tensor, dim: int) -> torch.Tensor:
    return functional.all_gather_tensor(x, dim, dist.group.WORLD)[:2, -2:]


def _of_mesh(x: torch.Tensor, dim: tuple[DeviceMesh, str]) -> torch.Tensor:
    mesh, name = dim
    return functional.all_reduce(x, "sum", mesh.get_group(name))


Has = tuple[Callable[[torch.Tensor, Any], torch.Tensor], list[Any]]


def layouts(rank: Rank) -> dict[str, Has]:
    """Return functions with what two layers have, on two ranks."""
    alone = [dist.new_group([member]) for member in range(rank.size)][rank.index]
    world, mesh = dist.group.WORLD, rank.mesh(1, 2, names=("one", "all"))
    return {
        "groups": (_reduced, [alone, world]),
        "groups of functional ones": (_by_group, [world, alone]),
        "names": (_by_name, ["sum", "max"]),
        "sources": (_from, [0, 1]),
        # before 2.13, Dynamo does not trace gathering along columns
        **({} if runs_with("<2.13") else {"dimensions": (_along, [0, 1])}),
        "dimensions of a mesh": (_of_mesh, [(mesh, "all"), (mesh, "one")]),
    }


@requirement(
    "DYN-REGION-5000",
    "Layers in nested compile regions communicate over their own groups with their own operation, source or dimension.",
    source="torch.compiler.nested_compile_region",
)
@pytest.mark.needs(torch="torch.compiler.nested_compile_region")
@pytest.mark.world(2)
def test_layers(world: World) -> None:
    """Call two unlike layers in turn and again, in one graph for each thing in which they differ."""

    def body(rank: Rank) -> None:
        for name, (does, have) in layouts(rank).items():
            layers = nn.ModuleList(Layer(does, has) for has in have * 2)

            def called(x: torch.Tensor, layers: nn.ModuleList = layers) -> torch.Tensor:
                for layer in layers:
                    x = layer(x)
                return x + 0

            x = dyadic(2, 2, key=rank.index, dtype=torch.float32).to(rank.device)
            assert_same(called(x), dynamo.compiled(called, backend="eager")[0](x), name)

    world.run(body)
