"""Forms and orders in which meshes take ranks, and the memory of these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from fixtures.tensors import chunk
from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks.collectives import functional
from suites.collectives.meshes.test_meshes import check, members

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


TABLES: dict[str, list[Any]] = {
    "lines": [[1, 0], [3, 1], [2, 0, 1], [0, 3, 1, 2], [3, 2, 1, 0], [2]],
    "squares": [[[3, 1], [0, 2]], [[2, 3], [1, 0]], [[3], [1]], [[1, 3, 0, 2]]],
}
"""Ranks of groups, none of which but the last line has them in ascending order."""


@requirement(
    "COLL-MESH-8400",
    "A mesh from groups has the ranks of each in the group's own order, in which DTensors on it are divided.",
    source="torch.distributed.device_mesh.DeviceMesh.from_group; torch.distributed.new_group: sort_ranks",
)
@pytest.mark.needs(torch="torch.distributed.new_group(sort_ranks)")
@pytest.mark.needs(features=["functional"])
@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.world(4)
def test_groups_in_their_order(world: World, kind: str) -> None:
    """Take groups that have their ranks as they were given, without a table or with it in every form; use the mesh."""

    def body(rank: Rank) -> None:
        device = rank.device.type
        for ranks in TABLES[kind]:
            table = torch.tensor(ranks)
            names = NAMES[: table.ndim]
            lines = [line for dim in range(table.ndim) for line in table.movedim(dim, -1).reshape(-1, table.shape[dim])]
            made = [(line.tolist(), dist.new_group(line.tolist(), sort_ranks=False)) for line in lines]
            if rank.index not in table:
                continue
            mine = [members(table, rank.index, [dim]).tolist() for dim in range(table.ndim)]
            groups = [next(group for line, group in made if line == of) for of in mine]
            if table.shape == (1, 4):  # its lines of one rank, and the line of all
                groups = [next(group for line, group in made if line == [rank.index]), made[-1][1]]
            given: Any = groups if table.ndim > 1 else groups[0]
            tables = [form(table) for form in FORMS.values()] if table.ndim > 1 else [None, ranks, table]
            count = dist.get_pg_count()
            for number, form in enumerate(tables):
                called = names if table.ndim > 1 or number % 2 else None
                what = f"{ranks} as {type(form)}"
                mesh = DeviceMesh.from_group(given, device, form, mesh_dim_names=called)
                check(rank, mesh, table, called, what)
                for dim, (line, group) in enumerate(zip(mine, groups, strict=True)):
                    assert dist.get_rank(group) == mesh.get_local_rank(dim) == line.index(rank.index), what
                    own = torch.tensor([rank.index], device=rank.device)
                    gathered = functional.wait_tensor(functional.all_gather_tensor(own, 0, (mesh, dim)))
                    assert gathered.tolist() == dist.get_process_group_ranks(group) == line, what
                    placed: Any = [Replicate()] * dim + [Shard(0)] + [Replicate()] * (table.ndim - dim - 1)
                    whole = torch.arange(15.0, device=rank.device).view(5, 3)
                    divided = distribute_tensor(whole, mesh, placed)
                    place = line.index(rank.index)
                    assert divided.to_local().tolist() == chunk(whole, len(line), place).tolist(), what
                    assert divided.full_tensor().tolist() == whole.tolist(), what
                    columns = divided.redistribute(placements=[Shard(1) if p.is_shard() else p for p in placed])
                    assert columns.to_local().tolist() == chunk(whole, len(line), place, 1).tolist(), what
                    summed: Any = [Partial() if p.is_shard() else p for p in placed]
                    total = DTensor.from_local(own.double(), mesh, summed).redistribute(placements=placed)
                    assert total.full_tensor().item() == sum(line), what
            assert dist.get_pg_count() == count
            if table.ndim == 1 and ranks != sorted(ranks):
                for wrong in (sorted(ranks), table.sort().values):
                    with pytest.raises(ValueError, match="mesh"):
                        DeviceMesh.from_group(given, device, wrong)

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
