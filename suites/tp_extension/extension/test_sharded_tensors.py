"""ShardedTensors that are made of ranks' shards or of a spec, some or all of them empty."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint

from fixtures.tensors import numbers
from harness import Rank, World, assert_on_ranks, assert_same, requirement
from harness.stacks import messages
from harness.stacks.tp_extension import chunk_spec, filled_shards, joined_shards

SOURCE = "torch/distributed/_shard/sharded_tensor"
Split = tuple[tuple[int, ...], int, list[list[int]]]
SPLITS: dict[str, Split] = {
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


def made(rank: Rank, values: torch.Tensor, split: Split) -> Any:
    """Return a tensor of a split of values, of which this rank has its shards."""
    size, dim, sizes = split
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
        sharded = made(rank, tensor, SPLITS[split])
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
        sharded, loaded = (made(rank, values, SPLITS[split]) for values in (tensor, torch.full_like(tensor, -1)))
        checkpoint.save({"sharded": sharded}, checkpoint_id=tmp_path)
        checkpoint.load({"sharded": loaded}, checkpoint_id=tmp_path)
        for right, found in zip(sharded.local_shards(), loaded.local_shards(), strict=True):
            assert_same(right.tensor, found.tensor, "loaded")

    world.run(body)


UNEVEN: dict[str, list[list[int]]] = {
    "more-last": [[2], [3]],
    "more-first": [[3], [2]],
    "several-more-last": [[1, 2], [2]],
    "several-more-between": [[2], [1, 2]],
    "several-as-chunks": [[2, 2], [1]],
}
"""The sizes of each rank's shards of five rows or columns."""


@requirement(
    "TP-TENSOR-2400",
    "The sharding spec of a ShardedTensor that is made of ranks' shards has the offsets and sizes of these shards.",
    source=f"{SOURCE}/__init__.py: init_from_local_shards; torch/distributed/_shard/sharding_spec/api.py: 'If not, we "
    "assume it's enum sharded'",
)
@pytest.mark.world(2)
def test_specs_of_shards(world: World) -> None:
    """Make tensors of ranks' shards in rows or columns, and build metadata by their specs."""

    def body(rank: Rank) -> None:
        splits = {name: split for name, split in SPLITS.items() if not name.startswith("all-empty")}
        for name, sizes in UNEVEN.items():
            splits |= {f"{name} {dim}": ((5, 2) if dim == 0 else (2, 5), dim, sizes) for dim in range(2)}
        for name, (size, dim, sizes) in splits.items():
            sharded = made(rank, numbers(*size).to(rank.device), (size, dim, sizes))
            metadata = sharded.sharding_spec().build_metadata(sharded.size(), sharded.metadata().tensor_properties)
            lengths = [length for each in sizes for length in each]
            right = [(sum(lengths[:i]), length) for i, length in enumerate(lengths)]
            shards = metadata.shards_metadata
            assert [(each.shard_offsets[dim], each.shard_sizes[dim]) for each in shards] == right, name
            others = [(each.shard_offsets[1 - dim], each.shard_sizes[1 - dim]) for each in shards]
            assert others == [(0, size[1 - dim])] * len(right), name

    world.run(body)


@requirement(
    "TP-TENSOR-2401",
    "A ShardedTensor of a ChunkShardingSpec has one shard on each rank, without elements if there are too few.",
    source="torch/distributed/_shard/sharding_spec/chunk_sharding_spec.py: ChunkShardingSpec, build_metadata; "
    f"{SOURCE}/__init__.py: full",
)
@pytest.mark.world(2, 3)
def test_chunks(world: World) -> None:
    """Shard as many rows or columns as ranks, fewer, and more, also those of a tensor without elements."""

    def body(rank: Rank) -> None:
        placements = [f"rank:{i}/{rank.device}" for i in range(rank.size)]
        for length in range(2 * rank.size + 1):
            chunk = -(-length // rank.size)
            own = min(max(length - rank.index * chunk, 0), chunk)
            for dim in (0, 1, -1):
                size, local = [2, 2], [2, 2]
                size[dim], local[dim] = length, own
                sharded = filled_shards(chunk_spec(dim, placements), size, 3.0)
                (shard,) = sharded.local_shards()
                assert_same(torch.full(local, 3.0), shard.tensor.cpu(), f"{length} in dimension {dim}")
                offsets = [each.shard_offsets[dim] for each in sharded.metadata().shards_metadata]
                assert offsets == [i * chunk for i in range(rank.size)], f"{length} in dimension {dim}"

    world.run(body)


NUMBERS: dict[torch.dtype, list[float]] = {
    torch.float32: [1 + 2**-23, -(2.0**-126)],
    torch.bfloat16: [1 + 2**-7, -(2.0**-126)],
    torch.int32: [2**31 - 1, -(2**31) + 1],
    torch.int64: [2**53 + 2, -(2**24) - 1],
    torch.float64: [1 + 2**-52, -(2.0**-1022)],
}
"""Two numbers of a dtype that fill its bits."""


@requirement(
    "TP-TENSOR-2800",
    "Gathering a ShardedTensor into a tensor of its dtype changes no number, whatever the dtype is.",
    source=f"{SOURCE}/api.py: ShardedTensor.gather: 'Creates a full Tensor on rank dst by gathering all shards'",
)
@pytest.mark.parametrize("dtype", NUMBERS, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.world(2)
def test_gathered_dtypes(world: World, dtype: torch.dtype) -> None:
    """Each rank has one of two numbers; gather without an option."""

    def body(rank: Rank) -> list[float] | None:
        part = torch.tensor(NUMBERS[dtype], dtype=dtype, device=rank.device)[rank.index : rank.index + 1]
        out = torch.zeros(2, dtype=dtype, device=rank.device) if rank.index == 0 else None
        joined_shards(rank.index, [(part, [rank.index])], (2,)).gather(0, out)
        return None if out is None else out.tolist()

    assert_on_ranks([NUMBERS[dtype], None], world.run(body))


@requirement(
    "TP-TENSOR-2801",
    "A ShardedTensor on a group of some ranks can be gathered on one of them.",
    source=f"{SOURCE}/api.py: ShardedTensor.gather; {SOURCE}/__init__.py: init_from_local_shards: process_group",
)
@pytest.mark.parametrize("ranks", [(0, 1), (1, 2)], ids=["first-ranks", "last-ranks"])
@pytest.mark.world(3)
def test_gathered_in_groups(world: World, ranks: tuple[int, ...]) -> None:
    """Two of three ranks have a number each; the destination is named by its rank in the world, or in the group."""

    def body(rank: Rank) -> object:
        group = dist.new_group(list(ranks))
        if rank.index not in ranks:
            return "outside"
        place = ranks.index(rank.index)
        shards = [(torch.tensor([1.0 + place], device=rank.device), [place])]
        sharded, found = joined_shards(rank.index, shards, (2,), process_group=group), []
        for destination in dict.fromkeys([ranks[0], 0]):
            out = torch.zeros(2, device=rank.device) if place == 0 else None
            try:
                sharded.gather(destination, out)
            except (IndexError, RuntimeError, ValueError) as error:
                found.append(f"{type(error).__name__}: {error}")
            else:
                return None if out is None else out.tolist()
        return found

    results = {ranks[0]: [1.0, 2.0], ranks[1]: None}
    assert_on_ranks([results.get(rank, "outside") for rank in range(3)], world.run(body))


COPIES: dict[str, tuple[Callable[[Any], Any], bool, bool]] = {
    "clone": (lambda x: x.clone(), True, True),
    "detach": (lambda x: x.detach(), False, False),
    "deepcopy": (copy.deepcopy, True, True),
    "type_as": (lambda x: x.type_as(torch.zeros(1, dtype=torch.float64)), True, True),
    "type_as of the same": (lambda x: x.type_as(torch.zeros(1)), False, True),
    "contiguous": (lambda x: x.contiguous(), False, True),
    "to": (lambda x: x.to(x.device), False, True),
}
"""Functions of a ShardedTensor, whether the result has memory of its own, and whether it requires a gradient."""


@requirement(
    "TP-TENSOR-8551",
    "A copy of a ShardedTensor is on the same group with the same places of shards, and shares memory only where the "
    "function does for plain tensors.",
    source=f"{SOURCE}/api.py: ShardedTensor; torch.Tensor: clone, detach, type_as, contiguous, to",
)
@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("ranks", [(0, 1), (0, 1, 2)], ids=["first-ranks", "every-rank"])
@pytest.mark.world(3, timeout=5)
def test_copies(world: World, ranks: tuple[int, ...], how: str) -> None:
    """Each rank of a group has a row, which it changes after the copy; the first rank gathers both."""
    function, apart, grad = COPIES[how]

    def body(rank: Rank) -> object:
        group = dist.new_group(list(ranks))
        if rank.index not in ranks:
            return "outside"
        place = ranks.index(rank.index)
        row = torch.full((1, 2), 1.0 + place, device=rank.device)
        given = joined_shards(rank.index, [(row, [place, 0])], (len(ranks), 2), process_group=group)
        given.requires_grad_()
        at = messages.mark()
        found = function(given)
        assert not messages.since(at), "a copy communicates"
        with torch.no_grad():
            row.add_(8)
        kept = found.metadata().shards_metadata == given.metadata().shards_metadata
        asks = [found.requires_grad, *(shard.tensor.requires_grad for shard in found.local_shards())]
        gathered = []
        for sharded in found, given:
            out = torch.zeros(len(ranks), 2, device=rank.device, dtype=sharded.dtype) if place == 0 else None
            sharded.gather(0, out)
            gathered.append(None if out is None else out[:, 1].tolist())
        return kept, asks, given.requires_grad, gathered

    def expected(place: int) -> object:
        plain, changed = ([x + 1.0 + i for i in range(len(ranks))] for x in (0, 8))
        gathered = [plain if apart else changed, changed] if place == 0 else [None, None]
        return True, [grad, grad], True, gathered

    results = {rank: expected(place) for place, rank in enumerate(ranks)}
    assert_on_ranks([results.get(rank, "outside") for rank in range(3)], world.run(body))
