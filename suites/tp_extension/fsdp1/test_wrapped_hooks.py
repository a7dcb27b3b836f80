"""Communication hooks that PyTorch ships for FSDP1."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch.distributed as dist

from fixtures.wrapped import STRATEGIES, inputs, nested, own
from harness import Rank, World, requirement
from harness.stacks.tp_extension import default_hooks

WHOLE, SHARDED = STRATEGIES[2], STRATEGIES[:2]


@requirement(
    "TP-HOOK-4966",
    "PyTorch's communication hooks for FSDP average gradients over any number of ranks, of the world or a group.",
    source="torch.distributed.algorithms._comm_hooks.default_hooks: allreduce_hook, reduce_scatter_hook, DefaultState",
)
@pytest.mark.world(2, 3, 4)
def test_averages(world: World) -> None:
    """Let each hook reduce what its strategy leaves, in two steps, over the world or a group of all but the last."""

    def body(rank: Rank) -> None:
        part = dist.new_group(range(rank.size - 1)) if rank.size > 2 else None
        groups: list[Any] = [(dist.group.WORLD, rank.size)]
        if part is not None and rank.index < rank.size - 1:
            groups.append((part, rank.size - 1))
        for (group, count), strategy, original in itertools.product(groups, STRATEGIES, (True, False)):
            hook: Any = default_hooks.allreduce_hook if strategy == WHOLE else default_hooks.reduce_scatter_hook
            model = nested(rank, sharding_strategy=strategy, use_orig_params=original, process_group=group)
            model.register_comm_hook(default_hooks.DefaultState(group), hook)
            average = (1.0 + count) / 2
            for step in range(2):
                model.zero_grad()
                model(inputs(rank)).sum().backward()
                found = own(model)
                what = f"{count} ranks, {strategy}, {original=}, step {step}: {found}"
                assert found, what
                assert all(abs(v / average - 3) < 1e-5 or abs(v / average - 5) < 1e-5 for v in found), what

    world.run(body)
