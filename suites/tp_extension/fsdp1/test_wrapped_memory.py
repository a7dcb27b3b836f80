"""Memory under FSDP1: what a rank has between steps, and when whole parameters are freed."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy, StateDictType

from fixtures.wrapped import STRATEGIES, Outer, Weight, inputs, own, wrapped
from harness import Rank, World, requirement

SOURCE = "torch.distributed.fsdp.ShardingStrategy"


def held(model: nn.Module) -> int:
    """Return the size in bytes of the tensors of a model: of its modules, their parameters and what these have."""
    storages, seen = dict[int, int](), dict[int, Any]()
    left: list[Any] = [vars(module) for module in model.modules()]
    while left:
        each = left.pop()
        if id(each) in seen:
            continue
        seen[id(each)] = each
        if isinstance(each, torch.Tensor):
            storages[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
            left += [vars(each), each.grad if each.is_leaf else None]
        elif isinstance(each, dict):
            left += each.values()
        elif isinstance(each, list | tuple):
            left += each
    return sum(size for place, size in storages.items() if place)


@requirement(
    "TP-MEMORY-4311",
    "Between steps a model holds shards of its parameters and their gradients in full precision, but nothing else.",
    source=f"{SOURCE}; torch.distributed.fsdp.MixedPrecision",
)
@pytest.mark.world(2)
def test_between_steps(world: World) -> None:
    """Measure after a backward, after its gradients are gone, and after a state dict and whole parameters."""

    def body(rank: Rank) -> None:
        ways = itertools.product(STRATEGIES, (None, MixedPrecision(torch.bfloat16, torch.float16)), (True, False))
        for strategy, mixed, original in ways:
            what = f"{strategy}, {original=}, mixed={mixed is not None}"
            options = {"sharding_strategy": strategy, "use_orig_params": original, "mixed_precision": mixed}
            model = wrapped(rank, Outer(2002, 5.0, wrapped(rank, Weight(1000, 3.0), **options)), **options)
            shards = 4 * (3002 if strategy == ShardingStrategy.NO_SHARD else 500 + 1001)
            found = {}
            for step in range(2):
                model(inputs(rank)).sum().backward()
                found[f"gradients {step}"] = held(model)
                model.zero_grad()
                if not original:  # FSDP keeps gradients of original parameters until it uses these again
                    found[f"none {step}"] = held(model)
            with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
                model.state_dict()
            for only in True, False:
                with FullyShardedDataParallel.summon_full_params(model, rank0_only=only, writeback=not only):
                    pass
            found["whole"] = held(model)
            right = {name: shards * (2 if name.startswith("gradients") else 1) for name in found}
            assert found == right, f"{what}: {found}, not {right}"

    world.run(body)


class Keeping(Weight):
    """A weight whose memory, as it was in the last forward, is kept."""

    memory: Any

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product."""
        self.memory = self.weight.untyped_storage()
        return super().forward(x)


@requirement(
    "TP-MEMORY-4312",
    "FULL_SHARD frees whole parameters after each forward or backward, SHARD_GRAD_OP after a backward that "
    "synchronizes, and both after summon_full_params or a state dict.",
    source=f"{SOURCE}: FULL_SHARD, SHARD_GRAD_OP",
)
@pytest.mark.world(2)
def test_freed(world: World) -> None:
    """Look at the memory of an inner module after each part of steps, one of which is in no_sync."""

    def body(rank: Rank) -> None:
        ways = itertools.product(STRATEGIES[:2], (True, False), (None, MixedPrecision(torch.bfloat16)))
        for strategy, original, mixed in ways:
            what = f"{strategy}, {original=}, {mixed}"
            options = {"sharding_strategy": strategy, "use_orig_params": original, "mixed_precision": mixed}
            part = Keeping(4, 3.0)
            model = wrapped(rank, Outer(8, 5.0, wrapped(rank, part, **options)), **options)
            found = list[bool]()

            def step(model: Any = model, part: Any = part, found: list[bool] = found) -> None:
                loss = model(inputs(rank)).sum()
                found.append(part.memory.nbytes() > 0)
                loss.backward()
                found.append(part.memory.nbytes() > 0)

            step()
            with model.no_sync():
                step()
            step()
            grads = strategy == ShardingStrategy.SHARD_GRAD_OP
            assert found == [grads, False, grads, grads, grads, False], f"{what}: {found}"
            with FullyShardedDataParallel.summon_full_params(model):
                memory = part.weight.untyped_storage()
                assert memory.nbytes() >= 16, what
            assert memory.nbytes() == 0, what
            with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
                assert {p.numel() for p in model.state_dict().values()} == {4, 8}, what
            assert memory.nbytes() == 0, what
            assert own(model), what

    world.run(body)
