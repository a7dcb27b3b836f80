"""The memory that a sharded module holds after forwards that no backward follows, and after backwards."""

from __future__ import annotations

import gc
import itertools
import tracemalloc
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fixtures.memory import held, held_less_than
from harness import Rank, World, requirement

FEATURES = 128
POLICIES = {"plain": MixedPrecisionPolicy(), "mixed": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}


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
                found = held_less_than(limit := before + whole * (kept + 0.5), within=2)
                assert found < limit, f"{what}: {found - before}"
                model[2].reshard()
                found = held_less_than(limit := before + whole * 0.5, within=2)
                assert found < limit, f"{what}, resharded: {found - before}"

    world.run(body)


@requirement(
    "RFSDP-MEMORY-5702",
    "After a synchronized backward, a sharded module holds its shards of gradients, but no whole gradient.",
    source="torch.distributed.fsdp.fully_shard: 'after backward ... reduce-scatters gradients', 'sharded gradients'",
)
@pytest.mark.world(2)
def test_backwards(world: World) -> None:
    """Train three layers, which are resharded after a forward or not, after zero_grad or on top of gradients."""

    def body(rank: Rank) -> None:
        for (name, policy), reshard, roots in itertools.product(POLICIES.items(), (False, True), (False, True)):
            model: Any = nn.Sequential(*(nn.Linear(FEATURES, FEATURES, bias=False) for _ in range(3))).to(rank.device)
            options: dict[str, Any] = {"mesh": rank.mesh(), "mp_policy": policy}
            for layer in () if roots else model:
                fully_shard(layer, reshard_after_forward=reshard, **options)
            fully_shard(model, **options)
            before, whole = held(), FEATURES**2 * (4 if name == "plain" else 2)
            shards = 3 * FEATURES**2 * 4 // rank.size
            for turn in range(3):
                model(torch.ones(1, FEATURES, device=rank.device)).sum().backward()
                what = f"{name}, {reshard=}, {roots=}, turn {turn}: bytes besides gradients, of layers of {whole}"
                found = held_less_than(limit := before + shards + whole * 0.5, within=2)
                assert found < limit, f"{what}: {found - before - shards}"
                if turn:
                    model.zero_grad()

    world.run(body)


@requirement(
    "RFSDP-MEMORY-4886",
    "After an evaluation, a sharded module holds no more memory than before, but for layers that are to stay gathered.",
    source="torch.distributed.fsdp.fully_shard: reshard_after_forward; torch/distributed/fsdp/_fully_shard: "
    "'we have the last FSDP state flush the reference to avoid holding onto memory after forward'",
)
@pytest.mark.parametrize("trained", [True, False], ids=["between-steps", "alone"])
@pytest.mark.world(1)
def test_many_evaluations(world: World, trained: bool) -> None:
    """Evaluate a model of five groups in five turns, after each of which it may be trained for a step."""

    def body(rank: Rank) -> None:
        model: Any = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4))).to(rank.device)
        for part in (*model, model):
            fully_shard(part, mesh=rank.mesh())
        x, bytes_ = torch.ones(1, 2, device=rank.device), []
        tracemalloc.start()
        for _ in range(5):
            with torch.no_grad():
                for _ in range(100):
                    model(x)
            if trained:
                model(x).sum().backward()
                model.zero_grad()
            gc.collect()
            bytes_.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        found = min(after - before for before, after in itertools.pairwise(bytes_)) // 100
        assert found < 64, f"each evaluation leaves {found} bytes of Python's"

    world.run(body)
