"""ZeroRedundancyOptimizer and clipping with parameters of any shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from harness import Rank, World, requirement

KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "no dimensions": lambda: torch.tensor(2.0),
    "no elements": lambda: torch.ones(0),
    "no rows": lambda: torch.ones(0, 3),
    "no columns": lambda: torch.ones(3, 0),
    "one element": lambda: torch.ones(1, 1),
    "transposed": lambda: torch.arange(6.0).view(2, 3).t(),
    "channels last": lambda: torch.arange(16.0).view(2, 2, 2, 2).contiguous(memory_format=torch.channels_last),
}


class Summed(nn.Module):
    """The sum of three parameters, each element times its number and the input."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        made = {"first": torch.ones(3), "odd": KINDS[kind](), "last": torch.ones(5, 2)}
        for name, tensor in made.items():
            self.register_parameter(name, nn.Parameter(tensor))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum."""
        parts = [(p * torch.arange(1.0, p.numel() + 1, device=p.device).view(p.shape)).sum() for p in self.parameters()]
        return x * torch.stack(parts).sum()


@requirement(
    "DDP-ZERO-9461",
    "A ZeroRedundancyOptimizer takes the optimizer's steps, and consolidates its states, for parameters of any shape "
    "beside others, which may be all of a rank.",
    source="torch.distributed.optim.ZeroRedundancyOptimizer: params, parameters_as_bucket_view, consolidate_state_dict",
)
@pytest.mark.parametrize("views", [False, True], ids=["apart", "views"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("transposed", "channels last")])
@pytest.mark.world(1, 2, 3)
def test_steps(world: World, kind: str, views: bool) -> None:
    """Clip the gradients and step twice with Adam, under DDP, then compare parameters and states."""

    def body(rank: Rank) -> None:
        plain = Summed(kind)
        model = DistributedDataParallel(Summed(kind).to(rank.device))
        given: dict[str, Any] = {"lr": 0.5, "foreach": False}
        sharded: Any = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.Adam, parameters_as_bucket_view=views, **given
        )
        whole: Any = torch.optim.Adam(plain.parameters(), **given)
        for step in range(2):
            for module, optimizer, x in (
                (model, sharded, 2.0 * rank.index + step),
                (plain, whole, rank.size - 1.0 + step),
            ):
                module.zero_grad()
                module(torch.tensor(x, device=next(module.parameters()).device)).backward()
                clip_grad_norm_(module.parameters(), 4.0, 1.0)
                optimizer.step()
            for found, right in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(found.detach().cpu(), right.detach(), msg=f"step {step}")
        sharded.consolidate_state_dict(to=0)
        if rank.index == 0:
            for number, state in whole.state_dict()["state"].items():
                for name, value in state.items():
                    found = sharded.state_dict()["state"][number][name]
                    torch.testing.assert_close(found.cpu(), value, msg=f"{name} of {number}")

    world.run(body)
