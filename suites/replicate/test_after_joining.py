"""A DistributedDataParallel after a block of join(): it is as before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks import messages
from suites.replicate.test_buckets import sent

pytestmark = pytest.mark.usefixtures("with_buckets")


@requirement(
    "DDP-JOIN-342",
    "After a block of join, a forward without gradients sends nothing, so that one rank may do it alone.",
    source="torch.nn.parallel.DistributedDataParallel.join: 'context manager'",
)
@pytest.mark.parametrize("enable", [False, True], ids=["disabled", "joined"])
@pytest.mark.world(2)
def test_forward(world: World, enable: bool) -> None:
    """A step in the block, and a forward without gradients after it."""

    def body(rank: Rank) -> int:
        model: Any = DistributedDataParallel(nn.Linear(1, 1, bias=False).to(rank.device))
        x = torch.ones(1, 1, device=rank.device)
        with model.join(enable=enable):
            model(x).sum().backward()
        before = messages.mark()
        with torch.no_grad():
            model(x)
        return len(sent(before))

    assert_on_ranks([0, 0], world.run(body))
