"""DTensors that compiled code redistributes: uneven and double shards, dtypes, and the inputs of local_map."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import local_map

from fixtures.placements import laid_out
from harness import Rank, World, assert_same, dyadic, requirement
from harness.stacks import dynamo

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
Layout = Sequence[Placement]
LINE: list[tuple[Layout, Layout]] = [([source], [target]) for source in (S0, S1, R, P) for target in (R, S0, S1)]
SQUARE: list[tuple[Layout, Layout]] = [
    *((source, [R, R]) for source in ([S0, S0], [S1, S1], [S0, S1], [S1, S0], [R, S0], [S1, R], [P, S0], [S0, P])),
    *(([R, R], target) for target in ([S0, S0], [S1, S0], [S0, R])),
    *(([S0, S0], target) for target in ([S1, S0], [S0, S1], [R, S0], [S0, R])),
    ([P, P], [S0, S0]),
    ([S1, P], [S1, S1]),
]
"""Where DTensors are, and where they go, on meshes of one and of two dimensions."""
SHARES = {1: (1.0,), 2: (0.25, 0.75), 3: (0.25, 0.5, 0.25)}
"""How much of a partial sum each rank has."""


def local(whole: torch.Tensor, mesh: Any, placements: Layout) -> torch.Tensor:
    """Return this rank's part of a tensor in new memory."""
    part = laid_out(whole, mesh, placements).clone()
    for dim, placement in enumerate(placements):
        if isinstance(placement, Partial):
            part *= SHARES[mesh.size(dim)][mesh.get_local_rank(dim)]
    return part


def numbers_of(shape: tuple[int, int], *key: object) -> torch.Tensor:
    """Return the numbers of a whole tensor."""
    return dyadic(*shape, key=key, dtype=torch.float32)


@requirement(
    "DYN-MOVE-01",
    "Compiled code redistributes DTensors of any even, uneven or empty shards, on one or two mesh dimensions.",
    source="torch.distributed.tensor.DTensor.redistribute; torch.compile",
)
@requirement(
    "DYN-MOVE-02",
    "The gradient of a compiled redistribution goes the way back, for any even, uneven or empty shards.",
    source="torch.distributed.tensor.DTensor.redistribute; torch.compile",
)
@pytest.mark.parametrize("shape", [(5, 7), (2, 4)], ids=["uneven", "few"])
@pytest.mark.world(2, 3, 4)
@pytest.mark.each_choice
def test_shards(world: World, shape: tuple[int, int]) -> None:
    """Redistribute from and to all layouts in one graph; four ranks are a mesh of two by two."""

    def body(rank: Rank) -> None:
        mesh = rank.mesh(2, 2) if rank.size == 4 else rank.mesh(rank.size)
        pairs = SQUARE if rank.size == 4 else LINE
        stride = (shape[1], 1)

        def move(xs: list[torch.Tensor]) -> list[torch.Tensor]:
            return [
                DTensor.from_local(x, mesh, source, run_check=False, shape=torch.Size(shape), stride=stride)
                .redistribute(placements=target)
                .to_local()
                for x, (source, target) in zip(xs, pairs, strict=True)
            ]

        function, counter = dynamo.compiled(move)
        for call in range(2):
            wholes = [numbers_of(shape, "x", k, call) for k in range(len(pairs))]
            weights = [numbers_of(shape, "w", k, call) for k in range(len(pairs))]
            xs = [
                local(whole, mesh, source).to(rank.device).requires_grad_()
                for whole, (source, _) in zip(wholes, pairs, strict=True)
            ]
            found = function(xs)
            parts = [local(w, mesh, target).to(rank.device) for w, (_, target) in zip(weights, pairs, strict=True)]
            torch.stack([(y * w).sum() for y, w in zip(found, parts, strict=True)]).sum().backward()
            for (source, target), whole, weight, x, y in zip(pairs, wholes, weights, xs, found, strict=True):
                what = f"from {source} to {target}, call {call}"
                assert_same(local(whole, mesh, target), (y + 0).detach(), what)
                assert x.grad is not None
                assert_same(laid_out(weight, mesh, source).clone(), x.grad, f"gradient {what}")
        assert counter.graphs == 1

    world.run(body)


DTYPES: list[tuple[torch.dtype | None, torch.dtype | None]] = [
    (None, None),
    (torch.bfloat16, None),
    (None, torch.bfloat16),
    (torch.float64, torch.bfloat16),
]
"""The dtypes in which a forward and a backward communicate."""


@requirement(
    "DYN-MOVE-03",
    "Compiled redistribute communicates in its forward_dtype, which its result has, and in its backward_dtype.",
    source="torch.distributed.tensor.DTensor.redistribute: forward_dtype, backward_dtype, async_op",
)
@pytest.mark.needs(torch="torch.distributed.tensor.DTensor.redistribute(backward_dtype)")
@pytest.mark.world(2)
def test_dtypes(world: World) -> None:
    """Compare outputs and gradients with uncompiled code, for numbers that bfloat16 rounds."""

    def body(rank: Rank) -> None:
        mesh, ways = rank.mesh(2), [(S0, R), (P, R), (P, S0), (R, S1), (S0, S1)]
        choices = list(itertools.product(ways, DTYPES))

        def move(xs: list[torch.Tensor]) -> list[torch.Tensor]:
            return [
                DTensor.from_local(x, mesh, [source], run_check=False)
                .redistribute(placements=[target], forward_dtype=forward, backward_dtype=backward, async_op=k % 2 == 1)
                .to_local()
                for k, (x, ((source, target), (forward, backward))) in enumerate(zip(xs, choices, strict=True))
            ]

        function, counter = dynamo.compiled(move)
        results = []
        for run in (move, function):
            xs = [
                (local(numbers_of((4, 2), "x", k), mesh, [way[0]]) + 257).to(rank.device).requires_grad_()
                for k, (way, _) in enumerate(choices)
            ]
            ys = run(xs)
            weights = [
                (torch.arange(y.numel(), device=rank.device).view(y.shape) + 259 + 2 * rank.index) / 2 for y in ys
            ]
            torch.stack([(y * w).sum().double() for y, w in zip(ys, weights, strict=True)]).sum().backward()
            results.append([((y + 0).detach(), x.grad) for x, y in zip(xs, ys, strict=True)])
        for choice, (right, gradient), (found, other) in zip(choices, *results, strict=True):
            what = f"{choice}"
            assert found.dtype == (choice[1][0] or torch.float32), what
            assert_same(right, found, what)
            assert gradient is not None
            assert other is not None
            assert_same(gradient, other, f"gradient, {what}")
        assert counter.graphs == 1

    world.run(body)


@requirement(
    "DYN-LOCAL-01",
    "With redistribute_inputs, a compiled local_map gives its function inputs in the placements of in_placements.",
    source="torch.distributed.tensor.experimental.local_map: in_placements, redistribute_inputs",
)
@requirement(
    "DYN-LOCAL-02",
    "Without redistribute_inputs, a compiled local_map refuses inputs in other placements than required.",
    source="torch.distributed.tensor.experimental.local_map: in_placements, redistribute_inputs",
)
@pytest.mark.world(2)
def test_inputs_of_local_map(world: World) -> None:
    """One of two inputs is in each layout where any is required; compare what is computed from local parts."""

    def body(rank: Rank) -> None:
        mesh, shape = rank.mesh(2), (4, 6)
        pairs = itertools.product((R, S0, S1, P), (R, S0, S1))
        cases = [(given, wanted, number % 2) for number, (given, wanted) in enumerate(pairs)]

        def inputs(given: Placement, at: int) -> list[Any]:
            layouts = [given, S0] if at == 0 else [S0, given]
            return [
                DTensor.from_local(local(numbers_of(shape, k), mesh, [each]).to(rank.device), mesh, [each])
                for k, each in enumerate(layouts)
            ]

        def mapped(wanted: Placement, at: int, redistribute: bool) -> Any:
            required = [[wanted], [S0]] if at == 0 else [[S0], [wanted]]
            layouts: Any = {"in_placements": tuple(required), "out_placements": tuple(required)}
            return local_map(lambda x, y: (x * 3, y * 5), **layouts, redistribute_inputs=redistribute)

        def everything(given: list[list[Any]]) -> list[torch.Tensor]:
            return [
                mapped(wanted, at, True)(*each)[at].to_local()
                for each, (_, wanted, at) in zip(given, cases, strict=True)
            ]

        function, counter = dynamo.compiled(everything)
        found = function([inputs(given, at) for given, _, at in cases])
        for (given, wanted, at), result in zip(cases, found, strict=True):
            right = local(numbers_of(shape, at), mesh, [wanted]) * (5 if at else 3)
            assert_same(right, result + 0, f"input {at} as {given} for {wanted}")
        assert counter.graphs == 1
        for given, wanted, at in ((S1, S0, 0), (P, R, 1)):
            refused, _ = dynamo.compiled(mapped(wanted, at, False), fullgraph=False)
            with pytest.raises(ValueError, match="placements"):
                refused(*inputs(given, at))

    world.run(body)
