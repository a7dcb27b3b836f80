"""Arguments of functional collectives: what permute_tensor is given, and groups as lists of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks.collectives import functional


@requirement(
    "COLL-FUNC-411",
    "permute_tensor sends tensors with any number of dimensions.",
    source="torch.distributed._functional_collectives: permute_tensor",
)
@pytest.mark.parametrize("shape", [(2,), (1, 2), (2, 3)], ids=["vector", "row", "matrix"])
@pytest.mark.world(2)
def test_permuted(world: World, shape: tuple[int, ...]) -> None:
    """Two ranks exchange their tensors."""

    def body(rank: Rank) -> Any:
        given = torch.full(shape, 1.0 + rank.index, device=rank.device)
        return functional.wait_tensor(functional.permute_tensor(given, [1, 0], dist.group.WORLD)).tolist()  # type: ignore[no-untyped-call]

    assert_on_ranks([torch.full(shape, 2.0 - rank).tolist() for rank in range(2)], world.run(body))


@requirement(
    "COLL-FUNC-412",
    "The group of a functional collective may be a list of ranks, or a list of such lists.",
    source="torch.distributed._functional_collectives: "
    "all_reduce: 'List[List[int]]: 2D mesh of ranks taking part of this collective in MPMD'",
)
@pytest.mark.filterwarnings("ignore:The combination of ranks")
@pytest.mark.parametrize("group", [[0, 1], [[0, 1]]], ids=["list", "lists"])
@pytest.mark.world(2)
def test_lists(world: World, group: Any) -> None:
    """All ranks of the world."""

    def body(rank: Rank) -> list[float]:
        given = torch.tensor([1.0 + rank.index], device=rank.device)
        return functional.all_reduce(given, "sum", group).tolist()  # type: ignore[no-any-return]

    assert_on_ranks([[3.0], [3.0]], world.run(body))
