"""FSDP1 between evaluations, which no backward follows, and steps of an optimizer."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp import ShardingStrategy

from fixtures.wrapped import STRATEGIES, Outer, Weight, inputs, wrapped
from harness import Rank, World, requirement

SOURCE = "torch.distributed.fsdp.FullyShardedDataParallel"


@requirement(
    "TP-STEP-3900",
    "A forward under FSDP1 uses the parameters as the last optimizer step left them.",
    source=f"{SOURCE}; torch.optim.Optimizer.step",
)
@pytest.mark.parametrize("when", ["trained", "evaluated"])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
@pytest.mark.world(2)
def test_after_a_step(world: World, strategy: ShardingStrategy, when: str) -> None:
    """Run three steps of SGD, with or without an evaluation between backward and step, on weights in and outside."""

    def body(rank: Rank) -> None:
        for original in True, False:
            options = {"use_orig_params": original, "sharding_strategy": strategy, "device_mesh": rank.mesh()}
            model = wrapped(rank, Outer(8, 1.0, wrapped(rank, Weight(4, 1.0), **options)), **options)
            alone = Outer(8, 1.0, Weight(4, 1.0))
            sgd, plain = (torch.optim.SGD(m.parameters(), lr=0.25) for m in (model, alone))
            x = inputs(rank)
            for step in range(3):
                y, right = model(torch.ones_like(x)), alone(torch.ones(1))
                assert y.tolist() == right.tolist(), f"{original=}, step {step}"
                y.sum().backward()
                right.sum().backward()
                if when == "evaluated":
                    with torch.no_grad():
                        model(x)
                for each in sgd, plain:
                    each.step()
                    each.zero_grad()

    world.run(body)
