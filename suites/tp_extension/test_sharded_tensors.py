"""ShardedTensors that are made of ranks' shards, some or all of them empty."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as checkpoint

from fixtures.tensors import numbers
from harness import Rank, World, assert_same, requirement
from harness.stacks.tp_extension import joined_shards

SOURCE = "torch/distributed/_shard/sharded_tensor"
SPLITS: dict[str, tuple[tuple[int, ...], int, list[list[int]]]] = {
    "even": ((4, 3), 0, [[2], [2]]),
    "empty-last": ((2, 3), 0, [[2], [0]]),
    "empty-first": ((2, 3), 0, [[0], [2]]),
    "empty-columns": ((3, 2), 1, [[2], [0]]),
    "empty-beside": ((5, 3), 0, [[2, 0], [0, 3]]),
    "without-shard": ((3, 2), 0, [[3], []]),
    "all-empty": ((0, 3), 0, [[0], [0]]),
    "all-empty-columns": ((3, 0), 1, [[0], [0]]),
    "all-empty-cube": ((2, 0, 3), 1, [[0], [0]]),
    "all-empty-many": ((0, 3), 0, [[0, 0], [0]]),
}
"""The size of a tensor, the dimension in which it is sharded, and the sizes of each rank's shards."""


def made(rank: Rank, values: torch.Tensor, split: str) -> torch.Tensor:
    """Return a tensor of a split of values, of which this rank has its shards."""
    size, dim, sizes = SPLITS[split]
    start = sum(sum(each) for each in sizes[: rank.index])
    shards = []
    for length in sizes[rank.index]:
        offsets = [start if i == dim else 0 for i in range(len(size))]
        shards.append((values.narrow(dim, start, length).contiguous(), offsets))
        start += length
    return joined_shards(rank.index, shards, size)


@requirement(
    "TP-TENSOR-1701",
    "A ShardedTensor may have shards without elements on some or all ranks.",
    source=f"{SOURCE}/__init__.py: init_from_local_shards",
)
@requirement(
    "TP-TENSOR-1702",
    "Gathering a ShardedTensor gives its destination every element, whichever ranks have none.",
    source=f"{SOURCE}/api.py: ShardedTensor.gather: 'Creates a full Tensor on rank dst'",
)
@pytest.mark.filterwarnings("ignore:Gathering a tensor with zero elements")
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.world(2, exclusive=True, timeout=5)
def test_empty_shards(world: World, split: str) -> None:
    """Make a tensor of both ranks' shards, and gather it on either rank."""
    size, dim, sizes = SPLITS[split]

    def body(rank: Rank) -> None:
        tensor = numbers(*size).to(rank.device)
        sharded = made(rank, tensor, split)
        assert sharded.size() == tensor.size()
        assert [list(each.tensor.shape)[dim] for each in sharded.local_shards()] == sizes[rank.index]
        for root in range(2):
            out = torch.full_like(tensor, -1) if rank.index == root else None
            sharded.gather(root, out)
            if out is not None:
                assert_same(tensor, out, f"gathered on rank {root}")

    world.run(body)


@requirement(
    "TP-TENSOR-1703",
    "A ShardedTensor is saved and loaded in a checkpoint, whichever ranks have no elements.",
    source="torch.distributed.checkpoint: save, load",
)
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.world(2, exclusive=True, timeout=5)
def test_saved_empty_shards(world: World, tmp_path: Path, split: str) -> None:
    """Save a tensor of both ranks' shards, and load it into another one of the same shards."""

    def body(rank: Rank) -> None:
        tensor = numbers(*SPLITS[split][0]).to(rank.device)
        sharded, loaded = made(rank, tensor, split), made(rank, torch.full_like(tensor, -1), split)
        checkpoint.save({"sharded": sharded}, checkpoint_id=tmp_path)
        checkpoint.load({"sharded": loaded}, checkpoint_id=tmp_path)
        for right, found in zip(sharded.local_shards(), loaded.local_shards(), strict=True):
            assert_same(right.tensor, found.tensor, "loaded")

    world.run(body)
