"""Communication hooks of FSDP1 that send gradients in a smaller dtype: PyTorch's, and one of a user."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from fixtures.wrapped import STRATEGIES, inputs, nested, own
from harness import Rank, World, requirement
from harness.stacks.tp_extension import default_hooks


def halves(state: Any, gradient: torch.Tensor, shard: torch.Tensor | None = None) -> None:
    """Average a gradient in float16, which a shard of it is written to, if there is one."""
    sent = gradient.half()
    dist.all_reduce(sent, group=state.process_group)
    average = (sent / state.world_size).to(gradient.dtype)
    if shard is None:
        gradient.copy_(average)
    else:
        shard.copy_(average.chunk(state.world_size)[dist.get_rank(state.process_group)])


@requirement(
    "TP-HOOK-5207",
    "A communication hook of FSDP that compresses gradients leaves the average of them in the dtype of parameters.",
    source="torch.distributed.algorithms._comm_hooks.default_hooks: fp16_compress_hook, bf16_compress_hook; "
    "FullyShardedDataParallel.register_comm_hook",
)
@pytest.mark.parametrize(
    "hook", [halves, default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook], ids=lambda hook: hook.__name__
)
@pytest.mark.world(2)
def test_compression(world: World, hook: Any) -> None:
    """Take two steps with each strategy, whose gradients are small numbers that are not rounded."""

    def body(rank: Rank) -> None:
        for strategy in STRATEGIES:
            model = nested(rank, sharding_strategy=strategy)
            model.register_comm_hook(default_hooks.LowPrecisionState(dist.group.WORLD), hook)
            for step in range(2):
                model.zero_grad()
                model(inputs(rank)).sum().backward()
                found = own(model)
                dtypes = {p.grad.dtype for p in model.parameters() if p.grad is not None}
                what = f"{strategy}, step {step}: {found}, {dtypes}"
                assert found, what
                assert found <= {4.5, 7.5}, what
                assert dtypes == {torch.float32}, what

    world.run(body)
