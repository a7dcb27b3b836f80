"""Reductions of DTensors over their last dimension, in a batch of one sequence, as of one prompt's logits."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Shard, distribute_tensor

from harness import Rank, World, requirement

NAMES = ("argmax", "argmin", "amax", "amin", "sum", "logsumexp")


@requirement(
    "TP-REDUCE-5633",
    "A DTensor in a batch of one that is reduced over its sharded last dimension has the result of a single device.",
    source="torch.distributed.tensor: 'single-device semantics'; torch.argmax, argmin, amax, amin, sum, logsumexp: dim",
)
@pytest.mark.parametrize("dim", [2, -1])
@pytest.mark.world(2)
def test_last_dimension(world: World, dim: int) -> None:
    """Reduce logits that differ, sharded over the last dimension, which is counted from either end."""

    def body(rank: Rank) -> None:
        for rows in (2, 1):
            whole = torch.arange(24.0 * rows, device=rank.device).view(rows, 3, 8).mul(5).remainder(23)
            logits = distribute_tensor(whole, rank.mesh(), [Shard(2)])
            for name in NAMES:
                found = getattr(logits, name)(dim).full_tensor()
                torch.testing.assert_close(found, getattr(whole, name)(dim), msg=f"{name} of {rows} rows")

    world.run(body)
