"""Modules on the meta device that FSDP1 gives values: with parameters, with buffers, with both or with neither."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fixtures.wrapped import STRATEGIES, whole
from harness import Rank, World, requirement

HELD = {
    "parameter": ("weight",),
    "buffer": ("kept",),
    "buffer outside of states": ("passing",),
    "both": ("weight", "kept", "passing"),
    "nothing": (),
}
"""What a module may hold of its own."""


class Holder(nn.Module):
    """Add up what the module holds, and maybe what is inside it."""

    def __init__(self, held: tuple[str, ...], *inner: nn.Module) -> None:
        super().__init__()
        self.held, self.inner, self.calls = held, nn.ModuleList(inner), 0
        for name in held:
            if name == "weight":
                self.weight = nn.Parameter(torch.zeros(3))
            else:
                self.register_buffer(name, torch.zeros(3), persistent=name == "kept")

    def reset_parameters(self) -> None:
        """Set everything to 2, 3 and 4."""
        self.calls += 1
        with torch.no_grad():
            for name in self.held:
                getattr(self, name).copy_(torch.arange(2.0, 5.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input plus sums."""
        for name in self.held:
            x = x + getattr(self, name).sum()
        for module in self.inner:
            x = module(x)
        return x


@requirement(
    "TP-META-4968",
    "FSDP gives values to each module on the meta device that has parameters or buffers of its own, once.",
    source="torch.distributed.fsdp.FullyShardedDataParallel: param_init_fn: 'reset_parameters'",
)
@pytest.mark.parametrize("inner", HELD)
@pytest.mark.world(2)
def test_holders(world: World, inner: str) -> None:
    """Put a module into another one and beside a layer, and wrap them together or by a policy."""

    def body(rank: Rank) -> None:
        policies = None, ModuleWrapPolicy({nn.Linear}), ModuleWrapPolicy({Holder})
        for i, (outer, policy) in enumerate(itertools.product(HELD, policies)):
            strategy, original = STRATEGIES[(i + i // 3) % 3], bool(i % 2)
            with torch.device("meta"):
                layers = Holder(HELD[outer], Holder(HELD[inner])), nn.Linear(1, 1)
            model: Any = FullyShardedDataParallel(
                nn.Sequential(*layers),
                device_id=rank.device,
                sharding_strategy=strategy,
                use_orig_params=original,
                auto_wrap_policy=policy,
            )
            what = f"in {outer}: {strategy}, {policy}, {original=}"
            holders = [module for module in model.modules() if isinstance(module, Holder)]
            assert [holder.calls for holder in holders] == [int(bool(holder.held)) for holder in holders], what
            for name, buffer in model.named_buffers():
                assert (buffer.device, buffer.tolist()) == (rank.device, [2.0, 3.0, 4.0]), f"{what}: {name}"
            found = {name: p.tolist() for name, p in whole(model).items() if name.endswith("weight") and p.dim() == 1}
            assert all(values == [2.0, 3.0, 4.0] for values in found.values()), f"{what}: {found}"
            assert len(found) == sum("weight" in holder.held for holder in holders), f"{what}: {found}"
            last = {name: p.item() for name, p in whole(model).items() if name in ("1.weight", "1.bias")}
            x = 1 + 9 * sum(len(holder.held) for holder in holders)
            output = model(torch.ones(1, 1, device=rank.device))
            assert output.item() == pytest.approx(last["1.weight"] * x + last["1.bias"], rel=1e-5), what
            output.sum().backward()

    world.run(body)
