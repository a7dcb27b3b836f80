"""Forms in which meshes take ranks, and the memory of these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from harness import Rank, World, assert_on_ranks, requirement

NAMES = ("a", "b")


def tuples(ranks: Any) -> Any:
    """Make tuples of lists."""
    return tuple(map(tuples, ranks)) if isinstance(ranks, list) else ranks


FORMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda ranks: ranks,
    "list": lambda ranks: ranks.tolist(),
    "tuple": lambda ranks: tuples(ranks.tolist()),
    "array": lambda ranks: ranks.numpy(),
}
"""Tensors and what numpy calls array-like."""


@requirement(
    "COLL-MESH-09",
    "A mesh from groups has each group at the dimension of its place in the list, and makes no group.",
    source="torch.distributed.device_mesh.DeviceMesh.from_group: 'the first process group will be the 0th "
    "dimension of the DeviceMesh'",
)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("groups", ["one", "two"])
@pytest.mark.world(4)
def test_forms(world: World, groups: str, form: str) -> None:
    """Make a mesh of two groups and of one, with their ranks."""

    def body(rank: Rank) -> None:
        plane = rank.mesh(2, 2, names=NAMES)
        source = plane if groups == "two" else plane["b"]
        given: Any = source.get_all_groups()
        names = NAMES if groups == "two" else None
        ranks, count = source.mesh.cpu(), dist.get_pg_count()
        mesh = DeviceMesh.from_group(
            given if groups == "two" else given[0], rank.device.type, FORMS[form](ranks), mesh_dim_names=names
        )
        assert mesh.mesh.tolist() == ranks.tolist()
        assert [mesh.get_group(i) for i in range(mesh.ndim)] == given
        assert dist.get_pg_count() == count

    world.run(body)


@requirement(
    "COLL-MESH-8805",
    "A mesh keeps its ranks if the tensor of which it was made, or which its attribute gave, is written to.",
    source="torch.distributed.device_mesh.DeviceMesh: mesh",
)
@pytest.mark.parametrize("written", ["given int64", "given int32", "attribute"])
@pytest.mark.world(2)
def test_written(world: World, written: str) -> None:
    """Write other numbers into the tensor, and read the mesh, the mesh within it, and its place of each rank."""

    def body(rank: Rank) -> list[Any]:
        given = torch.arange(2, dtype=torch.int64 if written == "given int64" else torch.int32)
        mesh = DeviceMesh(rank.device.type, given.view(1, 2), mesh_dim_names=NAMES)
        (mesh.mesh if written == "attribute" else given).add_(7)
        return [mesh.mesh.tolist(), mesh["b"].mesh.tolist(), mesh.get_local_rank("b")]

    assert_on_ranks([[[[0, 1]], [0, 1], r] for r in range(2)], world.run(body))
