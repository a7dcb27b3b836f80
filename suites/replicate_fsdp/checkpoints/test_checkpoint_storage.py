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
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.staging import BlockingAsyncStager
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


class Delegating(checkpoint.StorageWriter):
    """A storage of one's own, which writes files as another does, and stages nothing."""

    def __init__(self, folder: Path) -> None:
        self.files = checkpoint.FileSystemWriter(folder, sync_files=False)

    def reset(self, checkpoint_id: Any = None) -> None:
        self.files.reset(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **options: Any) -> None:
        self.files.set_up_storage_writer(is_coordinator, *args, **options)

    def prepare_local_plan(self, plan: Any) -> Any:
        return self.files.prepare_local_plan(plan)

    def prepare_global_plan(self, plans: Any) -> Any:
        return self.files.prepare_global_plan(plans)

    def write_data(self, plan: Any, planner: Any) -> Any:
        return self.files.write_data(plan, planner)

    def finish(self, metadata: Any, results: Any) -> None:
        self.files.finish(metadata, results)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


@requirement(
    "RFSDP-CHECKPOINT-4102",
    "A storage writer of one's own saves a checkpoint, at once or asynchronously, as of the moment of the call.",
    source=f"{SOURCE}: save, async_save: storage_writer, async_stager, 'if storage_writer implements AsyncStager'; "
    "StorageWriter",
)
@pytest.mark.world(2)
def test_own_writer(world: World, tmp_path: Path) -> None:
    """It does not stage, so that a given stager or the default one does; change the tensors after the call."""

    def body(rank: Rank) -> None:
        ways: dict[str, Callable[[], Any]] = {
            "save": lambda: checkpoint.save(saved, storage_writer=writer),
            "default": lambda: checkpoint.async_save(saved, storage_writer=writer),
            "stager": lambda: checkpoint.async_save(saved, storage_writer=writer, async_stager=stager),
            "place": lambda: checkpoint.async_save(saved, storage_writer=writer, checkpoint_id=tmp_path / "other"),
        }
        for name, save in ways.items():
            saved, writer = state(rank, 1), Delegating(tmp_path / name)
            stager = BlockingAsyncStager()
            saving = save()
            for tensor in saved["sharded"], saved["deeper"]["tensor"]:
                tensor.zero_()
            if name != "save":
                saving.result()
            loaded = state(rank, -1)
            checkpoint.load(loaded, checkpoint_id=tmp_path / ("other" if name == "place" else name))
            assert_equal(whole(state(rank, 1)), whole(loaded), name)

    world.run(body)


@requirement(
    "RFSDP-CHECKPOINT-4103",
    "FileSystem takes paths that are text as it takes Path objects.",
    source=f"{SOURCE}.filesystem.FileSystem: 'path: str | os.PathLike'",
)
@pytest.mark.world(1)
def test_kinds_of_paths(world: World, tmp_path: Path) -> None:
    """Make a folder, write files, list, read, rename and remove them."""

    def body(rank: Rank) -> None:
        files = FileSystem()
        for kind in Path, str:
            folder = tmp_path / kind.__name__
            assert files.validate_checkpoint_id(kind(folder)), kind
            assert files.init_path(kind(folder)) == folder, kind
            for _ in range(2):
                files.mkdir(kind(folder / "deeper"))
            name: Any = files.concat_path(kind(folder), "file")
            assert name == folder / "file", kind
            assert not files.exists(kind(name)), kind
            with files.create_stream(kind(name), "wb") as stream:
                stream.write(b"written")
            assert files.exists(kind(name)), kind
            assert sorted(files.ls(kind(folder))) == [str(folder / "deeper"), str(name)], kind
            files.rename(kind(name), kind(folder / "renamed"))
            with files.create_stream(kind(folder / "renamed"), "rb") as stream:
                assert stream.read() == b"written", kind
            files.rm_file(kind(folder / "renamed"))
            assert os.listdir(folder) == ["deeper"], kind
        assert not files.validate_checkpoint_id("memory://there"), "a URL"

    world.run(body)
