"""Functional collectives of tensors without dimensions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import Rank, World, requirement
from harness.stacks.collectives import functional


@requirement(
    "COLL-FUNC-411",
    "permute_tensor sends tensors with any number of dimensions.",
    source="torch.distributed._functional_collectives: permute_tensor",
)
@pytest.mark.parametrize("shape", [(1,), ()], ids=["one", "number"])
@pytest.mark.world(2)
def test_permuted_number(world: World, shape: tuple[int, ...]) -> None:
    """Two ranks exchange a number each, or both get the error that all_to_all_single has for such split sizes."""

    def body(rank: Rank) -> Any:
        given = torch.full(shape, 1.0 + rank.index, device=rank.device)
        try:
            return functional.wait_tensor(functional.permute_tensor(given, [1, 0], dist.group.WORLD)).flatten().tolist()  # type: ignore[no-untyped-call]
        except (IndexError, RuntimeError):
            return "an error"

    found = world.run(body)
    assert found in ([[2.0], [1.0]], ["an error"] * (shape == ()) * 2)
