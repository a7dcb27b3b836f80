"""Averages of gradients whose elements are not finite, or are zeros with a sign."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

from fixtures.managed import ways
from fixtures.special_numbers import NUMBERS, SHAPES, Products, averages, factors, spelled
from harness import Rank, World, requirement
from harness.stacks import replicate, replicate_fsdp

DDP: dict[str, dict[str, Any]] = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "small buckets": {"bucket_cap_mb": 1e-5},
}
HOOKS = {"allreduce": allreduce_hook, "fp16": fp16_compress_hook}
FSDP: dict[str, dict[str, Any]] = {
    "plain": {},
    "reduced": {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)},
    "computed": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)},
    "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
}


def distributed(stack: str, rank: Rank) -> dict[str, Callable[[], Any]]:
    """Return functions that make the model with each option of a stack."""
    if stack == "DDP":
        made: dict[str, Callable[[], Any]] = {
            option: lambda given=given: DistributedDataParallel(Products().to(rank.device), **given)
            for option, given in DDP.items()
        }
        for name, hook in HOOKS.items():

            def hooked(hook: Any = hook) -> Any:
                model = DistributedDataParallel(Products().to(rank.device))
                model.register_comm_hook(None, hook)
                return model

            made[name] = hooked
        return made
    if stack == "replicate":
        return {"plain": lambda: replicate.apply(Products(), rank)}
    manage = ways(rank)[stack]
    return {
        option: lambda given=given: manage(Products().to(rank.device), **given)  # type: ignore[misc]
        for option, given in FSDP.items()
    }


@requirement(
    "RFSDP-SPECIAL-9450",
    "An element of a rank's gradient that is not finite, or is a zero, gives that element of the average its value, "
    "but changes no other.",
    source="torch.nn.parallel.DistributedDataParallel; torch.distributed.fsdp.fully_shard",
)
@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("stack", ["DDP", "replicate", "replicated", "sharded", "hybrid"])
@pytest.mark.world(2)
def test_averaged(world: World, stack: str, numbers: str) -> None:
    """The element is in each of three parameters, in a backward alone and after one without synchronization."""

    def body(rank: Rank) -> None:
        for option, make in distributed(stack, rank).items():
            for name in SHAPES:
                model = make()
                given = {each: t.to(rank.device) for each, t in factors(numbers, name, rank.index).items()}
                for accumulated in (False, True) if stack != "replicate" and option != "static" else (False,):
                    model.zero_grad()
                    if accumulated:
                        alone(model, {each: torch.full_like(t, 2.0) for each, t in given.items()})
                    model(given).backward()
                    found = replicate_fsdp.gradients(model)
                    for each, right in averages(numbers, name).items():
                        gradient = found[f"module.{each}" if stack == "DDP" else each].cpu().float()
                        what = f"{option}, {accumulated=}: {each}, of which {name} has the number"
                        assert spelled(gradient) == spelled(right + 2 if accumulated else right), what

    world.run(body)


def alone(model: nn.Module, given: dict[str, torch.Tensor]) -> None:
    """Run a backward without synchronization."""
    fsdp: Any = model
    with model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext():
        if not isinstance(model, DistributedDataParallel):
            fsdp.set_requires_gradient_sync(False)
        model(given).backward()
    if not isinstance(model, DistributedDataParallel):
        fsdp.set_requires_gradient_sync(True)
