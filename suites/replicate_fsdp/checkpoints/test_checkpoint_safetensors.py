"""Distributed checkpoints in the format of safetensors: in shards or put together, of what, and saved again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor

from fixtures.states import assert_equal
from fixtures.tensors import numbers
from harness import Rank, World, requirement

SOURCE = "torch.distributed.checkpoint.HuggingFaceStorageWriter"


def save(state: dict[str, Any], folder: Path, group: dist.ProcessGroup | None = None, **options: Any) -> None:
    """Save what each rank has of a state."""
    writer = checkpoint.HuggingFaceStorageWriter(str(folder), save_distributed=True, **options)
    checkpoint.save(state, storage_writer=writer, process_group=group)


def load(like: dict[str, torch.Tensor], folder: Path) -> dict[str, torch.Tensor]:
    """Return tensors like the given ones with what was saved."""
    loaded = {name: torch.full_like(tensor, 0) for name, tensor in like.items()}
    try:
        checkpoint.load(loaded, storage_reader=checkpoint.HuggingFaceStorageReader(str(folder)))
    except checkpoint.CheckpointException as e:
        raise AssertionError(f"not loaded: {str(e).strip().splitlines()[-1]}") from None
    return loaded


VALUES = {
    "matrix": lambda: numbers(3, 2),
    "vector": lambda: numbers(3),
    "scalar": lambda: torch.tensor(2.5),
    "empty": lambda: numbers(0, 2),
    "bfloat16": lambda: numbers(3).bfloat16(),
    "float64": lambda: numbers(3).double(),
    "integers": lambda: torch.tensor([3, 4]),
    "truths": lambda: torch.tensor([True, False]),
    "complex": lambda: torch.complex(numbers(3), numbers(3)),
}
"""What is saved beside a sharded matrix."""


@requirement(
    "RFSDP-CHECKPOINT-7602",
    "Tensors of every shape and dtype are loaded from shards in safetensors as they were saved, put together or not.",
    source=f"{SOURCE}: save_distributed, enable_consolidation",
)
@pytest.mark.parametrize("what", VALUES)
@pytest.mark.parametrize("form", ["shards", "together"])
@pytest.mark.world(2)
def test_values(world: World, tmp_path: Path, form: str, what: str) -> None:
    """Save a tensor beside a sharded matrix, and load both."""

    def body(rank: Rank) -> None:
        state = {"w": numbers(5, 2), "x": VALUES[what]()}
        sharded = {"w": distribute_tensor(state["w"].to(rank.device), rank.mesh(), [Shard(0)]), "x": state["x"]}
        save(sharded, tmp_path, enable_consolidation=form == "together")
        assert_equal(state, load(state, tmp_path), "loaded")

    world.run(body)


@requirement(
    "RFSDP-CHECKPOINT-7603",
    "Tensors can be loaded from a checkpoint in safetensors, whatever else was in the state that was saved.",
    source=f"{SOURCE}; torch.distributed.checkpoint.save: 'state_dict'",
)
@pytest.mark.parametrize("what", ["nothing", "number", "text"])
@pytest.mark.world(2)
def test_beside_tensors(world: World, tmp_path: Path, what: str) -> None:
    """Save a sharded matrix with something beside it, or be refused, and load the matrix."""

    def body(rank: Rank) -> None:
        state = {"w": numbers(5, 2)}
        beside: dict[str, Any] = {"nothing": {}, "number": {"step": 3}, "text": {"name": "a"}}[what]
        sharded = distribute_tensor(state["w"].to(rank.device), rank.mesh(), [Shard(0)])
        try:
            save({"w": sharded, **beside}, tmp_path)
        except checkpoint.CheckpointException:
            return
        assert_equal(state, load(state, tmp_path), "loaded")

    world.run(body)


@requirement(
    "RFSDP-CHECKPOINT-7604",
    "A checkpoint in safetensors that replaces another one has nothing of that one.",
    source=f"{SOURCE}: path; torch.distributed.checkpoint.FileSystemWriter: overwrite",
)
@pytest.mark.parametrize("again", ["by all", "by one"])
@pytest.mark.parametrize("form", ["shards", "together"])
@pytest.mark.world(2)
def test_saved_again(world: World, tmp_path: Path, form: str, again: str) -> None:
    """Save a sharded matrix with all ranks, then a shorter one with all or one, at the same place, and load that."""

    def body(rank: Rank) -> None:
        alone, everyone = rank.subgroup([0]), list(range(rank.size))
        for rows, ranks in ((6, everyone), (4, everyone if again == "by all" else [0])):
            if rank.index in ranks:
                mesh = DeviceMesh(rank.device.type, ranks)
                state = {"w": distribute_tensor(numbers(rows, 2).to(rank.device) * rows, mesh, [Shard(0)])}
                group = None if ranks == everyone else alone
                save(state, tmp_path, group, enable_consolidation=form == "together")
            dist.barrier()
        right = {"w": numbers(4, 2) * 4}
        assert_equal(right, load(right, tmp_path), "loaded")

    world.run(body)


@requirement(
    "RFSDP-CHECKPOINT-7605",
    "Put together, a checkpoint in safetensors can be loaded, whatever other names the table of files has.",
    source=f"{SOURCE}: fqn_to_index_mapping, enable_consolidation",
)
@pytest.mark.parametrize("names", ["saved", "others too", "another file too"])
@pytest.mark.world(2)
def test_table_of_files(world: World, tmp_path: Path, names: str) -> None:
    """Save two sharded matrices into two files, and load them."""

    def body(rank: Rank) -> None:
        state = {"a": numbers(5, 2), "b": numbers(4, 3)}
        sharded = {n: distribute_tensor(t.to(rank.device), rank.mesh(), [Shard(0)]) for n, t in state.items()}
        table = {"a": 1, "b": 2, **{"saved": {}, "others too": {"c": 2}, "another file too": {"c": 3}}[names]}
        save(sharded, tmp_path, enable_consolidation=True, fqn_to_index_mapping=table)
        assert_equal(state, load(state, tmp_path), "loaded")

    world.run(body)
