"""What fully_shard refuses: meshes, modules and parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fixtures.layers import layers
from harness import Rank, World, requirement
from harness.stacks.limit import runs_with
from harness.stacks.replicate_fsdp import MESH, replicate


def with_parameter(rank: Rank, parameter: torch.Tensor) -> nn.Module:
    """Return layers beside a parameter."""
    model = layers(rank.device)
    model.register_parameter("other", nn.Parameter(parameter.to(rank.device)))
    return model


def shard(rank: Rank, module: Any, *shape: int, names: tuple[str, ...] | None = None) -> Any:
    mesh = init_device_mesh(rank.device.type, shape, mesh_dim_names=names) if shape else rank.mesh()
    return fully_shard(module, mesh=mesh)


def without_a_root(rank: Rank) -> None:
    model = layers(rank.device)
    shard(rank, list(model))
    model(torch.ones(1, 4, device=rank.device))


def placed(rank: Rank, placement: object) -> Any:
    return fully_shard(layers(rank.device), mesh=rank.mesh(), shard_placement_fn=lambda _: placement)  # type: ignore[arg-type,return-value]


def of_three_dimensions(rank: Rank) -> Any:
    mesh = init_device_mesh(rank.device.type, (rank.size, 1, 1, 1), mesh_dim_names=("data", "a", "b", "c"))
    module = nn.Linear(4, 4, bias=False, device=rank.device)
    own = distribute_tensor(module.weight.detach(), mesh["a", "b", "c"], [Shard(0), Shard(1), Replicate()])
    module.weight = nn.Parameter(own)
    return fully_shard(module, mesh=mesh["data"])


REFUSED: list[tuple[Callable[[Rank], object], type[Exception], str]] = [
    (
        lambda rank: shard(rank, layers(rank.device), 1, 1, 2, names=("a", "b", "c")),
        ValueError,
        "1D or 2D",
    ),
    (lambda rank: shard(rank, layers(rank.device), 1, 2), AssertionError, "mesh_dim_names"),
    (lambda rank: shard(rank, nn.ModuleList(layers(rank.device))), ValueError, "forward"),
    (lambda rank: shard(rank, nn.ModuleDict({"a": layers(rank.device)})), ValueError, "forward"),
    (lambda rank: shard(rank, shard(rank, layers(rank.device))), AssertionError, "once"),
    (lambda rank: shard(rank, with_parameter(rank, torch.tensor(1.0))), ValueError, "other"),
    (
        lambda rank: shard(rank, with_parameter(rank, torch.ones(2, 3).t())),
        NotImplementedError,
        "contiguous",
    ),
    (lambda rank: copy.deepcopy(shard(rank, layers(rank.device))), AssertionError, "deepcopy"),
    (without_a_root, RuntimeError, "single root"),
    (lambda rank: register_fsdp_forward_method(shard(rank, layers(rank.device)), "absent"), ValueError, "absent"),
    *(
        (lambda rank, placement=placement: placed(rank, placement), ValueError, "shard_placement_fn")  # type: ignore[misc]
        for placement in (() if runs_with("<2.13") else (0, Replicate(), (Shard(0),), Shard))
    ),
    (of_three_dimensions, NotImplementedError, "TP"),
]


@requirement(
    "RFSDP-REFUSE-02",
    "fully_shard raises an error that names the problem for wrong meshes, modules or parameters, and for a deepcopy.",
    source="torch.distributed.fsdp.fully_shard",
)
@pytest.mark.world(2)
def test_refused(world: World) -> None:
    """Each case raises its error on every rank."""

    def body(rank: Rank) -> None:
        for call, kind, word in REFUSED:
            with pytest.raises(kind, match=word):
                call(rank)

    world.run(body)


@requirement(
    "RFSDP-REFUSE-02",
    "fully_shard raises an error that names the problem for wrong meshes, modules or parameters, and for a deepcopy.",
    source="torch.distributed.fsdp.fully_shard",
)
@pytest.mark.usefixtures("with_refusals")
@pytest.mark.world(2)
def test_replicated(world: World) -> None:
    """Shard a module that is replicated."""

    def body(rank: Rank) -> None:
        with pytest.raises((AssertionError, RuntimeError, ValueError)):
            shard(rank, replicate(layers(rank.device), **{MESH: rank.mesh()}))

    world.run(body)
