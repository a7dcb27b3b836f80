"""Distributed checkpoints of results of functional collectives, for which nobody has waited yet."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as functional
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from harness import Rank, World, requirement

STAGERS: dict[str, Any] = {
    "default": lambda: DefaultStager(StagingOptions(*[False] * 4)),
    "blocking": BlockingAsyncStager,
}
"""Stagers that stage at once."""


@requirement(
    "RFSDP-CHECKPOINT-6700",
    "A staged state has the results of functional collectives and redistributions that were pending.",
    source="torch.distributed.checkpoint.staging: AsyncStager.stage, DefaultStager, BlockingAsyncStager",
)
@pytest.mark.parametrize("stager", STAGERS)
@pytest.mark.world(2)
def test_staged(world: World, stager: str) -> None:
    """Stage them at once, after waiting for them, in a DTensor, in a list, and an operation's result."""

    def body(rank: Rank) -> None:
        mesh, ones = rank.mesh(), torch.ones(5, 4, device=rank.device)

        def reduced(factor: float) -> torch.Tensor:
            return functional.all_reduce(ones * factor, "sum", mesh)

        sharded = distribute_tensor(ones * 7, mesh, [Shard(0)])
        state: dict[str, Any] = {
            "pending": reduced(1.0),
            "waited for": (waited := reduced(2.0)),
            "gathered": functional.all_gather_tensor(ones * 3, 0, mesh),
            "computed": reduced(3.0) * 2,
        }
        waited.sum()
        right = {"pending": 2.0, "waited for": 4.0, "gathered": 3.0, "computed": 12.0}
        if stager == "default":  # the other one makes a deep copy, which defect functional_deepcopy refuses
            state["in a DTensor"] = sharded.redistribute(mesh, [Replicate()], async_op=True)
            right["in a DTensor"] = 7.0
        staged = STAGERS[stager]().stage({**state, "list": [reduced(4.0)]})
        found = {**staged, "list": staged["list"][0]}
        local = {name: getattr(value, "_local_tensor", value) for name, value in found.items()}
        wrong = [name for name, value in {**right, "list": 8.0}.items() if not (local[name] == value).all()]
        assert not wrong, f"other numbers: {wrong}"

    world.run(body)
