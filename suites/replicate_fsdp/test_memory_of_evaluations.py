"""The memory that a sharded module holds after forwards that no backward follows."""

from __future__ import annotations

import gc
import itertools
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from harness import Rank, World, requirement

FEATURES = 128
POLICIES = {"plain": MixedPrecisionPolicy(), "mixed": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}


def held() -> int:
    """Return the bytes of all live tensors' memory."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):
            local = thing.to_local() if isinstance(thing, DTensor) else thing
            storage = local.untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return sum(found.values())


def held_less_than(limit: float) -> int:
    """Return the bytes of all live tensors' memory, at the latest two seconds after they were too many.

    A backend's thread may hold the tensors of a collective a moment longer.
    """
    end = time.monotonic() + 2
    while (found := held()) >= limit and time.monotonic() < end:
        time.sleep(0.01)  # until the thread has released it
    return found


@requirement(
    "RFSDP-MEMORY-4886",
    "After an evaluation, a sharded module holds no more memory than before, but for layers that are to stay gathered.",
    source="torch.distributed.fsdp.fully_shard: reshard_after_forward; torch/distributed/fsdp/_fully_shard: "
    "'we have the last FSDP state flush the reference to avoid holding onto memory after forward'",
)
@pytest.mark.world(2)
def test_evaluations(world: World) -> None:
    """Evaluate three layers, of which all are resharded or the last one is kept until reshard()."""

    def body(rank: Rank) -> None:
        for (name, policy), kept, gradients in itertools.product(POLICIES.items(), (False, True), (False, True)):
            model: Any = nn.Sequential(*(nn.Linear(FEATURES, FEATURES, bias=False) for _ in range(3))).to(rank.device)
            options: dict[str, Any] = {"mesh": rank.mesh(), "mp_policy": policy}
            for layer in model:
                fully_shard(layer, reshard_after_forward=not (kept and layer is model[2]), **options)
            fully_shard(model, **options)
            before, whole = held(), FEATURES**2 * (4 if name == "plain" else 2)
            for turn in range(2):
                with torch.set_grad_enabled(gradients):
                    model(torch.ones(1, FEATURES, device=rank.device))
                what = f"{name}, {kept=}, {gradients=}, turn {turn}: bytes besides those before, of layers of {whole}"
                found = held_less_than(limit := before + whole * (kept + 0.5))
                assert found < limit, f"{what}: {found - before}"
                model[2].reshard()
                found = held_less_than(limit := before + whole * 0.5)
                assert found < limit, f"{what}, resharded: {found - before}"

    world.run(body)
