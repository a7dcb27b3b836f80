"""Batches that a training loop gives up under FSDP over tensor parallelism, and ranks without gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy

from fixtures.skipped import WAYS, Fragile, skip, train
from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks import tp_extension

SOURCE = "torch/distributed/fsdp/fully_sharded_data_parallel.py: FullyShardedDataParallel"


@requirement(
    "TP-SKIP-01",
    "A batch that is given up, before its backward or because its forward raised, changes no later step.",
    source=SOURCE,
)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("original", [True, False], ids=["original", "flat"])
@pytest.mark.parametrize("cast", [False, True], ids=["plain", "mixed-precision"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.world(2)
def test_skipped(world: World, way: str, cast: bool, original: bool, strategy: str) -> None:
    """Give up the first batch, and one between two steps of SGD."""

    def body(rank: Rank) -> dict[str, list[float]]:
        options: dict[str, Any] = {"mixed_precision": MixedPrecision(torch.bfloat16)} if cast else {}
        model = tp_extension.apply(
            Fragile(),
            rank,
            plan={},
            use_orig_params=original,
            sharding_strategy=ShardingStrategy[strategy],
            **options,
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
        for _ in range(2):
            skip(model, rank.device, way)
            train(model, rank.device, 0.5 + rank.index)
            optimizer.step()
            optimizer.zero_grad()
        return {name: each.flatten().tolist() for name, each in tp_extension.parameters(model).items()}

    # Ranks' inputs are 0.5 and 1.5, so gradients of both layers are 2, and then 2 times 0.75.
    right = {"first.weight": [1 - 0.25 - 0.1875] * 4, "second.weight": [1 - 0.25 - 0.1875] * 4}
    assert_on_ranks([right] * world.size, world.run(body))


@requirement(
    "TP-CLIP-01",
    "Gradients are clipped by value on every rank, whether or not it has gradients of its own.",
    source="torch/nn/utils/clip_grad.py: clip_grad_value_",
)
@pytest.mark.parametrize("size", [1, 8], ids=["of-one-rank", "of-all-ranks"])
@pytest.mark.world(2)
def test_clipped_by_value(world: World, size: int) -> None:
    """Shard a weight of one number, which is in one rank's shard, and one of which each rank has a part."""

    def body(rank: Rank) -> list[float]:
        layer = nn.Linear(size, 1, bias=False)
        model = tp_extension.apply(layer, rank, plan={}, use_orig_params=True)
        model(torch.full((1, size), 2.0, device=rank.device)).sum().backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.5)
        gradients = tp_extension.gradients(model)
        assert gradients is not None
        return gradients["weight"].flatten().tolist()

    assert_on_ranks([[0.5] * size] * world.size, world.run(body))
