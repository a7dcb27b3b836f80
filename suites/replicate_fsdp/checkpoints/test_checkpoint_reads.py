"""Distributed checkpoints: which parts of saved tensors are read for the parts that are loaded."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from harness import Rank, World, requirement

DIVISIONS: dict[tuple[int, ...], list[tuple[Sequence[int], ...]]] = {
    (): [()],
    (6,): [([6],), ([3, 3],), ([1, 1, 1, 1, 1, 1],), ([2, 4],), ([4, 2],)],
    (2, 6): [([2], [6]), ([1, 1], [6]), ([2], [3, 3]), ([1, 1], [2, 2, 2]), ([1, 1], [4, 2])],
    (6, 2): [([6], [2]), ([3, 3], [2]), ([6], [1, 1]), ([2, 4], [1, 1])],
    (3, 4, 2): [([3], [4], [2]), ([1, 2], [4], [2]), ([3], [2, 2], [1, 1]), ([2, 1], [1, 3], [2])],
}
"""Sizes of a tensor, and the lengths of the parts into which each of its dimensions is divided."""


def chunks(division: tuple[Sequence[int], ...]) -> list[ChunkStorageMetadata]:
    """Return the parts of a tensor by the lengths of each dimension's parts."""
    starts = [[sum(lengths[:i]) for i in range(len(lengths))] for lengths in division]
    return [
        ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        for offsets, sizes in zip(itertools.product(*starts), itertools.product(*division), strict=True)
    ]


def part(tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """Return a view of a part of a tensor."""
    return tensor[tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))]


@requirement(
    "RFSDP-CHECKPOINT-4101",
    "Loading parts of a tensor reads each of their elements once, from the saved part that has it, but nothing else.",
    source="torch.distributed.checkpoint.planner_helpers.create_read_items_for_chunk_list: "
    "'the reads needed to satisfy local_chunks'",
)
@pytest.mark.world(1)
def test_reads(world: World) -> None:
    """Divide tensors of up to three dimensions in one way as they are saved, and in each other as they are loaded."""

    def body(rank: Rank) -> None:
        for size, divisions in DIVISIONS.items():
            whole = torch.arange(float(math.prod(size))).reshape(size)
            for saved, loaded, step in itertools.product(divisions, divisions, (1, 2, -1)):
                what = f"{size}: saved as {saved}, loaded as {loaded}, {step=}"
                stored, wanted = chunks(saved), chunks(loaded)[::step]
                metadata = TensorStorageMetadata(TensorProperties(), torch.Size(size), stored)
                found = [torch.full(chunk.sizes, -1.0) for chunk in wanted]
                read = 0
                for item in create_read_items_for_chunk_list("t", metadata, wanted):
                    assert item.dest_index.fqn == item.storage_index.fqn == "t", what
                    (source,) = (c for c in stored if c.offsets == item.storage_index.offset)
                    (number,) = (i for i, c in enumerate(wanted) if c.offsets == item.dest_index.offset)
                    assert item.dest_index.index == number, what
                    assert stored[item.storage_index.index or 0] is source, what
                    values = part(part(whole, source.offsets, source.sizes), item.storage_offsets, item.lengths)
                    part(found[number], item.dest_offsets, item.lengths).copy_(values)
                    assert values.shape == item.lengths, what
                    assert values.numel(), f"{what}: nothing is read from {source}"
                    read += values.numel()
                assert read == sum(math.prod(chunk.sizes) for chunk in wanted), what
                for chunk, values in zip(wanted, found, strict=True):
                    assert torch.equal(values, part(whole, chunk.offsets, chunk.sizes)), what

    world.run(body)


LAYOUTS: dict[str, tuple[Placement, ...]] = {
    "rows": (Shard(0), Replicate()),
    "both": (Shard(0), Shard(1)),
    "columns and rows": (Shard(1), Shard(0)),
    "whole": (Replicate(), Replicate()),
}
"""Placements over two dimensions of a mesh of four ranks."""


@requirement(
    "RFSDP-CHECKPOINT-4110",
    "A checkpoint of DTensors loads into DTensors of every other layout, and into plain tensors.",
    source="torch.distributed.checkpoint: 'load-time resharding, which enables saving in one cluster topology and "
    "loading into another'",
)
@pytest.mark.world(4)
def test_other_layouts(world: World, tmp_path: Path) -> None:
    """Save two sizes, which ranks divide unevenly, in each layout, and load them into each."""

    def body(rank: Rank) -> None:
        mesh = rank.mesh(2, 2, names=("a", "b"))
        sizes = [(5, 3), (3, 2, 2)]
        whole = [torch.arange(float(math.prod(size)), device=rank.device).reshape(size) for size in sizes]

        def made(name: str, tensor: torch.Tensor) -> torch.Tensor:
            return distribute_tensor(tensor, mesh, LAYOUTS[name]) if name in LAYOUTS else tensor.clone()

        saved = {f"{name} {i}": made(name, tensor) for name in (*LAYOUTS, "plain") for i, tensor in enumerate(whole)}
        checkpoint.save(saved, storage_writer=checkpoint.FileSystemWriter(tmp_path, sync_files=False))
        for other in (*LAYOUTS, "plain"):
            loaded = {name: made(other, torch.full_like(whole[int(name[-1])], -1.0)) for name in saved}
            checkpoint.load(loaded, checkpoint_id=tmp_path)
            for name, tensor in loaded.items():
                right, found = made(other, whole[int(name[-1])]), tensor
                if isinstance(tensor, DTensor):
                    right, found = right.to_local(), tensor.to_local()  # type: ignore[attr-defined]
                assert torch.equal(right, found), f"{name}, loaded into {other}: {found}"

    world.run(body)


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.bool)
"""Dtypes in which tensors are saved, and into which they are loaded."""


@requirement(
    "RFSDP-CHECKPOINT-7153",
    "A checkpoint loads into tensors of another dtype than was saved, which keep theirs.",
    source="torch.distributed.checkpoint.load: 'in-place'; torch.Tensor.copy_",
)
@pytest.mark.parametrize("layout", [Replicate(), Shard(0), None], ids=["replicated", "sharded", "plain"])
@pytest.mark.world(2)
def test_other_dtypes(world: World, tmp_path: Path, layout: Placement | None) -> None:
    """Save zeros and ones of each dtype in five rows, and load them into each."""

    def body(rank: Rank) -> None:
        whole = torch.arange(10).remainder(3).remainder(2).reshape(5, 2)

        def states(value: torch.Tensor) -> dict[str, torch.Tensor]:
            tensors = {str(dtype): value.to(dtype).to(rank.device) for dtype in DTYPES}
            if layout is None:
                return tensors
            return {name: distribute_tensor(tensor, rank.mesh(), [layout]) for name, tensor in tensors.items()}

        checkpoint.save(states(whole), checkpoint_id=tmp_path)
        for turn in range(len(DTYPES)):
            own = states(1 - whole)
            loaded = dict(zip(own, [*own.values()][turn:] + [*own.values()][:turn], strict=True))
            given = {name: (tensor, tensor.dtype) for name, tensor in loaded.items()}
            checkpoint.load(loaded, checkpoint_id=tmp_path)
            for name, (tensor, dtype) in given.items():
                found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                assert loaded[name] is tensor, f"{name} into {dtype}"
                assert tensor.dtype == dtype, f"{name} into {dtype}"
                assert torch.equal(whole.to(dtype), found.cpu()), f"{name} into {dtype}"

    world.run(body)
