"""Meshes made of groups that exist, and flattened meshes: which groups they use, and that no group is made twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from harness import Rank, World, requirement
from harness.stacks.collectives import flattened

SOURCE = "torch.distributed.device_mesh.DeviceMesh"


def ranks_of(group: Any) -> list[int]:
    return dist.get_process_group_ranks(group)


@requirement(
    "TP-MESH-02",
    "A mesh from groups uses the given groups, in their order, and creates none.",
    source=f"{SOURCE}.from_group",
)
@requirement(
    "TP-MESH-03",
    "DTensors on a mesh from groups are sharded and reduced over the dimension that the mesh's layout names.",
    source=f"{SOURCE}.from_group",
)
@pytest.mark.world(2, 4)
def test_from_groups(world: World) -> None:
    """Use every two-dimensional layout of the ranks, transposed as well, and every one-dimensional one."""

    def body(rank: Rank) -> None:
        kind = rank.device.type
        for rows in [1, 2] if rank.size == 2 else [1, 2, 4]:
            for transposed in False, True:
                layout = torch.arange(rank.size).reshape(rows, -1)
                layout = layout.t().contiguous() if transposed else layout
                row, column = ((layout == rank.index).nonzero()[0]).tolist()
                members = [layout[:, column].tolist(), layout[row].tolist()]
                groups = []
                for lines in layout.t().tolist(), layout.tolist():
                    made = [dist.new_group(line) for line in lines]
                    groups.append(next(g for g, line in zip(made, lines, strict=True) if rank.index in line))
                for as_list in False, True:
                    for names in ("first", "second"), ("b", "a"):
                        what = f"{layout.tolist()}, {as_list=}, {names}"
                        before = dist.get_pg_count()
                        given: Any = layout.tolist() if as_list else layout
                        mesh = DeviceMesh.from_group(groups, kind, mesh=given, mesh_dim_names=names)
                        assert mesh.mesh.tolist() == layout.tolist(), what
                        assert mesh.shape == tuple(layout.shape), what
                        assert mesh.mesh_dim_names == names, what
                        assert mesh.get_coordinate() == (row, column) or mesh.get_coordinate() == [row, column], what
                        for dim in 0, 1:
                            assert mesh.get_group(dim) is groups[dim], what
                            assert ranks_of(mesh.get_group(dim)) == members[dim], what
                            assert mesh.get_local_rank(dim) == (row, column)[dim], what
                            assert mesh.size(dim) == len(members[dim]), what
                        assert [ranks_of(g) for g in mesh.get_all_groups()] == members, what
                        for dim, name in enumerate(names):
                            assert mesh.get_group(name) is groups[dim], what
                            assert mesh[name].get_group() is groups[dim], what
                            assert mesh[name].mesh.tolist() == members[dim], what
                        local = torch.tensor([float(rank.index + 1)], device=rank.device)
                        for dim in 0, 1:
                            placements = [Replicate(), Replicate()]
                            summed: Any = [*placements[:dim], Partial(), *placements[dim + 1 :]]
                            total = DTensor.from_local(local, mesh, summed, run_check=False).redistribute(
                                placements=placements
                            )
                            assert total.to_local().item() == sum(r + 1 for r in members[dim]), what
                            sharded: Any = [*placements[:dim], Shard(0), *placements[dim + 1 :]]
                            gathered = DTensor.from_local(local, mesh, sharded, run_check=False).full_tensor()
                            assert gathered.tolist() == [r + 1 for r in members[dim]], what
                        assert dist.get_pg_count() == before, f"{what}: a group was made"
                with pytest.raises(ValueError, match="mesh"):
                    DeviceMesh.from_group(groups, kind)
                with pytest.raises(ValueError, match="dim"):
                    DeviceMesh.from_group(groups[:1], kind, mesh=layout)
                with pytest.raises(ValueError, match="roup"):
                    DeviceMesh.from_group([], kind)
                for group, ranks in zip(groups, members, strict=True):
                    for given in None, ranks, torch.tensor(ranks, dtype=torch.int):
                        one = DeviceMesh.from_group(group, kind, mesh=given, mesh_dim_names=("only",))
                        assert one.get_group() is group, given
                        assert one.mesh.tolist() == ranks, given
                        assert one.mesh_dim_names == ("only",), given
                    with pytest.raises(ValueError, match="mesh"):
                        DeviceMesh.from_group(group, kind, mesh=[*ranks, 99])

    world.run(body)


@requirement(
    "TP-MESH-04",
    "Flattening the same dimensions of a mesh under the same name again creates no group.",
    source=f"{SOURCE}._flatten",
)
@requirement(
    "TP-MESH-05",
    "A flattened mesh has the ranks of the flattened dimensions in their order, and is found by its name.",
    source=f"{SOURCE}._flatten",
)
@pytest.mark.world(2, 4)
def test_flattened_again(world: World) -> None:
    """Flatten a whole mesh and a part of it several times, and under a name that another dimension has."""

    def body(rank: Rank) -> None:
        shape = (2, 1, 1) if rank.size == 2 else (2, 2, 1)
        mesh = init_device_mesh(rank.device.type, shape, mesh_dim_names=("a", "b", "c"))
        found: dict[str, Any] = {}
        groups = 0
        for again in range(3):
            for dims in ("a", "b"), ("b", "c"), ("a", "b", "c"):
                name, part = "".join(dims), mesh[dims]
                flat = flattened(part, name)
                lines = part.mesh.flatten().tolist()
                assert flat.mesh.tolist() == lines, dims
                assert flat.mesh_dim_names == (name,), dims
                assert ranks_of(flat.get_group()) == lines, dims
                assert mesh[name].get_group() is flat.get_group(), dims
                assert found.setdefault(name, flat.get_group()) is flat.get_group(), (dims, again)
                total = torch.ones(1, device=rank.device)
                dist.all_reduce(total, group=flat.get_group())
                assert total.item() == len(lines), dims
            groups = groups or dist.get_pg_count()
            assert dist.get_pg_count() == groups, f"{again}: a group was made"
        with pytest.raises(ValueError, match="name"):
            flattened(mesh["a", "b"], "bc")
        with pytest.raises(ValueError, match="exists"):
            flattened(mesh["a", "b"], "c")
        assert flattened(mesh["a"], "a").get_group() is mesh.get_group("a")
        assert dist.get_pg_count() == groups

    world.run(body)
