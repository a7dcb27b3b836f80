"""Distributed checkpoints by former names, forms of calls, signatures and orders; plans that can't be right."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fixtures.states import assert_equal, whole
from harness import Rank, World, assert_on_ranks, requirement

SOURCE = "torch.distributed.checkpoint"
PLACEMENTS = {
    "rows, columns": [Shard(0), Shard(1)],
    "columns, rows": [Shard(1), Shard(0)],
    "rows twice": [Shard(0), Shard(0)],
    "columns once": [Replicate(), Shard(1)],
}


def state(rank: Rank, factor: int) -> dict[str, Any]:
    """Return tensors that are sharded in one or two dimensions of a mesh, and other values."""
    values = torch.arange(30.0, device=rank.device).view(5, 6) * factor
    mesh = rank.mesh(2, 2)
    return {
        **{name: distribute_tensor(values, mesh, how) for name, how in PLACEMENTS.items()},
        "deeper": {"tensor": values[1:] + 1, "step": factor},
    }


TOLD: list[tuple[str, bool]] = []
"""What a planner or a storage with a former signature was told in this process: whether the rank coordinates."""


class FormerPlanner(checkpoint.DefaultSavePlanner):
    """A planner that does not take what the storage says of itself."""

    def set_up_planner(self, state_dict: Any, is_coordinator: bool) -> None:  # type: ignore[override]
        TOLD.append(("planner", is_coordinator))
        super().set_up_planner(state_dict, None, is_coordinator)


class FormerWriter(checkpoint.FileSystemWriter):
    """A writer that is only told who coordinates."""

    def set_up_storage_writer(self, is_coordinator: bool) -> None:  # type: ignore[override]
        TOLD.append(("writer", is_coordinator))
        super().set_up_storage_writer(is_coordinator)


class FormerReader(checkpoint.FileSystemReader):
    """A reader that is only told who coordinates, and reads one file of metadata."""

    def read_metadata(self) -> Any:  # type: ignore[override]
        return super().read_metadata()

    def set_up_storage_reader(self, metadata: Any, is_coordinator: bool) -> None:  # type: ignore[override]
        TOLD.append(("reader", is_coordinator))
        super().set_up_storage_reader(metadata, is_coordinator)


WRITER, READER = checkpoint.FileSystemWriter, checkpoint.FileSystemReader
CALLS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "by position": (lambda s, at: checkpoint.save(s, WRITER(at)), lambda s, at: checkpoint.load(s, READER(at))),
    "former names": (
        lambda s, at: checkpoint.save_state_dict(s, WRITER(at)),
        lambda s, at: checkpoint.load_state_dict(s, READER(at)),
    ),
    "coordinated by rank 1": (
        lambda s, at: checkpoint.save_state_dict(s, WRITER(at), dist.group.WORLD, 1),
        lambda s, at: checkpoint.load_state_dict(s, READER(at), dist.group.WORLD, 3),
    ),
    "former signatures": (
        lambda s, at: checkpoint.save(s, storage_writer=FormerWriter(at), planner=FormerPlanner()),
        lambda s, at: checkpoint.load(s, storage_reader=FormerReader(at)),
    ),
}
"""Ways to save and to load."""


@requirement(
    "RFSDP-CHECKPOINT-4405",
    "A state that is sharded in several dimensions is saved and loaded by former names, positions or signatures.",
    source=f"{SOURCE}: save, load: storage_writer, storage_reader; save_state_dict, load_state_dict: coordinator_rank",
)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.world(4)
def test_former_calls(world: World, tmp_path: Path, call: str) -> None:
    """Save a state of a mesh of two dimensions, overwrite it, and load it."""
    save, load = CALLS[call]

    def body(rank: Rank) -> None:
        warnings.simplefilter("ignore")
        TOLD.clear()
        save(state(rank, 1), tmp_path)
        loaded = state(rank, -1)
        load(loaded, tmp_path)
        assert_equal(whole(state(rank, 1)), whole(loaded), call)
        kinds = ("planner", "writer", "reader") if call == "former signatures" else ()
        assert [(kind, rank.index == 0) for kind in kinds] == TOLD

    world.run(body)


class Moved(checkpoint.DefaultSavePlanner):
    """A planner that says of a rank's part that it lies elsewhere, or that it is of another size."""

    def __init__(self, moved: bool, **changes: tuple[int, ...]) -> None:
        super().__init__()
        self.moved, self.changes = moved, {name: torch.Size(sizes) for name, sizes in changes.items()}

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        if not self.moved:
            return plan
        items = []
        for item in plan.items:
            assert item.tensor_data is not None
            chunk = dataclasses.replace(item.tensor_data.chunk, **self.changes)
            items.append(dataclasses.replace(item, tensor_data=dataclasses.replace(item.tensor_data, chunk=chunk)))
        return dataclasses.replace(plan, items=items)


@requirement(
    "RFSDP-CHECKPOINT-4406",
    "A save whose parts overlap, leave the tensor or have not all of its elements is refused on every rank, with "
    "nothing to load.",
    source=f"{SOURCE}: DefaultSavePlanner; torch/distributed/checkpoint/default_planner.py: 'has overlapping chunks', "
    "'has out of bounds chunk', 'invalid fill tensor-volume'",
)
@pytest.mark.world(2)
def test_impossible_plans(world: World, tmp_path: Path) -> None:
    """Rank 1 has the last two of four rows, says its planner, or others; a right one saves in the same place later."""
    wrong: list[dict[str, tuple[int, ...]]] = [
        {"offsets": (0, 0)},
        {"offsets": (1, 0)},
        {"offsets": (3, 0)},
        {"offsets": (2, 1)},
        {"offsets": (-2, 0)},
        {"sizes": (2, 4)},
        {"sizes": (3, 3)},
        {"sizes": (1, 3)},
        {"sizes": (-2, -3)},
    ]

    def body(rank: Rank) -> None:
        made = {"t": distribute_tensor(torch.arange(12.0, device=rank.device).view(4, 3), rank.mesh(2), [Shard(0)])}
        for changes in [*wrong, {"offsets": (2, 0), "sizes": (2, 3)}]:
            save = {"checkpoint_id": tmp_path, "planner": Moved(rank.index == 1, **changes)}
            if changes in wrong:
                with pytest.raises(checkpoint.CheckpointException, match="global plan"):
                    checkpoint.save(dict(made), **save)
                assert not (tmp_path / ".metadata").exists(), f"{changes}"
            else:
                checkpoint.save(dict(made), **save)
        loaded = {"t": torch.zeros(4, 3, device=rank.device)}
        checkpoint.load(loaded, checkpoint_id=tmp_path)
        assert loaded["t"].flatten().tolist() == list(range(12))

    world.run(body)


class Agreed:
    """An object whose ranks add up a number when it is saved and when it is loaded."""

    def __init__(self, rank: Rank, number: int) -> None:
        self.rank, self.number = rank, number
        self.sums: list[int] = []

    def agree(self) -> int:
        """Return the sum of the ranks' numbers, and note it."""
        total = torch.tensor([self.number], device=self.rank.device)
        dist.all_reduce(total)
        self.sums.append(int(total))
        return self.sums[-1]

    def state_dict(self) -> dict[str, Any]:
        return {"sum": self.agree()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sums.append(state["sum"])
        self.agree()


@requirement(
    "RFSDP-CHECKPOINT-5301",
    "Loading asks the objects of a state in the same order on every rank, whichever order the ranks' dicts have.",
    source=f"{SOURCE}: load, stateful.Stateful; torch/distributed/checkpoint/state_dict_loader.py: 'all ranks load "
    "values in the same order'",
)
@pytest.mark.world(2)
def test_order_of_objects(world: World, tmp_path: Path) -> None:
    """Three objects sum over ranks as they are saved and as they are loaded; rank 1 has them in another order."""
    orders = "abc", "cab"

    def body(rank: Rank) -> dict[str, list[int]]:
        checkpoint.save({name: Agreed(rank, 10**i) for i, name in enumerate("abc")}, checkpoint_id=tmp_path)
        state = {name: Agreed(rank, 10 ** "abc".index(name)) for name in orders[rank.index]}
        checkpoint.load(state, checkpoint_id=tmp_path)
        return {name: state[name].sums for name in "abc"}

    assert_on_ranks([{"a": [2] * 3, "b": [20] * 3, "c": [200] * 3}] * 2, world.run(body))
