"""The samplers that give every rank its part of a dataset."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from torch.distributed.elastic.utils.data import ElasticDistributedSampler
from torch.utils.data import DistributedSampler

from harness import Rank, World, requirement

SOURCE = "torch.utils.data.distributed.DistributedSampler"
LENGTHS = [1, 2, 3, 4, 5, 7, 8, 12, 13, 31]
"""Numbers of samples: fewer than ranks, multiples of them, and others."""


def dealt(indices: list[int], ranks: int, drop: bool) -> list[list[int]]:
    """Deal indices out like cards; the first ones again, or the last ones not, so that each rank has as many."""
    each = len(indices) // ranks if drop else math.ceil(len(indices) / ranks)
    enough = indices * ranks
    return [enough[rank : each * ranks : ranks] for rank in range(ranks)]


@requirement(
    "DDP-SAMPLER-01",
    "A DistributedSampler gives its ranks as many samples each: all and the first again, or with drop_last no tail.",
    source=f"{SOURCE}: rank, num_replicas, drop_last",
)
@requirement(
    "DDP-SAMPLER-02",
    "A shuffling DistributedSampler has one order on all ranks, which depends on its seed and its epoch alone.",
    source=f"{SOURCE}: shuffle, seed, set_epoch",
)
@pytest.mark.world(3)
def test_dealt(world: World) -> None:
    """Datasets of many lengths, for the world's ranks or those that are named, in order or shuffled in two epochs."""

    def body(rank: Rank) -> None:
        for length in LENGTHS:
            data = range(length)
            for ranks, me in ((None, None), (3, rank.index), (4, 3), (1, 0), (5, 0)):
                given: dict[str, Any] = {} if ranks is None else {"num_replicas": ranks, "rank": me}
                count, own = ranks or 3, rank.index if me is None else me
                for drop in (False, True):
                    where = (length, ranks, drop)
                    sampler: Any = DistributedSampler(data, shuffle=False, drop_last=drop, **given)  # type: ignore[arg-type]
                    right = dealt(list(data), count, drop)[own]
                    assert list(sampler) == list(sampler) == right, where
                    assert len(sampler) == len(right), where
                    orders = [
                        shuffled(data, seed, epoch, drop, given) for seed, epoch in ((0, 0), (0, 0), (0, 1), (5, 0))
                    ]
                    assert orders[0] == orders[1], where
                    assert all(len(order) == len(right) and set(order) <= set(data) for order in orders), where
        whole = [shuffled(range(31), seed, epoch, False, {"num_replicas": 1, "rank": 0}) for seed, epoch in EPOCHS]
        assert [sorted(order) for order in whole] == [list(range(31))] * len(EPOCHS)
        for (seed, epoch), order in zip(EPOCHS, whole, strict=True):  # seed and epoch are added
            alike = [(s, e) for (s, e), other in zip(EPOCHS, whole, strict=True) if other == order]
            assert alike == [(s, e) for s, e in EPOCHS if s + e == seed + epoch]
        unnamed: Any = DistributedSampler(range(31), 1, 0)  # type: ignore[arg-type]
        assert list(unnamed) == whole[0]
        for (seed, epoch), order in zip(EPOCHS, whole, strict=True):
            for drop in (False, True):
                assert shuffled(range(31), seed, epoch, drop, {}) == dealt(order, 3, drop)[rank.index], (seed, epoch)

    world.run(body)


EPOCHS = [(0, 0), (0, 1), (1, 0), (0, 2), (7, 3), (7, 0), (5, 5), (2, 1), (9, 1)]
"""Seeds and epochs."""


def shuffled(data: Any, seed: int, epoch: int, drop: bool, given: dict[str, Any]) -> list[int]:
    sampler: Any = DistributedSampler(data, seed=seed, drop_last=drop, **given)
    sampler.set_epoch(epoch)
    return list(sampler)


@requirement(
    "DDP-SAMPLER-01",
    "A DistributedSampler gives its ranks as many samples each: all and the first again, or with drop_last no tail.",
    source=f"{SOURCE}: rank, num_replicas, drop_last",
)
@pytest.mark.world(2)
def test_refused(world: World) -> None:
    """Ranks below zero, and as many as replicas or more, of the world or given."""

    def body(rank: Rank) -> None:
        for given in ({"rank": -1}, {"rank": 2}, {"num_replicas": 3, "rank": 3}, {"num_replicas": 1, "rank": 2}):
            with pytest.raises(ValueError, match="rank"):
                DistributedSampler(range(4), **given)  # type: ignore[arg-type]
        assert len(DistributedSampler(range(4), num_replicas=4)) == 1  # type: ignore[arg-type]

    world.run(body)


@requirement(
    "DDP-SAMPLER-3603",
    "An ElasticDistributedSampler gives its ranks as many samples each, which are all that are left from its start on.",
    source="torch.distributed.elastic.utils.data.ElasticDistributedSampler: start_index",
)
@pytest.mark.parametrize("left", ["more than ranks", "half the ranks", "fewer"])
@pytest.mark.world(1)
def test_elastic(world: World, left: str) -> None:
    """Start at the beginning of a dataset, amid it or near its end, with two to seven ranks, in two epochs."""

    def body(_: Rank) -> None:
        for ranks, start, epoch in itertools.product((2, 3, 5, 7), (0, 1, 10), (0, 1)):
            count = {"more than ranks": 2 * ranks + 1, "half the ranks": math.ceil(ranks / 2), "fewer": ranks // 3}[
                left
            ]
            if count == 0:  # the dataset has come to its end
                continue
            parts = []
            for rank in range(ranks):
                sampler: Any = ElasticDistributedSampler(range(start + count), ranks, rank, start)  # type: ignore[arg-type]
                sampler.set_epoch(epoch)
                parts.append(list(sampler))
                assert len(sampler) == len(parts[-1]) == math.ceil(count / ranks)
            assert {sample for part in parts for sample in part} == set(range(start, start + count))

    world.run(body)
