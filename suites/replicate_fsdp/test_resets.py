"""What reset_iter_state leaves of the gradients of earlier backwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from fixtures.layers import alone, layers, row, train
from fixtures.managed import ways
from harness import Rank, World, requirement


@requirement(
    "RFSDP-RESET-02",
    "reset_iter_state discards gradients that were kept for a later all-reduce, in every module below the root.",
    source="torch.distributed.fsdp.FSDPModule.reset_iter_state: 'including HSDP partial-reduce-accumulation state'",
)
@pytest.mark.needs(torch="torch.distributed.fsdp.FSDPModule.reset_iter_state")
@pytest.mark.world(2)
def test_partial_sums(world: World) -> None:
    """Run one or two backwards without all-reduce, of all layers or one, reset, and run steps with it."""

    def body(rank: Rank) -> None:
        right = alone(rank.size)
        every = ways(rank)
        for way in ("replicated", "hybrid"):
            for dtype in (None, torch.float64):
                model: Any = layers(rank.device)
                policy = MixedPrecisionPolicy(reduce_dtype=dtype)
                for layer in model:
                    every[way](layer, mp_policy=policy)
                every[way](model, mp_policy=policy)
                for held, times in ((model, 1), (model[0], 1), (model[1], 2), (model, 2)):
                    held.set_requires_all_reduce(False)
                    for _ in range(times):
                        model(row(rank.index).to(rank.device)).sum().backward()
                    model.reset_iter_state()
                    model.zero_grad()
                    model.set_requires_all_reduce(True)
                    for synced in (1, 2):
                        found = train(model, rank.index)
                        assert found == [[synced * x for x in gradient] for gradient in right], (way, dtype, times)
                    model.zero_grad()

    world.run(body)
