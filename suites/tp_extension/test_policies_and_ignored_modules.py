"""FSDP1 with a wrapping policy and modules that it is to ignore."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fixtures.wrapped import wrapped
from harness import Rank, World, assert_on_ranks, requirement


class Scaled(nn.Module):
    """Multiply by a weight and a buffer, and by those of an inner module."""

    scale: torch.Tensor

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("scale", torch.tensor([257.0]))  # bfloat16 has 256 and 258
        self.inner = inner or nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(self.weight.sum() * self.scale * x)
        return result


class Around(Scaled):
    """The module with the ignored one inside."""


class Beside(Scaled):
    """A module that has nothing to do with it."""


POLICIES: dict[str, ModuleWrapPolicy | None] = {
    "none": None,
    "beside": ModuleWrapPolicy({Beside}),
    "around": ModuleWrapPolicy({Around}),
}
"""What the policy wraps in an FSDP module of its own."""


@requirement(
    "TP-IGNORE-4600",
    "A buffer of a module that FSDP ignores keeps its dtype, whatever modules around it the policy wraps.",
    source="torch.distributed.fsdp.FullyShardedDataParallel: ignored_modules: 'child modules' parameters and buffers "
    "are ignored', auto_wrap_policy; pytorch/pytorch#77439",
)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.world(2)
def test_buffers_of_ignored_modules(world: World, policy: str) -> None:
    """Ignore a module inside another one, beside which there is a third, as a module or as a state."""

    def body(rank: Rank) -> list[Any]:
        found = []
        for original, how in itertools.product((False, True), ("ignored_modules", "ignored_states")):
            ignored, beside = Scaled(), Beside()
            model = wrapped(
                rank,
                nn.Sequential(Around(ignored), beside),
                auto_wrap_policy=POLICIES[policy],
                use_orig_params=original,
                mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16),
                **{how: [ignored]},
            )
            model(torch.ones(1, device=rank.device)).sum().backward()
            found.append([(buffer.dtype, buffer.item()) for buffer in (ignored.scale, beside.scale)])
        return found

    assert_on_ranks([[[(torch.float32, 257.0), (torch.bfloat16, 256.0)]] * 4] * world.size, world.run(body))
