"""Distributed checkpoints of some ranks: saved within their group, by each rank alone, or of tensors that some have."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch.distributed.tensor import DeviceMesh, DTensor, Placement, Replicate, Shard, distribute_tensor

from fixtures.states import WAYS_TO_SAVE, assert_equal, whole
from fixtures.tensors import numbers
from harness import Rank, World, requirement

SOURCE = "torch.distributed.checkpoint"
GROUPS = [[0, 2], [1, 2], [2]]
"""Ranks of groups, with rank 0 and without it."""


class Failing(checkpoint.DefaultSavePlanner):
    """A planner that fails in one of its methods."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def create_local_plan(self) -> Any:
        """Plan what this rank saves."""
        if self.where == "local":
            raise OSError("no local plan")
        return super().create_local_plan()

    def create_global_plan(self, all_plans: Any) -> Any:
        """Plan what all ranks save."""
        if self.where == "global":
            raise OSError("no global plan")
        return super().create_global_plan(all_plans)

    def resolve_data(self, write_item: Any) -> Any:
        """Return the data of an item."""
        if self.where == "data":
            raise OSError("no data")
        return super().resolve_data(write_item)


@requirement(
    "RFSDP-CHECKPOINT-1703",
    "The ranks of a group save and load a checkpoint without the others, whichever ranks they are.",
    source=f"{SOURCE}: save, load, async_save: process_group",
)
@requirement(
    "RFSDP-CHECKPOINT-1704",
    "If one rank of a group cannot save its checkpoint, every rank of the group raises its error.",
    source=f"{SOURCE}: save: process_group; torch/distributed/checkpoint/utils.py: 'all ranks will observe those'",
)
@pytest.mark.world(3)
def test_groups(world: World, tmp_path: Path) -> None:
    """Save and load tensors that the group shards, in turn with groups that have rank 0 or not."""

    def body(rank: Rank) -> None:
        for number, ranks in enumerate(GROUPS):
            group = dist.new_group(ranks, use_local_synchronization=False)
            if rank.index not in ranks:
                continue
            mesh = DeviceMesh.from_group(group, rank.device.type)

            def made(factor: float, mesh: DeviceMesh = mesh) -> dict[str, Any]:
                sharded = distribute_tensor(numbers(5, 2).to(rank.device) * factor, mesh, [Shard(0)])
                own = torch.full((2,), factor + rank.index, device=rank.device)
                return {"sharded": sharded, "both": {"of all": factor}, f"own {rank.index}": own}

            for name, save in WAYS_TO_SAVE.items():
                folder = tmp_path / f"{name} {number}"
                save(made(1.0), checkpoint_id=folder, process_group=group)
                loaded = made(-2.0)
                checkpoint.load(loaded, checkpoint_id=folder, process_group=group)
                assert_equal(whole(made(1.0)), whole(loaded), f"{name} of ranks {ranks}")
            for where, failing in (("local", ranks[-1]), ("global", min(ranks)), ("data", ranks[0])):
                planner = Failing(where if failing == rank.index or where == "global" else "")
                with pytest.raises(checkpoint.CheckpointException, match=f"no {where}"):
                    checkpoint.save(
                        made(1.0), checkpoint_id=tmp_path / f"{where} {number}", process_group=group, planner=planner
                    )

    world.run(body)


@requirement(
    "RFSDP-CHECKPOINT-3450",
    "A checkpoint of all ranks saves and loads a DTensor that only some of them have, whatever ranks those are.",
    source=f"{SOURCE}: save, load; torch/distributed/checkpoint/default_planner.py: 'DTensor supports submesh'",
)
@pytest.mark.world(3)
def test_on_some_ranks(world: World, tmp_path: Path) -> None:
    """Load it on the same ranks, on others, and on all of them as a plain tensor, on the meta device as well."""
    ways: list[tuple[list[int], Placement]] = [([0, 2], Shard(0)), ([1, 2], Replicate()), ([2], Shard(1))]

    def body(rank: Rank) -> None:
        right = numbers(5, 2).to(rank.device)
        meshes = [DeviceMesh(rank.device.type, ranks) for ranks, _ in ways]

        def made(way: int, factor: float) -> DTensor:
            return distribute_tensor(right * factor, meshes[way], [ways[way][1]])

        def check(found: DTensor, way: int, what: str) -> None:
            if rank.index in ways[way][0]:
                assert_equal({"d": right}, {"d": found.full_tensor()}, what)

        for way, (name, save) in zip(range(len(ways)), itertools.cycle(WAYS_TO_SAVE.items()), strict=False):
            folder, sharded = tmp_path / f"{way}", made(way, 1.0)
            save({"d": sharded, "in": {"list": [sharded, 3]}, "all": right}, checkpoint_id=folder)
            for to in range(len(ways)):
                what = f"{name} of ranks {ways[way][0]} to {ways[to][0]}"
                one, other, plain = made(to, -1.0), made(to, -2.0), torch.zeros_like(right)
                state = {"d": one, "in": {"list": [other, 0]}, "all": plain}
                checkpoint.load(state, checkpoint_id=folder)
                check(one, to, what)
                check(other, to, what)
                assert_equal({"all": right, "number": 3}, {"all": plain, "number": state["in"]["list"][1]}, what)
            meta = {"d": made(way, -1.0).to("meta")}
            checkpoint.load(meta, checkpoint_id=folder)
            check(meta["d"], way, f"{name} of ranks {ways[way][0]} to the meta device")
            everywhere = {"d": torch.zeros_like(right)}
            checkpoint.load(everywhere, checkpoint_id=folder)
            assert_equal({"d": right}, everywhere, f"{name} of ranks {ways[way][0]} to all")

    world.run(body)


@requirement(
    "RFSDP-CHECKPOINT-1703",
    "The ranks of a group save and load a checkpoint without the others, whichever ranks they are.",
    source=f"{SOURCE}: save, load, async_save: process_group",
)
@pytest.mark.parametrize("plans", ["kept"])
@pytest.mark.world(2)
def test_groups_in_turn(world: World, tmp_path: Path, plans: str) -> None:
    """Save with all ranks, then with one, as a group or without one, and load that on all ranks."""

    def body(rank: Rank) -> None:
        groups, lacking = [rank.subgroup([one]) for one in range(2)], []
        state = {f"{n}": torch.full((2,), 1.0 + n, device=rank.device) for n in range(4)}
        for name in "group of 0", "group of 1", "alone":
            kept = type(f"{name} {plans}", (checkpoint.DefaultSavePlanner,), {})  # plans are kept for a class's name
            of_one = {"no_dist": True} if name == "alone" else {"process_group": groups[name == "group of 1"]}
            try:
                for options in {}, of_one:
                    folder = tmp_path / f"{name} {len(options)}"
                    if not options or rank.index == (name == "group of 1"):
                        planner = kept(enable_plan_caching=True)
                        checkpoint.save(state, checkpoint_id=folder, planner=planner, **options)
            except checkpoint.CheckpointException as e:
                lacking.append(f"{name}: not saved: {str(e).strip().splitlines()[-1]}")
            dist.barrier()
            loaded = {key: torch.zeros_like(value) for key, value in state.items()}
            try:
                checkpoint.load(loaded, checkpoint_id=folder)
                assert_equal(state, loaded, name)
            except checkpoint.CheckpointException as e:
                lacking.append(f"{name}: not loaded: {str(e).strip().splitlines()[-1]}")
        assert not lacking, "; ".join(lacking)

    world.run(body)


PLACEMENTS: dict[str, tuple[tuple[int, ...], tuple[int, ...], list[Placement]]] = {
    "rows": ((2,), (4, 3), [Shard(0)]),
    "columns": ((2,), (4, 3), [Shard(1)]),
    "uneven": ((2,), (5,), [Shard(0)]),
    "replicated": ((2,), (4,), [Replicate()]),
    "two dimensions": ((2, 1), (4, 2), [Shard(1), Shard(0)]),
}
"""A mesh, a size and placements of what is saved."""


@requirement(
    "RFSDP-CHECKPOINT-1705",
    "A rank that saves alone saves its part of a sharded tensor, which it can load alone.",
    source=f"{SOURCE}: save, load: no_dist: 'a checkpoint on a single rank/process'",
)
@pytest.mark.world(2)
def test_alone(world: World, tmp_path: Path) -> None:
    """Save tensors with several placements, at once or later, and load them into such tensors."""

    def body(rank: Rank) -> None:
        def made(factor: float) -> dict[str, Any]:
            state: dict[str, Any] = {"rank": rank.index + factor}
            for name, (shape, size, placements) in PLACEMENTS.items():
                mesh = rank.mesh(*shape)
                state[name] = distribute_tensor(numbers(*size).to(rank.device) * factor, mesh, placements)
            return state

        for name, save in WAYS_TO_SAVE.items():
            folder = tmp_path / f"{name} {rank.index}"
            save(made(1.0), checkpoint_id=folder, no_dist=True)
            loaded = made(-2.0)
            checkpoint.load(loaded, checkpoint_id=folder, no_dist=True)
            assert_equal(local(made(1.0)), local(loaded), name)

    world.run(body)


def local(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state with this rank's parts in place of its DTensors."""
    return {name: value.to_local() if isinstance(value, DTensor) else value for name, value in state.items()}


@requirement(
    "RFSDP-CHECKPOINT-6906",
    "A checkpoint has the whole of a sharded tensor in its order, in whatever order its mesh lists the ranks.",
    source=f"{SOURCE}: save, load; torch.distributed.device_mesh.DeviceMesh: mesh; pytorch/pytorch#193224",
)
@pytest.mark.parametrize("order", ["ascending", "descending"])
@pytest.mark.parametrize("how", WAYS_TO_SAVE)
@pytest.mark.world(2)
def test_order_of_mesh(world: World, tmp_path: Path, how: str, order: str) -> None:
    """Save a sharded tensor, and load it into a plain one and into one that a mesh in the other order shards."""

    def body(rank: Rank) -> None:
        ranks = list(range(rank.size))
        meshes = [DeviceMesh(rank.device.type, each) for each in (ranks, ranks[::-1])]
        saved = numbers(5, 2)
        one, other = meshes if order == "ascending" else meshes[::-1]
        WAYS_TO_SAVE[how]({"x": distribute_tensor(saved, one, [Shard(0)])}, checkpoint_id=tmp_path)
        plain = {"x": torch.zeros(5, 2)}
        checkpoint.load(plain, checkpoint_id=tmp_path)
        assert_equal(saved, plain["x"], "loaded into a plain tensor")
        sharded = {"x": distribute_tensor(torch.zeros(5, 2), other if order == "descending" else one, [Shard(0)])}
        checkpoint.load(sharded, checkpoint_id=tmp_path)
        assert_equal(saved, whole(sharded["x"]), "loaded into a sharded tensor")

    world.run(body)
