"""Distributed checkpoints of results of functional collectives, for which nobody has waited yet."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from harness import Rank, World, requirement
from harness.stacks.collectives import functional

SOURCE = "torch.distributed.checkpoint"


@requirement(
    "RFSDP-CHECKPOINT-53",
    "A staged state has the values of the call that staged it, on the host, whatever happens to the model afterwards.",
    source=f"{SOURCE}.staging: AsyncStager.stage, DefaultStager, BlockingAsyncStager",
)
@pytest.mark.parametrize("stager", ["default"])
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
            "in a DTensor": sharded.redistribute(mesh, [Replicate()], async_op=True),
            "computed": reduced(3.0) * 2,
        }
        waited.sum()
        right = {"pending": 2.0, "waited for": 4.0, "gathered": 3.0, "in a DTensor": 7.0, "computed": 12.0}
        staged = DefaultStager(StagingOptions(*[False] * 4)).stage({**state, "list": [reduced(4.0)]})
        found = {**staged, "list": staged["list"][0]}
        local = {name: getattr(value, "_local_tensor", value) for name, value in found.items()}
        wrong = [name for name, value in {**right, "list": 8.0}.items() if not (local[name] == value).all()]
        assert not wrong, f"other numbers: {wrong}"

    world.run(body)
