"""Which of several equal extremes of a DTensor argmax and argmin say."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from harness import Rank, World, requirement
from harness.stacks.limit import runs_with

pytestmark = pytest.mark.skipif(runs_with("<2.12"), reason="before 2.12, argmax of a DTensor in shards raises an error")

BY_ONE: list[list[Placement]] = [
    *([Shard(dim), Replicate()] for dim in (0, 1)),
    *([Replicate(), Shard(dim)] for dim in (0, 1)),
]
BY_BOTH: list[list[Placement]] = [[Shard(0), Shard(1)], [Shard(1), Shard(0)]]
TWICE: list[list[Placement]] = [[Shard(0), Shard(0)], [Shard(1), Shard(1)]]
"""Placements on a mesh of two dimensions."""
CASES: dict[str, list[tuple[list[Placement], int | None]]] = {
    "a dimension": [
        *((placements, dim) for placements in BY_ONE[2:] + BY_BOTH for dim in (0, 1)),
        *((BY_ONE[i], 1 - i) for i in (0, 1)),
    ],
    "a dimension in shards of replicas": [(BY_ONE[i], i) for i in (0, 1)],
    "a dimension in shards twice": [(placements, dim) for placements in TWICE for dim in (0, 1)],
    "everything": [(placements, None) for placements in BY_ONE + BY_BOTH + TWICE],
}
"""Placements, each with the dimension over which the extreme is looked for."""


@requirement(
    "TP-OPERATOR-5386",
    "argmax and argmin of a DTensor give the index of the first of several equal extremes.",
    source="torch.argmax, torch.argmin: 'the indices of the first maximal value are returned'",
)
@pytest.mark.parametrize("over", CASES)
@pytest.mark.world(4)
def test_equal(world: World, over: str) -> None:
    """Put an extreme at two places, over either dimension or over all elements."""

    def body(rank: Rank) -> None:
        mesh, wrong = rank.mesh(2, 2, names=("a", "b")), []
        for places, (placements, dim), sign in itertools.product(
            [(1, 2), (4, 8), (2, 4), (3, 13)], CASES[over], (1, -1)
        ):
            whole = torch.zeros(4, 4)
            whole.view(-1)[list(places)] = float(sign)
            x = distribute_tensor(whole.to(rank.device), mesh, placements, src_data_rank=None)
            of = torch.argmax if sign > 0 else torch.argmin
            if of(x, dim).full_tensor().tolist() != of(whole, dim).tolist():
                wrong.append(places)
        assert not wrong, f"{len(wrong)} of another place, as of {wrong[0]}"

    world.run(body)
