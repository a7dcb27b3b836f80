"""Random operations on DTensors in compiled code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.nn import functional

from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks import dynamo
from harness.stacks.limit import runs_with
from suites.dynamo.backends import INDUCTOR

DRAWN: dict[str, Callable[[DTensor], Any]] = {
    "dropout": lambda x: functional.dropout(x, 0.5, training=True),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 0, 10),
    "bernoulli": torch.bernoulli,
    "normal_": lambda x: x.clone().normal_(),
    "uniform_": lambda x: x.clone().uniform_(-1.0, 1.0),
    "bernoulli_": lambda x: x.clone().bernoulli_(0.5),
    "two": lambda x: functional.dropout(x.clone().uniform_(1.0, 2.0)),
}


@requirement(
    "DYN-DRAW-01",
    "Random operations on DTensors in compiled code draw the numbers of uncompiled code, and new ones in each call.",
    source="torch.compile; torch.distributed.tensor.DTensor; torch.manual_seed",
)
@pytest.mark.world(2)
def test_drawn(world: World) -> None:
    """Draw in one graph, three times after a seed, from replicated and sharded tensors; then draw a plain one."""

    def body(rank: Rank) -> list[Any]:
        layouts: tuple[Placement, ...] = (Replicate(), Shard(0))

        def draw(xs: list[Any]) -> list[Any]:
            return [function(x) for x in xs for function in DRAWN.values()]

        function, counter = dynamo.compiled(draw)
        results = []
        for run in (draw, function):
            torch.manual_seed(7)
            drawn: list[Any] = []
            for _ in range(3):
                given = torch.full((4, 6), 0.5, device=rank.device)
                xs = [distribute_tensor(given, rank.mesh(), [layout], src_data_rank=None) for layout in layouts]
                found = run(xs)
                assert [y.placements[0] for y in found] == [layout for layout in layouts for _ in DRAWN]
                drawn.append([y.to_local().tolist() for y in found])
            drawn.append(torch.rand(3, device=rank.device).tolist())
            results.append(drawn)
        for i, name in enumerate([*DRAWN] * len(layouts)):
            assert [call[i] for call in results[0][:3]] == [call[i] for call in results[1][:3]], name
            assert results[1][0][i] != results[1][1][i], name
        assert results[0][3] == results[1][3], "a plain tensor afterwards"
        assert counter.graphs == 1
        return [call[: len(DRAWN)] for call in results[1][:3]]

    results = world.run(body)
    assert_on_ranks([results[0]] * world.size, results)


@requirement(
    "DYN-DRAW-62",
    "With Inductor, random operations on DTensors draw new numbers in each call, which are equal for replicas.",
    source="torch.compile; torch.distributed.tensor.DTensor; torch.manual_seed",
)
@pytest.mark.parametrize("backend", [INDUCTOR])
@pytest.mark.skipif(runs_with("<2.12"), reason="before 2.12, Inductor draws other numbers of DTensors")
@pytest.mark.world(2)
def test_drawn_by_inductor(world: World, backend: str) -> None:
    """Draw twice from replicated and sharded tensors, with Inductor's own numbers and with those of uncompiled code."""

    def body(rank: Rank) -> list[Any]:
        layouts: tuple[Placement, ...] = (Replicate(), Shard(0))
        names = ("dropout", "uniform_")

        def draw(xs: list[Any]) -> list[Any]:
            return [DRAWN[name](x) for x in xs for name in names]

        def drawn(run: Any) -> list[list[Any]]:
            torch.manual_seed(7)
            given = torch.full((4, 32), 0.5, device=rank.device)
            xs = [distribute_tensor(given, rank.mesh(), [layout], src_data_rank=None) for layout in layouts]
            results = [run(xs) for _ in range(2)]
            for found in results:
                assert [y.placements[0] for y in found] == [layout for layout in layouts for _ in names]
            return [[y.to_local().tolist() for y in found] for found in results]

        own, counter = dynamo.compiled(draw, backend=backend)
        numbers = drawn(own)
        assert counter.graphs == 1
        assert numbers == drawn(own), "after the same seed"
        with dynamo.inductor_options({"fallback_random": True}):
            assert drawn(draw) == drawn(dynamo.compiled(draw, backend=backend)[0]), "with fallback_random"
        return numbers

    (one, again), (other, other_again) = world.run(body)
    for i in range(4):
        assert one[i] != again[i]
    assert (one[:2], again[:2]) == (other[:2], other_again[:2])
