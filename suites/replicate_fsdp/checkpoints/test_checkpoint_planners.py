"""Planners of one's own that change what a checkpoint has, existing checkpoints, and files of torch.save converted."""

from __future__ import annotations

import io
import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint.format_utils import torch_save_to_dcp
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.tensor import Shard, distribute_tensor

from fixtures.states import WAYS_TO_SAVE, assert_equal, whole
from harness import Rank, World, requirement

SOURCE = "torch.distributed.checkpoint"
BYTES = WriteItemType.BYTE_IO


def state(rank: Rank, factor: int) -> dict[str, Any]:
    """Return a sharded tensor, a plain one, and other values, some of them in containers."""
    rows = torch.arange(10.0, device=rank.device).view(5, 2) * factor
    return {
        "rows": distribute_tensor(rows, rank.mesh(), [Shard(0)]),
        "step": factor,
        "deeper": {"plain": torch.ones(3, device=rank.device) * factor, "list": [f"text {factor}", rows[1:] + 1]},
    }


def saved(at: Path) -> dict[str, Any]:
    """Return the names in a checkpoint, with the dtypes of tensors."""
    metadata = checkpoint.FileSystemReader(at).read_metadata().state_dict_metadata
    return {name: getattr(getattr(one, "properties", None), "dtype", None) for name, one in metadata.items()}


class Renaming(checkpoint.DefaultSavePlanner):
    """Save everything by another name."""

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner({f"new_{key}": v for key, v in state_dict.items()}, storage_meta, is_coordinator)


class RenamingBack(checkpoint.DefaultLoadPlanner):
    """Load everything by that name."""

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        renamed = {f"new_{key}": value for key, value in state_dict.items()}
        super().set_up_planner(renamed, metadata, is_coordinator)
        self.own = state_dict

    def load_bytes(self, read_item: Any, value: Any) -> None:
        super().load_bytes(read_item, value)
        for name, one in self.original_state_dict.items():
            self.own[name.removeprefix("new_")] = one


class Narrow(checkpoint.DefaultSavePlanner):
    """Save tensors in a narrower dtype."""

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None:
                item.tensor_data.properties.dtype = torch.float16
        return plan

    def resolve_data(self, write_item: Any) -> Any:
        data: Any = super().resolve_data(write_item)
        return data if write_item.type == BYTES else data.to(torch.float16)


class Changing(checkpoint.DefaultSavePlanner):
    """Save tensors times two, and other values in a pair with their names."""

    def lookup_object(self, index: Any) -> Any:
        found = super().lookup_object(index)
        return found if isinstance(found, torch.Tensor) else (index.fqn, found)

    def transform_object(self, write_item: Any, object: Any) -> Any:
        return super().transform_object(write_item, object if write_item.type == BYTES else object * 2)


class ChangingBack(checkpoint.DefaultLoadPlanner):
    """Load halves of tensors, through memory of its own, and the second of each pair."""

    def transform_tensor(self, read_item: Any, tensor: torch.Tensor) -> Any:
        return torch.full_like(super().transform_tensor(read_item, tensor), torch.nan)

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        own = self.lookup_tensor(read_item.dest_index)
        super().transform_tensor(read_item, own).copy_(tensor / 2)

    def load_bytes(self, read_item: Any, value: Any) -> None:
        name, own = torch.load(value, weights_only=True)
        assert name == read_item.dest_index.fqn
        again = io.BytesIO()
        torch.save(own, again)
        again.seek(0)
        super().load_bytes(read_item, again)


PLANNERS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "renamed": (Renaming, RenamingBack),
    "narrow": (Narrow, checkpoint.DefaultLoadPlanner),
    "changed": (Changing, ChangingBack),
}
NAMES = ("rows", "step", "deeper.plain", "deeper.list.0", "deeper.list.1")


@requirement(
    "RFSDP-CHECKPOINT-5487",
    "A checkpoint has what a planner makes of names, tensors or other values, and a state gets what one makes of them.",
    source=f"{SOURCE}: SavePlanner: 'Rewriting state_dict', 'Modifying local plan and lookup in tandem'; LoadPlanner; "
    "DefaultSavePlanner.lookup_object, transform_object; DefaultLoadPlanner.transform_tensor, commit_tensor",
)
@pytest.mark.world(2)
def test_own_planners(world: World, tmp_path: Path) -> None:
    """Save twice at once with kept plans, or later with two threads or in several files; load with each planner."""
    written: tuple[dict[str, Any], ...] = ({}, {"thread_count": 2}, {"single_file_per_rank": False})

    def body(rank: Rank) -> None:
        warnings.simplefilter("ignore")
        for how, (number, files) in itertools.product(PLANNERS, enumerate(written)):
            save, load = PLANNERS[how]
            later = number > 0
            what = f"{how}, {files}, {later=}"
            for step in range(1 + (number == 0)):
                at = tmp_path / f"{how} {number} {step}"
                given = state(rank, step + 1)
                options: dict[str, Any] = {
                    "storage_writer": checkpoint.FileSystemWriter(at, sync_files=False, **files),
                    "planner": save(enable_plan_caching=number == 0),
                }
                WAYS_TO_SAVE["async_save" if later else "save"](given, **options)
                assert_equal(whole(state(rank, step + 1)), whole(given), f"{what}: the state that is saved")
                dtype = torch.float16 if how == "narrow" else torch.float32
                prefix = "new_" if how == "renamed" else ""
                tensors = ("rows", "deeper.plain", "deeper.list.1")
                assert saved(at) == {prefix + name: dtype if name in tensors else None for name in NAMES}, what
                loaded = state(rank, -7)
                checkpoint.load(loaded, checkpoint_id=at, planner=load())
                assert_equal(whole(state(rank, step + 1)), whole(loaded), what)
        checkpoint.load(loaded, checkpoint_id=at)  # the changed one as it is
        assert whole(loaded)["step"] == ("step", 1)
        assert loaded["deeper"]["plain"].tolist() == [2.0] * 3
        assert loaded["rows"].full_tensor().flatten().tolist() == list(range(0, 20, 2))

    world.run(body)


@requirement(
    "RFSDP-CHECKPOINT-5488",
    "A writer with overwrite=False refuses a place that has a checkpoint on every rank, and leaves that as it is.",
    source=f"{SOURCE}.FileSystemWriter: overwrite: 'Whether to allow overwriting existing checkpoints'",
)
@requirement(
    "RFSDP-CHECKPOINT-5489",
    "A save in a place that has a checkpoint replaces it by default, so that a load finds nothing of the former one.",
    source=f"{SOURCE}.FileSystemWriter: overwrite: 'Defaults to True'",
)
@requirement(
    "RFSDP-CHECKPOINT-5490",
    "torch_save_to_dcp makes of a file of torch.save a checkpoint of all tensors and values, which any rank loads.",
    source="torch.distributed.checkpoint.format_utils.torch_save_to_dcp",
)
@pytest.mark.world(2)
def test_existing(world: World, tmp_path: Path) -> None:
    """Save two states with one writer or with two, at once or later, and convert a file to load into shards."""

    def body(rank: Rank) -> None:
        warnings.simplefilter("ignore")

        def save(given: Any, writer: Any, later: bool) -> None:
            WAYS_TO_SAVE["async_save" if later else "save"](given, storage_writer=writer)

        for number, (later, same) in enumerate(itertools.product((False, True), repeat=2)):
            at = tmp_path / str(number)
            writers = [checkpoint.FileSystemWriter(at, overwrite=False) for _ in range(2)]
            save(state(rank, 1), writers[0], later)
            before = {path.name: path.read_bytes() for path in at.iterdir()}
            with pytest.raises(checkpoint.CheckpointException) as refused:
                save({"rows": state(rank, 2)["rows"]}, writers[0 if same else 1], later)
            assert sorted(refused.value.failures) == [0, 1]
            assert "already exists" in str(refused.value)
            dist.barrier()
            assert {path.name: path.read_bytes() for path in at.iterdir()} == before
            loaded = state(rank, -7)
            checkpoint.load(loaded, checkpoint_id=at)
            assert_equal(whole(state(rank, 1)), whole(loaded), f"{later=}, {same=}")
            moved = tmp_path / f"{number} elsewhere"
            checkpoint.save(state(rank, 3), storage_writer=writers[0], checkpoint_id=moved)
            assert set(saved(moved)) == set(NAMES)
            save({"other": torch.ones(2), "rows": state(rank, 2)["rows"]}, checkpoint.FileSystemWriter(at), later)
            assert set(saved(at)) == {"rows", "other"}
            part = {"rows": state(rank, -7)["rows"]}
            checkpoint.load(part, checkpoint_id=at)
            assert_equal(whole({"rows": state(rank, 2)["rows"]}), whole(part), f"{later=}, {same=}, overwritten")
        right: Any = whole(state(rank, 5))
        plain = {**right, "empty": {}, "half": torch.ones(2, dtype=torch.bfloat16), "none": None}
        if rank.index == 1:
            torch.save(plain, tmp_path / "file.pt")
            torch_save_to_dcp(tmp_path / "file.pt", tmp_path / "converted")
            assert saved(tmp_path / "converted")["half"] == torch.bfloat16
        dist.barrier()
        loaded = {**state(rank, -7), "half": torch.zeros(2, dtype=torch.bfloat16), "none": 1}
        checkpoint.load(loaded, checkpoint_id=tmp_path / "converted")
        plain.pop("empty")
        assert_equal(plain, whole(loaded), "converted")

    world.run(body)
