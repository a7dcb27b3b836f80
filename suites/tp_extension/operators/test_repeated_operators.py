"""Operators, redistributions and backward passes that are repeated for DTensors of the same layouts."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn import functional

from fixtures.operators import floats
from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks.limit import runs_with
from harness.stacks.tp_extension import foreach

REPEATED: dict[str, Callable[[Any, Any], Any]] = {
    "products": lambda x, w: ((x @ w + 1).relu() * 2.0).sum(0).redistribute(placements=[Replicate()]),
    "lists": lambda x, w: foreach("add")([x, w], [x, w], alpha=2)[0],
    "views": lambda x, w: torch.cat([x, x]).t().unsqueeze(0)[:, 1:].full_tensor(),
    "conversions": lambda x, w: x.float().to_local() + x.double().to_local(),
    "rows": lambda x, w: functional.embedding(torch.ones_like(w, dtype=torch.int64), x).full_tensor(),
    "layers": lambda x, w: functional.layer_norm(functional.linear(x, x), (4,)).softmax(0),
    "writing": lambda x, w: torch.zeros_like(x).copy_(x).add_(x).mul_(3),
    "making": lambda x, w: DTensor.from_local(x.to_local(), x.device_mesh, [Partial()]).redistribute(
        placements=[Shard(1)]
    ),
}
"""Functions of a matrix in shards and of a whole one."""


@requirement(
    "TP-AGAIN-4201",
    "A program that repeats operators, redistributions or backward passes of DTensors keeps no more objects.",
    source="torch.distributed.tensor.DTensor: a single-device abstraction over multi-device tensors",
)
@pytest.mark.skipif(runs_with("<2.13"), reason="before 2.13, DTensor keeps some layouts for each call")
@pytest.mark.world(2)
def test_objects(world: World) -> None:
    """Count the objects that the garbage collector knows, after two calls and after eight more."""

    def body(rank: Rank) -> list[str]:
        matrix = floats(4, 6).to(rank.device)

        def use() -> None:
            for function in REPEATED.values():
                x = distribute_tensor(matrix, rank.mesh(), [Shard(0)], src_data_rank=None).requires_grad_()
                w = distribute_tensor(matrix.t(), rank.mesh(), [Replicate()], src_data_rank=None)
                found = function(x, w)
                if found.requires_grad:
                    (found.sum().full_tensor() if isinstance(found, DTensor) else found.sum()).backward()

        def objects(times: int) -> Counter[str]:
            for _ in range(times):
                use()
            gc.collect()
            return Counter(type(each).__name__ for each in gc.get_objects())

        _, before, after = objects(2), objects(1), objects(8)  # the first count fills caches of its own
        return [f"{count} more of {name}" for name, count in (after - before).items() if count >= 8]

    assert_on_ranks([[]] * world.size, world.run(body))
