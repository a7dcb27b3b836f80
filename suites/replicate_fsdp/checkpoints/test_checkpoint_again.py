"""One reader, writer and planner for several checkpoints, one after the other, in the same place or in others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch.distributed.tensor import Shard, distribute_tensor

from fixtures.states import assert_equal, whole
from fixtures.tensors import numbers
from harness import Rank, World, requirement

SOURCE = "torch.distributed.checkpoint"
STATES: list[dict[str, Any]] = [
    {"a": numbers(4), "b": numbers(2, 3)},
    {"a": numbers(6), "b": numbers(2, 3).double() / 2},
    {"a": numbers(6) * 2, "b": numbers(4, 2).to(torch.int64), "c": numbers(2)},
    {"b": numbers(2), "c": -numbers(2)},
]
"""States that are saved one after the other: of other sizes, dtypes, values and names."""
STORAGES: dict[str, tuple[Any, Any]] = {
    "files": (checkpoint.FileSystemWriter, checkpoint.FileSystemReader),
    "safetensors": (checkpoint.HuggingFaceStorageWriter, checkpoint.HuggingFaceStorageReader),
}


def of_rank(rank: Rank, state: dict[str, Any], *, zeros: bool = False) -> dict[str, Any]:
    """Divide the tensors of a state by their rows over the ranks, or zeros of their shapes and dtypes."""
    return {
        name: distribute_tensor((tensor * (not zeros)).to(rank.device), rank.mesh(), [Shard(0)])
        for name, tensor in state.items()
    }


@requirement(
    "RFSDP-CHECKPOINT-8506",
    "A reader loads the checkpoint that is in its place at the time, however often it loaded another one before.",
    source=f"{SOURCE}: load: storage_reader, planner, checkpoint_id; FileSystemReader, HuggingFaceStorageReader",
)
@pytest.mark.parametrize("place", ["same", "others"])
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.world(2)
def test_one_reader(world: World, tmp_path: Path, storage: str, place: str) -> None:
    """Save and load four states with the same objects, look at each one's metadata, and ask for what it lacks."""

    def body(rank: Rank) -> None:
        make_writer, make_reader = STORAGES[storage]
        options: dict[str, Any] = {"save_distributed": True} if storage == "safetensors" else {"sync_files": False}
        folders = [tmp_path / ("0" if place == "same" else f"{number}") for number in range(len(STATES))]
        writer, reader = make_writer(str(folders[0]), **options), make_reader(str(folders[0]))
        saving, loading = checkpoint.DefaultSavePlanner(), checkpoint.DefaultLoadPlanner()
        for number, (state, folder) in enumerate(zip(STATES, folders, strict=True)):
            where: dict[str, Any] = {} if place == "same" else {"checkpoint_id": str(folder)}
            what = f"save {number}"
            checkpoint.save(of_rank(rank, state), storage_writer=writer, planner=saving, **where)
            loaded = of_rank(rank, state, zeros=True)
            checkpoint.load(loaded, storage_reader=reader, planner=loading, **where)
            assert_equal(state, whole(loaded), what)
            metadata = reader.read_metadata().state_dict_metadata
            assert {name: metadata[name].size for name in metadata} == {n: t.shape for n, t in state.items()}, what
            lacking = {"d": torch.zeros(2)} if "a" in state else of_rank(rank, {"a": numbers(6)})
            with pytest.raises(checkpoint.CheckpointException):
                checkpoint.load(lacking, storage_reader=reader, planner=loading, **where)
            dist.barrier()

    world.run(body)
