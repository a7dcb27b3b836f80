"""Distributed checkpoints in storages that fsspec knows by a URL or in files: saved, forced to disk, loaded or not."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch.distributed.tensor import Shard, distribute_tensor

from fixtures.states import WAYS_TO_SAVE, assert_equal, copied, whole
from harness import Rank, World, requirement

SOURCE = "torch.distributed.checkpoint"


def state(rank: Rank, factor: int) -> dict[str, Any]:
    """Return tensors that are sharded or not, and other values."""
    values = torch.arange(6.0, device=rank.device) * factor
    return {
        "sharded": distribute_tensor(values, rank.mesh(), [Shard(0)]),
        "deeper": {"tensor": values + 1, "empty": values[:0], "text": f"{factor}"},
        "step": factor,
    }


@requirement(
    "RFSDP-CHECKPOINT-1701",
    "A checkpoint is saved and loaded in each storage that fsspec knows, whether or not its files have descriptors.",
    source=f"{SOURCE}: save, load, async_save: 'checkpoint_id depends on the storage'",
)
@pytest.mark.parametrize("storage", ["memory", "file"])
@pytest.mark.world(2)
def test_named_storage(world: World, tmp_path: Path, storage: str) -> None:
    """Save in memory, by each rank alone, or in files by all ranks, twice in the same place."""

    def body(rank: Rank) -> None:
        alone = {"no_dist": True} if storage == "memory" else {}
        for name, save in WAYS_TO_SAVE.items():
            url = f"{storage}://{tmp_path}/{name}"
            for factor in 1, 2:
                save(state(rank, factor), checkpoint_id=url, **alone)
                loaded = state(rank, -1)
                checkpoint.load(loaded, checkpoint_id=url, **alone)
                assert_equal(whole(state(rank, factor)), whole(loaded), f"{name}, {factor}")
                dist.barrier()

    world.run(body)


FILES = ((1, True), (2, False))
"""Numbers of threads that write, and whether they write one file for each rank."""


@requirement(
    "RFSDP-CHECKPOINT-3451",
    "FileSystemWriter forces every file of a checkpoint to the disk by default, and none with sync_files=False.",
    source=f"{SOURCE}.FileSystemWriter: sync_files: 'force files to be synced to permanent storage'",
)
@pytest.mark.world(2)
def test_forced_to_disk(world: World, tmp_path: Path) -> None:
    """Save with one thread or two, in one file of each rank or several, at once or later."""

    def body(rank: Rank) -> None:
        for (name, save), (threads, single) in itertools.product(WAYS_TO_SAVE.items(), FILES):
            for given in {}, {"sync_files": True}, {"sync_files": False}:
                folder, forced = tmp_path / f"{name} {threads} {single} {given}", []
                options: dict[str, Any] = {"thread_count": threads, "single_file_per_rank": single, **given}
                writer = checkpoint.FileSystemWriter(folder, **options)
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(os, "fsync", lambda file, forced=forced: forced.append(os.stat(file).st_ino))
                    save(state(rank, 1), storage_writer=writer)
                everywhere: list[Any] = [None] * rank.size
                dist.all_gather_object(everywhere, forced)
                files = {file.stat().st_ino for file in folder.iterdir()}
                right = set() if given == {"sync_files": False} else files
                assert {number for of_rank in everywhere for number in of_rank} == right, f"{name}, {options}"

    world.run(body)


class Interrupted(checkpoint.DefaultLoadPlanner):
    """A planner that fails when it gets the first tensor."""

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        """Fail."""
        raise OSError("interrupted")


def zeros(data: bytes) -> bytes:
    """Return as many zeros."""
    return bytes(len(data))


BROKEN: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "nothing": ("none", bytes),
    "data-zeros": ("*.distcp", zeros),
    "data-half": ("*.distcp", lambda data: data[: len(data) // 2]),
    "data-empty": ("*.distcp", lambda _: b""),
    "metadata-zeros": (".metadata", zeros),
    "metadata-half": (".metadata", lambda data: data[: len(data) // 2]),
}
"""Files that are broken, and how; with none of them, the planner fails."""


@requirement(
    "RFSDP-CHECKPOINT-1702",
    "A load that fails leaves every file of the checkpoint as it is.",
    source=f"{SOURCE}: load; FileSystemReader",
)
@pytest.mark.parametrize("storage", ["file", "path"])
@pytest.mark.world(2)
def test_failed_load(world: World, tmp_path: Path, storage: str) -> None:
    """Load through fsspec or not, when files are overwritten or cut off, or the planner fails."""

    def body(rank: Rank) -> None:
        for name, (pattern, broken) in BROKEN.items():
            folder = tmp_path / name
            checkpoint.save(state(rank, 1), checkpoint_id=folder)
            if rank.index == 0:
                for file in folder.glob(pattern):
                    file.write_bytes(broken(file.read_bytes()))
            dist.barrier()
            files = {file.name: file.read_bytes() for file in folder.iterdir()}
            planner = Interrupted() if name == "nothing" else checkpoint.DefaultLoadPlanner()
            with pytest.raises(checkpoint.CheckpointException):
                checkpoint.load(
                    copied(state(rank, 2)),
                    checkpoint_id=folder if storage == "path" else f"file://{folder}",
                    planner=planner,
                )
            dist.barrier()
            assert {file.name: file.read_bytes() for file in folder.iterdir()} == files, name

    world.run(body)
