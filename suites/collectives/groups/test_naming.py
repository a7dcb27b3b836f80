"""Names of ranks and groups: in groups with gaps, in parts of groups, in meshes; many groups, and twins."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import Rank, World, requirement, spmd

NEW_GROUP = "torch.distributed.new_group"


def total(rank: Rank, group: object) -> int:
    """Return a sum over a group, whose digits show which ranks took part."""
    tensor = torch.tensor([10**rank.index], device=rank.device)
    dist.all_reduce(tensor, group=group)  # type: ignore[arg-type]
    return int(tensor.item())


@requirement(
    "COLL-GROUP-10",
    "Global ranks and ranks in a group translate into each other, even if the group's ranks have gaps.",
    source="torch.distributed.get_global_rank, get_group_rank, get_process_group_ranks, get_rank, get_world_size",
)
@pytest.mark.parametrize("ranks", [(0, 2), (3, 1), (1, 3, 2), (2,), (0, 1, 3)], ids=str)
@pytest.mark.world(4)
def test_translation(world: World, ranks: tuple[int, ...]) -> None:
    """Every member translates every member; in the default group both ranks are equal."""

    def body(rank: Rank) -> None:
        group = dist.new_group(list(ranks))
        assert [dist.get_global_rank(dist.group.WORLD, i) for i in range(4)] == [0, 1, 2, 3]
        if rank.index not in ranks:
            assert dist.get_rank(group) == -1
            return
        members = sorted(ranks)
        assert dist.get_process_group_ranks(group) == members
        assert (dist.get_rank(group), dist.get_world_size(group)) == (members.index(rank.index), len(members))
        assert [dist.get_global_rank(group, i) for i in range(len(members))] == members
        assert [dist.get_group_rank(group, member) for member in members] == list(range(len(members)))
        assert total(rank, group) == sum(10**member for member in members)

    world.run(body)


@requirement(
    "COLL-GROUP-11",
    "new_subgroups divides the given group and returns to each member the subgroup it is in.",
    source="torch.distributed.new_subgroups: group; pytorch/pytorch#153798",
)
@requirement(
    "COLL-GROUP-6000",
    "new_subgroups divides a group whose ranks are not in ascending order in the group's order.",
    source="torch.distributed.new_subgroups: group; new_group: sort_ranks",
)
@pytest.mark.parametrize(
    "ranks",
    [(0, 1, 2, 3), (2, 3), pytest.param((3, 1, 2, 0), marks=pytest.mark.needs(torch=f"{NEW_GROUP}(sort_ranks)"))],
    ids=str,
)
@pytest.mark.world(4)
def test_parts_of_a_group(world: World, ranks: tuple[int, ...]) -> None:
    """Subgroups have one or two ranks."""

    def body(rank: Rank) -> None:
        options: dict[str, Any] = {} if list(ranks) == sorted(ranks) else {"sort_ranks": False}
        parent = dist.group.WORLD if ranks == (0, 1, 2, 3) else dist.new_group(list(ranks), **options)
        if rank.index not in ranks:
            return
        for size in (1, 2):
            mine, groups = dist.new_subgroups(size, group=parent)
            first = ranks.index(rank.index) // size * size
            part = sorted(ranks[first : first + size])
            assert len(groups) == len(ranks) // size
            assert dist.get_process_group_ranks(mine) == part
            assert total(rank, mine) == sum(10**member for member in part)

    world.run(body)


@requirement(
    "COLL-GROUP-12",
    "Many groups may exist at a time, each working among its own ranks.",
    source="torch.distributed.new_group",
)
@spmd(3)
def test_many_groups(rank: Rank) -> None:
    """Create forty-eight groups of pairs and of the world, then use each."""
    pairs = [(0, 1), (1, 2), (0, 2), (0, 1, 2)] * 12
    groups = [dist.new_group(list(pair)) for pair in pairs]
    for pair, group in zip(pairs, groups, strict=True):
        if rank.index in pair:
            assert dist.get_process_group_ranks(group) == list(pair)
            assert total(rank, group) == sum(10**member for member in pair)


@requirement(
    "COLL-GROUP-13",
    "Groups of the same ranks are independent: calls on one group never match calls on another.",
    source="torch.distributed.new_group, destroy_process_group",
)
@requirement(
    "COLL-GROUP-14",
    "A group stays usable after another group of the same ranks is destroyed.",
    source="torch.distributed.new_group, destroy_process_group",
)
@spmd(2, 3)
def test_twins(rank: Rank) -> None:
    """Ranks issue calls on two groups in different order; then one group is destroyed and the other used.

    Both groups are used before: with some backends, the first call on a group waits until all of its ranks have come.
    """
    groups = [dist.new_group(), dist.new_group()]
    for group in groups:
        total(rank, group)
    tensors = [torch.tensor([10**rank.index * weight], device=rank.device) for weight in (1, 2)]
    order = (0, 1) if rank.index == 0 else (1, 0)
    works = [dist.all_reduce(tensors[i], group=groups[i], async_op=True) for i in order]
    for work in works:
        work.wait()
    everyone = sum(10**i for i in range(rank.size))
    assert [tensor.item() for tensor in tensors] == [everyone, 2 * everyone]
    dist.barrier()
    dist.destroy_process_group(groups[0])
    assert (dist.get_rank(groups[1]), dist.get_world_size(groups[1])) == (rank.index, rank.size)
    assert total(rank, groups[1]) == everyone


@requirement(
    "COLL-MESH-03",
    "A mesh dimension is the same whether it is given by its number or by its name.",
    source="torch.distributed.device_mesh.DeviceMesh: get_group, size, get_coordinate, slicing",
)
@requirement(
    "COLL-MESH-04",
    "Slicing a mesh by the name of a dimension gives the submesh of that dimension's ranks.",
    source="torch.distributed.device_mesh.DeviceMesh: get_group, size, get_coordinate, slicing",
)
@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 4), (1, 2, 2), (2, 1, 2)], ids=str)
@pytest.mark.world(4)
def test_named_dimensions(world: World, shape: tuple[int, ...]) -> None:
    """For each dimension check size, coordinate, local rank, and the members of its group and its slice."""

    def body(rank: Rank) -> None:
        names = ("outer", "middle", "inner")[: len(shape)]
        mesh = rank.mesh(*shape, names=names)
        everyone = torch.arange(4).reshape(shape)
        position = (everyone == rank.index).nonzero()[0].tolist()
        assert list(mesh.get_coordinate() or ()) == position
        assert (mesh.size(), mesh.ndim, tuple(mesh.shape)) == (4, len(shape), shape)
        for number, name in enumerate(names):
            line = everyone[tuple(slice(None) if i == number else at for i, at in enumerate(position))].tolist()
            assert mesh.size(number) == shape[number]
            assert mesh.get_local_rank(number) == mesh.get_local_rank(name) == position[number]
            slice_ = mesh[name]
            assert slice_.mesh.tolist() == line
            assert slice_.get_local_rank() == position[number]
            for group in (mesh.get_group(number), mesh.get_group(name), slice_.get_group()):
                assert dist.get_process_group_ranks(group) == line
                assert total(rank, group) == sum(10**member for member in line)

    world.run(body)


@requirement(
    "COLL-BARRIER-06",
    "No rank leaves a barrier of a subgroup before all members have entered it, even at the group's first collective.",
    source="torch.distributed.barrier: group; mosaicml/llm-foundry#1133",
)
@pytest.mark.parametrize(
    "barrier",
    ["barrier", "async", pytest.param("monitored_barrier", marks=pytest.mark.needs(features=["monitored_barrier"]))],
)
@pytest.mark.parametrize("ranks", [(0, 1), (1, 2), (0, 1, 2)], ids=str)
@pytest.mark.world(3)
def test_barrier_of_a_group(world: World, ranks: tuple[int, ...], barrier: str) -> None:
    """Each member records its arrival in the store before the barrier and checks all arrivals after it."""

    def body(rank: Rank) -> None:
        group = dist.new_group(list(ranks))
        if rank.index not in ranks:
            return
        for number in range(3):
            if rank.index == ranks[-1]:  # the last member comes after the others are about to wait
                for member in ranks[:-1]:
                    rank.store.wait([f"{number}-{member}"])
                time.sleep(0.03)  # enough time to detect a member that does not wait
            rank.store.add(f"{number}-{rank.index}", 1)  # add() waits for the store's answer, unlike set()
            if barrier == "async":
                dist.barrier(group, async_op=True).wait()
            elif barrier == "monitored_barrier":
                dist.monitored_barrier(group, timeout=timedelta(seconds=20))
            else:
                dist.barrier(group)
            assert rank.store.check([f"{number}-{member}" for member in ranks])

    world.run(body)
