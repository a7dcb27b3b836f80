"""Results that a selective checkpoint saves on the device or offloads to the host, for its backward."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fixtures.managed import ways
from harness import Rank, World, requirement


class Drawn(nn.Module):
    """A layer that multiplies by random numbers in a checkpoint, which does not restore the random state."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.weight, self.options = nn.Parameter(torch.ones(8)), options

    def region(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight * torch.rand_like(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        options = self.options | {"use_reentrant": False, "preserve_rng_state": False}
        result: torch.Tensor = checkpoint(self.region, x, **options)
        return result * 1


@requirement(
    "RFSDP-CKPT-5630",
    "The backward of a selective checkpoint takes results that its policy saves or offloads from the forward.",
    source="torch.utils.checkpoint.CheckpointPolicy: MUST_SAVE, PREFER_SAVE, MUST_CPU_OFFLOAD, PREFER_CPU_OFFLOAD: "
    "'will be saved during the forward pass, offloaded to CPU, and reloaded to GPU during the backward pass'",
)
@pytest.mark.parametrize("policy", ["MUST_SAVE", "PREFER_SAVE", "MUST_CPU_OFFLOAD", "PREFER_CPU_OFFLOAD"])
@pytest.mark.world(2)
def test_drawn_results(world: World, policy: str) -> None:
    """The gradient of ones times random numbers is what the forward returned; take two steps."""

    def body(rank: Rank) -> None:
        contexts = partial(create_selective_checkpoint_contexts, lambda *args, **options: CheckpointPolicy[policy])
        for way, manage in ways(rank).items():
            model: Any = manage(Drawn(context_fn=contexts).to(rank.device))
            for step in range(2):
                x = torch.ones(8, device=rank.device, requires_grad=True)
                y = model(x)
                y.sum().backward()
                assert x.grad is not None
                same = x.grad.eq(y).tolist()
                assert all(same), f"{way}, step {step}: drawn again, same as in the forward: {same.count(True)} of 8"

    world.run(body)
