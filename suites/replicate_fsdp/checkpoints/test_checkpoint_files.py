"""What is in the files of a checkpoint: no more than what is saved, in fair shares, with an entry for each tensor."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor

from fixtures.states import WAYS_TO_SAVE
from harness import Rank, World, requirement

SOURCE = "torch.distributed.checkpoint"
WRITERS: dict[str, dict[str, Any]] = {
    "one file": {},
    "two threads": {"thread_count": 2},
    "a file for each": {"single_file_per_rank": False},
}
"""Options of a writer."""
OVERHEAD = 8192
"""Bytes of a file or an entry besides the values of tensors, at the most: names, sizes, alignment."""


def parts(rank: Rank) -> dict[str, Any]:
    """Return small parts of tensors of 256 KiB and more: views of every kind, also of a shard and of a replica."""
    large = torch.arange(65536.0, device=rank.device)
    layer: Any = fully_shard(nn.Linear(4, 65537 // 4, bias=False, device=rank.device), mesh=rank.mesh())
    return {
        "first": large[:4],
        "last": large[-4:],
        "every other": large[:8:2],
        "rows": large.view(256, 256)[1:3, :4],
        "turned": large.view(256, 256)[:4, :2].T,
        "one": large[5],
        "whole numbers": large.long()[7:9],
        "in a list": [large[8:12], {"deeper": large[12:16]}],
        "a row of a shard": layer.weight[:2].detach(),
        "replicated": distribute_tensor(large, rank.mesh(), [Replicate()])[:4],
    }


@requirement(
    "RFSDP-CHECKPOINT-4880",
    "The files of a checkpoint have the values that are saved, but not the rest of the memory of which they are views.",
    source=f"{SOURCE}.FileSystemWriter; torch/distributed/checkpoint/filesystem.py: 'creates a new tensor with minimal "
    "storage'",
)
@pytest.mark.world(2)
def test_views(world: World, tmp_path: Path) -> None:
    """Save each part of a larger tensor by itself, at once or later, with every kind of writer in turn."""

    def body(rank: Rank) -> None:
        ways = itertools.cycle(itertools.product(WRITERS.items(), WAYS_TO_SAVE.items()))
        for (name, part), ((kind, options), (when, save)) in zip(parts(rank).items(), ways, strict=False):
            folder = tmp_path / name
            save({"part": part}, storage_writer=checkpoint.FileSystemWriter(folder, sync_files=False, **options))
            dist.barrier()
            sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
            assert sum(sizes.values()) < OVERHEAD * len(sizes), f"{name}, {kind}, {when}: {sizes}"

    world.run(body)


SIZES: dict[str, list[int]] = {
    "alike": [16] * 6,
    "weights and biases": [64, 1] * 4,
    "one large": [96, 16, 16, 16, 16, 16],
    "growing": [8, 16, 24, 32, 40, 48],
    "shrinking": [48, 40, 32, 24, 16, 8],
}
"""Sizes of tensors in KiB."""


@requirement(
    "RFSDP-CHECKPOINT-4881",
    "Ranks share the writing of what each of them has by its bytes, or the lowest one writes all if it is to.",
    source=f"{SOURCE}.DefaultSavePlanner: dedup_save_to_lowest_rank; "
    "torch/distributed/checkpoint/_dedup_save_plans.py: 'only the smallest SavePlan in terms of planned storage'",
)
@pytest.mark.world(2)
def test_shares(world: World, tmp_path: Path) -> None:
    """Save plain tensors or replicated DTensors of several sizes; shares differ by one tensor at the most."""

    def body(rank: Rank) -> None:
        for (name, sizes), lowest in itertools.product(SIZES.items(), (False, True)):
            made = {f"{i}": torch.zeros(size * 256, device=rank.device) for i, size in enumerate(sizes)}
            if name in ("growing", "weights and biases"):
                made = {key: distribute_tensor(each, rank.mesh(), [Replicate()]) for key, each in made.items()}
            folder = tmp_path / f"{name} {lowest}"
            checkpoint.save(
                dict(made),
                storage_writer=checkpoint.FileSystemWriter(folder, sync_files=False),
                planner=checkpoint.DefaultSavePlanner(dedup_save_to_lowest_rank=lowest),
            )
            dist.barrier()
            files = [folder.glob(f"__{number}_*") for number in range(rank.size)]
            shares = [sum(file.stat().st_size for file in of_rank) / 1024 for of_rank in files]
            slack = OVERHEAD * len(sizes) / 1024 / 4
            if lowest:
                assert shares[0] >= sum(sizes), f"{name}, by the lowest rank: {shares}"
                assert shares[1] <= slack, f"{name}, by the lowest rank: {shares}"
            else:
                assert abs(shares[0] - shares[1]) <= max(sizes) + slack, f"{name}: {shares}"

    world.run(body)


def nested(value: Any) -> dict[str, Any]:
    """Return a value in dicts and lists of one to three levels, beside text and numbers."""
    return {
        "alone": value,
        "dict": {"inner": value, "text": "a"},
        "dicts": {"outer": {"inner": value}, "number": 1},
        "list": [value, 2, value],
        "list of dicts": [{"inner": value, "text": "b"}, {"inner": value}],
        "list of lists": [[value], [3, value]],
        "dict of lists": {"inner": [value, {"deeper": value}]},
        "list of dicts of lists": [{"inner": [value]}, "c"],
        "list of dicts of dicts": [{"inner": {"deeper": value}}],
    }


NAMES = {
    "alone",
    "dict.inner",
    "dicts.outer.inner",
    "list.0",
    "list.2",
    "list of dicts.0.inner",
    "list of dicts.1.inner",
    "list of lists.0.0",
    "list of lists.1.1",
    "dict of lists.inner.0",
    "dict of lists.inner.1.deeper",
    "list of dicts of lists.0.inner.0",
    "list of dicts of dicts.0.inner.deeper",
}


@requirement(
    "RFSDP-CHECKPOINT-4882",
    "A checkpoint has an entry with the size and dtype of each tensor, whichever dicts or lists it is in.",
    source=f"{SOURCE}: DefaultSavePlanner: flatten_state_dict; metadata.TensorStorageMetadata; "
    "torch/distributed/checkpoint/_nested_dict.py: 'Flatten state_dict made of nested dicts and lists'",
)
@pytest.mark.world(2)
def test_entries(world: World, tmp_path: Path) -> None:
    """Save a plain tensor, a sharded one, and one without dimensions in dicts and lists of several levels."""

    def body(rank: Rank) -> None:
        layer: Any = fully_shard(nn.Linear(2, 3, device=rank.device), mesh=rank.mesh())
        values = {
            "plain": torch.ones(3, dtype=torch.bfloat16, device=rank.device),
            "sharded": layer.weight,
            "number": torch.tensor(5, device=rank.device),
        }
        for kind, value in values.items():
            saved = checkpoint.save(
                nested(value), storage_writer=checkpoint.FileSystemWriter(tmp_path / kind, sync_files=False)
            )
            found = {
                name: (each.size, each.properties.dtype)
                for name, each in saved.state_dict_metadata.items()
                if isinstance(each, checkpoint.TensorStorageMetadata)
            }
            assert found == dict.fromkeys(NAMES, (value.shape, value.dtype)), kind

    world.run(body)
