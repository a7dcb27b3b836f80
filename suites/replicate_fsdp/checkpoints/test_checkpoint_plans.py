"""Distributed checkpoints: plans that are kept between saves, the metadata that a save returns, and loads that fail."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fixtures.states import WAYS_TO_SAVE, assert_equal
from harness import Rank, World, requirement
from harness.stacks.limit import runs_with

SOURCE = "torch.distributed.checkpoint"


class Faulty(checkpoint.DefaultSavePlanner):
    """A planner that keeps its plans, and fails in one of its methods."""

    def __init__(self, failing: str) -> None:
        super().__init__(enable_plan_caching=True)
        self.failing = failing

    def fail(self, where: str) -> None:
        """Raise an error if it is due."""
        if where == self.failing:
            raise OSError(f"disk quota: {where}")

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.fail("setting up")

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        self.fail("a rank's plan")
        return plan

    def create_global_plan(self, all_plans: Any) -> Any:
        self.fail("the plan of all")
        return super().create_global_plan(all_plans)

    def finish_plan(self, new_plan: Any) -> Any:
        plan = super().finish_plan(new_plan)
        self.fail("the finished plan")
        return plan

    def resolve_data(self, write_item: Any) -> Any:
        self.fail("writing")
        return super().resolve_data(write_item)


def states(step: int) -> dict[str, list[dict[str, Any]]]:
    """Return what each of two ranks saves: at first, with more of one rank, with a larger tensor, and with less."""

    def own(rank: int, size: int = 3) -> dict[str, Any]:
        return {f"own{rank}": torch.full((size,), 10.0 * step + rank), "both": torch.arange(4.0) + step, "step": step}

    return {
        "first": [own(0), own(1)],
        "more": [own(0), own(1) | {"added": torch.ones(2) * step}],
        "grown": [own(0, 5), own(1)],
        "less": [{"step": step}, own(1)],
    }


SAVES = [
    ("the plan of all", 0, "-first first first"),
    ("the plan of all", 0, "first -more more first"),
    ("the plan of all", 0, "first -more grown"),
    ("a rank's plan", 0, "-first -first more"),
    ("a rank's plan", 1, "first -grown more grown"),
    ("setting up", 1, "first -more first"),
    ("the finished plan", 0, "-first first less"),
    ("the finished plan", 1, "first first -first first"),
    ("writing", 0, "-more first first"),
    ("writing", 1, "more -grown less more"),
    ("the folder", 0, "-first first -more more"),
]
"""Where a save fails and on which rank, and what is saved in turn: if there is a minus, the save fails."""


@requirement(
    "RFSDP-CHECKPOINT-511",
    "With plan caching, a checkpoint has what all ranks save, also after saves of other states or saves that failed.",
    source=f"{SOURCE}.DefaultSavePlanner: enable_plan_caching",
)
@pytest.mark.skipif(runs_with("<2.12"), reason="before 2.12, a plan is kept even if the save fails")
@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
@pytest.mark.world(2)
def test_kept_plans(world: World, tmp_path: Path) -> None:
    """Save the same state, one that has more, a larger tensor or less, in turn; a failure is that of one rank."""

    def body(rank: Rank) -> None:
        there = tmp_path / "there"
        checkpoint.save({"step": 0}, checkpoint_id=there)
        for number, (where, at, names) in enumerate(SAVES):
            kind = type(f"Faulty{number}", (Faulty,), {})  # plans are kept for each name of a class
            for step, name in enumerate(names.split()):
                what = f"{where} on rank {at}, {names}, step {step}"
                every = states(step)[name.lstrip("-")]
                fails = name.startswith("-")
                folder = there if fails and where == "the folder" else tmp_path / f"{number}-{step}"
                options = {"overwrite": folder != there, "sync_files": False}
                saved: dict[str, Any] = {
                    "storage_writer": checkpoint.FileSystemWriter(folder, **options),
                    "planner": kind(where if fails and rank.index == at else ""),
                }
                if fails:
                    with pytest.raises(checkpoint.CheckpointException, match=r"disk quota|already exists"):
                        checkpoint.save(every[rank.index], **saved)
                    continue
                checkpoint.save(every[rank.index], **saved)
                right = every[0] | every[1]
                loaded = {k: torch.zeros_like(v) if isinstance(v, torch.Tensor) else -1 for k, v in right.items()}
                checkpoint.load(loaded, checkpoint_id=folder)
                assert_equal(right, loaded, what)

    world.run(body)


@requirement(
    "RFSDP-CHECKPOINT-512",
    "The metadata that a save returns on every rank are those that a reader of the checkpoint finds.",
    source=f"{SOURCE}: save, 'Metadata object for the saved checkpoint', async_save, FileSystemReader.read_metadata",
)
@pytest.mark.skipif(runs_with("<2.12"), reason="before 2.12, the files and the version are not returned")
@pytest.mark.world(2)
def test_returned_metadata(world: World, tmp_path: Path) -> None:
    """Save with every option of files, planners, groups and threads, asynchronously, and by each rank alone."""

    def body(rank: Rank) -> None:
        state = {**states(1)["more"][rank.index], "deep": {"listed": [torch.ones(2, rank.size), "text"]}}
        ways: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
            "plain": ({}, {}),
            "files": ({}, {"single_file_per_rank": False}),
            "threads": ({}, {"thread_count": 3}),
            "flat": ({"planner": checkpoint.DefaultSavePlanner(flatten_state_dict=False)}, {}),
            "kept": ({"planner": checkpoint.DefaultSavePlanner(enable_plan_caching=True)}, {}),
            "kept again": ({"planner": checkpoint.DefaultSavePlanner(enable_plan_caching=True)}, {}),
            "group": ({"process_group": rank.group}, {}),
            "apart": ({"no_dist": True}, {}),
            "uncoordinated": ({"use_collectives": False}, {}),
        }
        for (name, (options, of_files)), save in zip(
            ways.items(), itertools.cycle(WAYS_TO_SAVE.values()), strict=False
        ):
            folder = tmp_path / (f"{name}{rank.index}" if name == "apart" else name)
            writer = checkpoint.FileSystemWriter(folder, sync_files=False, **of_files)
            saved = save(state, storage_writer=writer, **options)
            dist.barrier()
            which = {"rank": rank.index} if name == "uncoordinated" else {}
            read = checkpoint.FileSystemReader(folder).read_metadata(**which)
            for field in "state_dict_metadata", "planner_data", "storage_data", "version":
                found = getattr(read, field)
                assert getattr(saved, field) == found, f"{name}: {field}"
                assert found or (field, name) == ("planner_data", "flat"), f"{name}: {field}"
            for field in "checkpoint_id", "save_id":
                assert getattr(saved.storage_meta, field) == getattr(read.storage_meta, field), f"{name}: {field}"
            assert saved.storage_meta.checkpoint_id == folder, name

    world.run(body)


@requirement(
    "RFSDP-CHECKPOINT-513",
    "The error for a load of metadata that are missing or cannot be read says for every rank why, and nothing is "
    "loaded.",
    source=f"{SOURCE}: load, CheckpointException.failures",
)
@pytest.mark.skipif(runs_with("<2.12"), reason="before 2.12, the error does not say why")
@pytest.mark.world(2)
def test_unreadable(world: World, tmp_path: Path) -> None:
    """Load from no folder, an empty one, and metadata that are cut off or a folder, by all ranks and by each alone."""

    def body(rank: Rank) -> None:
        good, files = tmp_path / "good", checkpoint.FileSystemReader
        checkpoint.save({"a": torch.ones(2), "b": 1}, checkpoint_id=good)
        for name in "no folder", "an empty folder", "nothing", "cut off", "a folder":
            folder = tmp_path / name
            metadata = folder / ".metadata"
            if rank.index == 0 and name != "no folder":
                folder.mkdir()
                if name == "a folder":
                    metadata.mkdir()
                elif name != "an empty folder":
                    metadata.write_bytes((good / ".metadata").read_bytes()[: 40 if name == "cut off" else 0])
            dist.barrier()
            for alone in False, True:
                ranks = [0] if alone else [0, 1]
                reasons = {r: [why(files(folder)), why(files(folder), rank=r)] for r in ranks}
                state: dict[str, Any] = {"a": torch.zeros(2), "b": 0}
                with pytest.raises(checkpoint.CheckpointException) as caught:
                    checkpoint.load(state, checkpoint_id=folder, no_dist=alone)
                assert sorted(caught.value.failures) == ranks, name
                for r, (error, _) in caught.value.failures.items():
                    for reason in reasons[r]:
                        assert reason in str(error), f"{name}, {alone=}: {error}"
                        assert reason in str(caught.value), f"{name}, {alone=}: {caught.value}"
                assert_equal({"a": torch.zeros(2), "b": 0}, state, f"{name}, {alone=}")
                checkpoint.load(state, checkpoint_id=good, no_dist=alone)
                assert_equal({"a": torch.ones(2), "b": 1}, state, f"{name}, {alone=}: afterwards")

    world.run(body)


def why(reader: Any, **of_rank: int) -> str:
    """Return why a reader cannot read metadata."""
    with pytest.raises((OSError, EOFError, pickle.UnpicklingError)) as caught:
        reader.read_metadata(**of_rank)
    return str(caught.value)


SIZES: dict[str, tuple[tuple[int, ...], list[tuple[int, ...]]]] = {
    "vector": ((8,), [(4,), (9,), (0,), (2, 4), (8, 1), ()]),
    "matrix": ((4, 6), [(2, 6), (4, 3), (6, 4), (24,), (5, 6)]),
    "scalar": ((), [(1,), (2,)]),
    "empty": ((0, 3), [(1, 3), (0, 2)]),
}
"""Sizes of tensors that are saved, and others into which they are loaded."""


@requirement(
    "RFSDP-CHECKPOINT-1709",
    "Loading into a tensor of another size than the saved one raises an error that has its name, while no tensor "
    "changes.",
    source=f"{SOURCE}: load; torch/distributed/checkpoint/default_planner.py: 'Size mismatch'",
)
@pytest.mark.parametrize("partial", [False, True], ids=["all", "partial"])
@pytest.mark.world(2)
def test_other_sizes(world: World, tmp_path: Path, partial: bool) -> None:
    """Load into smaller and larger tensors, and ones of other dimensions, that are sharded or not."""

    def body(rank: Rank) -> None:
        mesh = rank.mesh()

        def kinds(size: tuple[int, ...]) -> dict[str, torch.Tensor]:
            made = {"plain": torch.ones(size, device=rank.device)}
            return made | ({"sharded": distribute_tensor(made["plain"], mesh, [Shard(0)])} if size else {})

        saved = {f"{name} {kind}": made for name, (size, _) in SIZES.items() for kind, made in kinds(size).items()}
        checkpoint.save({"kept": torch.ones(2), **saved}, checkpoint_id=tmp_path)
        for name, (_, others) in SIZES.items():
            for size in others:
                for kind, made in kinds(size).items():
                    if (which := f"{name} {kind}") not in saved:
                        continue
                    state = {"kept": torch.zeros(2), which: made.mul_(2)}
                    planner = checkpoint.DefaultLoadPlanner(allow_partial_load=partial)
                    with pytest.raises(checkpoint.CheckpointException, match=which):
                        checkpoint.load(state, checkpoint_id=tmp_path, planner=planner)
                    local = [each.to_local() if isinstance(each, DTensor) else each for each in state.values()]
                    assert [each.unique().tolist() for each in local] in ([[0.0], [2.0]], [[0.0], []]), (which, size)

    world.run(body)


class Told(checkpoint.DefaultSavePlanner):
    """A planner that keeps its plans, and tells whether this rank sent one and got one."""

    def __init__(self) -> None:
        super().__init__(enable_plan_caching=True)
        self.sent = self.received = True

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        self.sent = plan.usable
        return plan

    def finish_plan(self, new_plan: Any) -> Any:
        self.received = new_plan.usable
        return super().finish_plan(new_plan)


class Nowhere(checkpoint.StorageWriter):
    """A storage that keeps nothing."""

    def reset(self, checkpoint_id: Any = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **options: Any) -> None: ...

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: Any) -> Any:
        return plans

    def write_data(self, plan: Any, planner: Any) -> Any:
        future: Any = torch.futures.Future()
        future.set_result([])
        return future

    def finish(self, metadata: Any, results: Any) -> None: ...

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def of_rank(rank: Rank) -> dict[str, Any]:
    """Return what a rank saves."""
    values = torch.arange(4.0, device=rank.device)
    return {
        f"own{rank.index}": values.reshape(2, 2),
        f"text{rank.index}": "first",
        "sharded": distribute_tensor(values, rank.mesh(), [Shard(0)]),
    }


CHANGES: dict[str, tuple[Callable[[Rank, int], dict[str, Any]], tuple[int, ...]]] = {
    "nothing": (lambda rank, n: {}, ()),
    "values": (lambda rank, n: {f"own{n}": torch.ones(2, 2) * 7, f"text{n}": "another"}, ()),
    "a tensor more": (lambda rank, n: {f"more{n}": torch.ones(2)} if n == 1 else {}, (1,)),
    "a text more": (lambda rank, n: {f"more{n}": "more"} if n == 0 else {}, (0,)),
    "one less": (lambda rank, n: {f"text{n}": None} if n == 1 else {}, (1,)),
    "another name": (lambda rank, n: {f"text{n}": None, f"texts{n}": "first"} if n == 0 else {}, (0,)),
    "another size": (lambda rank, n: {f"own{n}": torch.ones(2, 3)} if n == 1 else {}, (1,)),
    "other dimensions": (lambda rank, n: {f"own{n}": torch.ones(4)}, (0, 1)),
    "a tensor as text": (lambda rank, n: {f"own{n}": "a tensor"} if n == 0 else {}, (0,)),
    "text as a tensor": (lambda rank, n: {f"text{n}": torch.ones(1)} if n == 0 else {}, (0,)),
    "other shards": (
        lambda rank, n: {"sharded": distribute_tensor(torch.arange(4.0), rank.mesh(), [Replicate()])},
        (0, 1),
    ),
    "another size of all": (
        lambda rank, n: {"sharded": distribute_tensor(torch.arange(6.0), rank.mesh(), [Shard(0)])},
        (0, 1),
    ),
}
"""What another save changes in the state of a rank, where None is nothing, and the ranks whose plans it changes."""


@requirement(
    "RFSDP-CHECKPOINT-4100",
    "With plan caching, a rank sends its plan again only if names, sizes, shards or kinds of what it saves change.",
    source=f"{SOURCE}.DefaultSavePlanner: enable_plan_caching; SavePlan: usable",
)
@pytest.mark.world(2)
def test_sent_plans(world: World) -> None:
    """Save twice, with and without a change by one rank or both, and once more as before."""

    def body(rank: Rank) -> None:
        for number, (name, (change, changed)) in enumerate(CHANGES.items()):
            kind = type(f"Told{number}", (Told,), {})  # plans are kept for each name of a class
            other = of_rank(rank) | change(rank, rank.index)
            other = {key: value for key, value in other.items() if value is not None}
            for step, (state, sends) in enumerate(
                ((of_rank(rank), True), (other, rank.index in changed), (other, False))
            ):
                planner = kind()
                checkpoint.save(state, storage_writer=Nowhere(), planner=planner)
                assert planner.sent == sends, f"{name}, step {step}"
                assert planner.received == sends or (changed and step == 1), f"{name}, step {step}"

    world.run(body)


class Misplaced(checkpoint.DefaultSavePlanner):
    """A planner that moves the parts of sharded tensors by some rows or columns, or leaves them out."""

    def __init__(self, by: tuple[int, int] | None) -> None:
        super().__init__()
        self.by = by

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        items = list[Any]()
        for item in plan.items:
            chunk: Any = item.tensor_data and item.tensor_data.chunk
            if chunk and "sharded" in item.index.fqn:
                if self.by is None:
                    continue
                offsets = torch.Size(map(sum, zip(chunk.offsets, self.by, strict=True)))
                data = dataclasses.replace(item.tensor_data, chunk=dataclasses.replace(chunk, offsets=offsets))
                item = dataclasses.replace(
                    item, tensor_data=data, index=dataclasses.replace(item.index, offset=offsets)
                )
            items.append(item)
        self.plan = dataclasses.replace(plan, items=items)
        return self.plan


MISPLACED: dict[str, tuple[int, dict[int, tuple[int, int] | None]]] = {
    "rows overlap": (0, {1: (-1, 0)}),
    "columns overlap": (1, {1: (0, -2)}),
    "rows above overlap": (0, {0: (1, 0)}),
    "outside": (0, {1: (1, 0)}),
    "columns outside": (1, {0: (0, 3), 1: (0, 1)}),
    "negative rows": (0, {0: (-1, 0)}),
    "a part is missing": (0, {1: None}),
    "the first part is missing": (1, {0: None}),
}
"""The dimension of 4 rows and 6 columns that is sharded, and how a rank's part is moved, where None leaves it out."""


@requirement(
    "RFSDP-CHECKPOINT-4104",
    "A save whose plans overlap, miss a part of a tensor or leave its bounds raises an error with its name on each "
    "rank.",
    source=f"{SOURCE}: SavePlanner.create_global_plan; torch/distributed/checkpoint/default_planner.py: "
    "'has overlapping chunks', 'has out of bounds chunk', 'invalid fill tensor-volume'",
)
@pytest.mark.skipif(runs_with("<2.12"), reason="before 2.12, the error does not name the tensor")
@pytest.mark.world(2)
def test_misplaced_parts(world: World) -> None:
    """Move or leave out a part of one rank, by rows or columns; afterwards save with all parts in their places."""

    def body(rank: Rank) -> None:
        for name, (dimension, moved) in MISPLACED.items():
            whole = torch.arange(24.0, device=rank.device).reshape(4, 6)
            sharded = distribute_tensor(whole, rank.mesh(), [Shard(dimension)])
            state = {"step": 1, "scalar": torch.ones((), device=rank.device), "sharded": sharded}
            planner = Misplaced(moved.get(rank.index, (0, 0)))
            with pytest.raises(checkpoint.CheckpointException) as caught:
                checkpoint.save(state, storage_writer=Nowhere(), planner=planner)
            assert "sharded" in str(caught.value), f"{name}: {caught.value}"
            checkpoint.save(state, storage_writer=Nowhere(), planner=Misplaced((0, 0)))

    world.run(body)
