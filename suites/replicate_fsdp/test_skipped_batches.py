"""Batches that a training loop gives up under FSDP-replicate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from fixtures.skipped import WAYS, Fragile, average_gradients, gradients_of_steps
from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks import replicate_fsdp


@requirement(
    "RFSDP-SKIP-01",
    "A batch that is given up, before its backward or because its forward raised, changes no later gradient.",
    source="torch/distributed/_composable/replicate_with_fsdp.py: replicate",
)
@pytest.mark.parametrize("cast", [False, True], ids=["plain", "mixed-precision"])
@pytest.mark.parametrize("groups", [True, False], ids=["layers", "whole"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.world(2, 3)
def test_skipped(world: World, way: str, groups: bool, cast: bool) -> None:
    """Give up the first batch, and one between two steps."""

    def body(rank: Rank) -> list[dict[str, list[float]]]:
        options: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)} if cast else {}
        model = replicate_fsdp.apply(Fragile(), rank, groups=groups, **options)
        return gradients_of_steps(model, rank, way, replicate_fsdp.gradients)

    assert_on_ranks([average_gradients(world.size)] * world.size, world.run(body))
