"""Memory under FSDP1: what a rank has between steps, and when whole parameters are freed."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy, StateDictType

from fixtures.wrapped import STRATEGIES, Outer, Weight, inputs, own, wrapped
from harness import Rank, World, requirement

SOURCE = "torch.distributed.fsdp.ShardingStrategy"


def held() -> int:
    """Return the size in bytes of all tensors of this process."""
    gc.collect()
    tensors = (each for each in gc.get_objects() if issubclass(type(each), torch.Tensor))
    storages = [each.untyped_storage() for each in tensors if each.device.type != "meta"]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}.values())


def settled(before: int, right: int) -> int:
    """Return how much more this process holds; threads of a backend may let go of a tensor after its collective."""
    for _ in range(20):
        if held() - before == right:
            break
    return held() - before


@requirement(
    "TP-MEMORY-4311",
    "Between steps a rank has its shards of parameters and of gradients in their own dtype, and no other memory.",
    source=f"{SOURCE}; torch.distributed.fsdp.MixedPrecision",
)
@pytest.mark.world(2)
def test_between_steps(world: World) -> None:
    """Measure after a backward, after its gradients are gone, and after a state dict and whole parameters."""

    def body(rank: Rank) -> None:
        ways = itertools.product(STRATEGIES, (None, MixedPrecision(torch.bfloat16, torch.float16)))
        for (strategy, mixed), original in zip(ways, itertools.cycle((True, False, False, True)), strict=False):
            what = f"{strategy}, {original=}, {mixed}"
            options = {"sharding_strategy": strategy, "use_orig_params": original, "mixed_precision": mixed}
            before = held()
            model = wrapped(rank, Outer(2002, 5.0, wrapped(rank, Weight(1000, 3.0), **options)), **options)
            shards = 4 * (3002 if strategy == ShardingStrategy.NO_SHARD else 500 + 1001)
            found = {}
            for step in range(2):
                model(inputs(rank)).sum().backward()
                found[f"gradients {step}"] = settled(before, 2 * shards)
                model.zero_grad()
                if not original:  # FSDP keeps gradients of original parameters until it uses these again
                    found[f"none {step}"] = settled(before, shards)
            with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
                model.state_dict()
            with FullyShardedDataParallel.summon_full_params(model):
                pass
            found["whole"] = settled(before, shards)
            right = {name: shards * (2 if name.startswith("gradients") else 1) for name in found}
            assert found == right, f"{what}: {found}, not {right}"
            del model

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
    "FULL_SHARD frees whole parameters after each forward and backward, SHARD_GRAD_OP after a backward that "
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
