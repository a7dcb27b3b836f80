"""Distributed checkpoints that another process saves: by all ranks, by groups, by a rank alone, one after another."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor

from fixtures.states import assert_equal, whole
from fixtures.tensors import numbers
from harness import Rank, World, requirement

SOURCE = "torch.distributed.checkpoint"
ORDERS = {
    "own twice": ["own", "own"],
    "all before own": ["all", "own"],
    "own before all": ["own", "all"],
}
"""Which saves follow one another: of all ranks, or of each in its own group."""


def save(state: dict[str, Any], folder: Path, **options: Any) -> None:
    """Save a state in another process, and wait for it."""
    kind = AsyncCheckpointerType.PROCESS
    checkpoint.async_save(state, checkpoint_id=folder, async_checkpointer_type=kind, **options).result()


@requirement(
    "RFSDP-CHECKPOINT-7600",
    "Another process saves the state of the ranks of the group that it is given, whatever groups saved before.",
    source=f"{SOURCE}: async_save: process_group, async_checkpointer_type",
)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.world(2)
def test_groups_in_turn(world: World, tmp_path: Path, order: str) -> None:
    """Save a number, and a tensor that the group shards, and load both in the same group."""

    def body(rank: Rank) -> None:
        own, lacking = [rank.subgroup([one]) for one in range(rank.size)][rank.index], []
        meshes = {
            "all": DeviceMesh(rank.device.type, list(range(rank.size))),
            "own": DeviceMesh.from_group(own, rank.device.type),
        }
        for number, who in enumerate(ORDERS[order], start=1):
            group, mesh = (own, meshes["own"]) if who == "own" else (None, meshes["all"])
            folder = tmp_path / (f"{number} of {rank.index}" if who == "own" else f"{number}")
            factor = float(number + (rank.index if who == "own" else 0))

            def made(factor: float, mesh: DeviceMesh = mesh) -> dict[str, Any]:
                sharded = distribute_tensor(numbers(5, 2).to(rank.device) * factor, mesh, [Shard(0)])
                return {"sharded": sharded, "number": factor}

            save(made(factor), folder, process_group=group)
            loaded = made(-1.0)
            try:
                checkpoint.load(loaded, checkpoint_id=folder, process_group=group)
                assert_equal(whole(made(factor)), whole(loaded), f"save {number}, of {who}")
            except (checkpoint.CheckpointException, AssertionError) as e:
                lacking.append(f"save {number}: not loaded: {str(e).strip().splitlines()[-1]}")
            dist.barrier()
        assert not lacking, "; ".join(lacking)

    world.run(body)


@requirement(
    "RFSDP-CHECKPOINT-7601",
    "Another process saves the state of a rank alone, whether or not other ranks save theirs.",
    source=f"{SOURCE}: async_save: no_dist: 'a checkpoint on a single rank/process', async_checkpointer_type",
)
@pytest.mark.parametrize("who", ["each", "one in its group", "one"])
@pytest.mark.world(2)
def test_alone(world: World, tmp_path: Path, who: str) -> None:
    """Save on each rank or on the first one, and wait for it in a thread."""

    def body(rank: Rank) -> None:
        own = [rank.subgroup([one]) for one in range(rank.size)][rank.index]
        folder, state = tmp_path / f"{rank.index}", {"number": rank.index + 2.0}
        if who == "each" or rank.index == 0:
            group = own if who == "one in its group" else None
            options = {"no_dist": True, "process_group": group}
            saver = threading.Thread(target=save, args=(state, folder), kwargs=options, daemon=True)
            saver.start()
            saver.join(20)
            rank.store.set("saved", "no" if saver.is_alive() else "yes")
            loaded = {"number": -1.0}
            assert not saver.is_alive(), f"not saved, as {who} saves"
            checkpoint.load(loaded, checkpoint_id=folder, no_dist=True)
            assert_equal(state, loaded, "loaded")
        rank.store.wait(["saved"])

    world.run(body)
