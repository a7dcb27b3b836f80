"""Gradients under FSDP1 whose elements are not finite, or are zeros with a sign."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy

from fixtures.special_numbers import CLIPPED, NUMBERS, SHAPES, Products, averages, clipped, factors, spelled
from fixtures.wrapped import STRATEGIES, wrapped
from harness import Rank, World, requirement

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "reduced": {"mixed_precision": MixedPrecision(reduce_dtype=torch.bfloat16)},
    "computed": {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16, cast_root_forward_inputs=False)},
}


def gradients(model: Any) -> list[torch.Tensor]:
    """Return the whole gradients of the wrapped module."""
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        return [parameter.grad.to("cpu", copy=True) for parameter in model.parameters()]


@requirement(
    "TP-SPECIAL-9452",
    "Under FSDP, an element of a rank's gradient that is not finite, or is a zero, gives that element of the average "
    "its value, but changes no other.",
    source="torch.distributed.fsdp.FullyShardedDataParallel",
)
@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
@pytest.mark.world(2)
def test_averaged(world: World, strategy: ShardingStrategy, numbers: str) -> None:
    """The element is in each of three parameters, in a backward alone and after one without synchronization."""

    def body(rank: Rank) -> None:
        for option, given in OPTIONS.items():
            for name in SHAPES:
                model = wrapped(rank, Products(), use_orig_params=True, sharding_strategy=strategy, **given)
                own = {each: t.to(rank.device) for each, t in factors(numbers, name, rank.index).items()}
                for accumulated in False, True:
                    model.zero_grad()
                    if accumulated:
                        with model.no_sync():
                            model({each: torch.full_like(t, 2.0) for each, t in own.items()}).backward()
                    model(own).backward()
                    for found, right in zip(gradients(model), averages(numbers, name).values(), strict=True):
                        what = f"{option}, {accumulated=}, {name} has the number"
                        assert spelled(found.float()) == spelled(right + 2 if accumulated else right), what

    world.run(body)


@requirement(
    "TP-SPECIAL-9453",
    "clip_grad_norm_ of FSDP returns one device's norm of gradients, and clips as there, also if one element on one "
    "rank is not finite.",
    source="torch.distributed.fsdp.FullyShardedDataParallel.clip_grad_norm_",
)
@pytest.mark.parametrize(("numbers", "norm"), [case for case in CLIPPED if case[1] != "value"])
@pytest.mark.world(2)
def test_clipped(world: World, numbers: str, norm: float) -> None:
    """The element is in each of three parameters, with every strategy."""

    def body(rank: Rank) -> None:
        for strategy in STRATEGIES:
            for name in SHAPES:
                model = wrapped(rank, Products(), use_orig_params=True, sharding_strategy=strategy)
                own = factors(numbers, name, rank.index)
                model({each: t.to(rank.device) for each, t in own.items()}).backward()
                total = model.clip_grad_norm_(1.0, norm)
                right, rights = clipped(numbers, name, norm)
                what = f"{strategy.name}, {name} has the number"
                assert spelled(total) == right, what
                assert [spelled(found) for found in gradients(model)] == rights, what

    world.run(body)
