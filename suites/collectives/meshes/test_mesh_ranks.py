"""Forms in which DeviceMesh.from_group takes ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from harness import Rank, World, requirement

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
