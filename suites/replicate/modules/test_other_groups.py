"""DistributedDataParallel whose process group is replaced by another, with more, fewer or the same ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from harness import Rank, World, requirement
from harness.stacks import replicate

SOURCE = "torch/nn/parallel/distributed.py: _update_process_group"
pytestmark = pytest.mark.usefixtures("with_buckets")


class Model(nn.Module):
    """Two parameters; the backward may fail when the gradient of the second is there, and that of the first is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.ones(())) for _ in range(2))
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.first
        if self.fails:
            x.register_hook(lambda gradient: 1 / 0)
        result: torch.Tensor = x + self.second * 2
        return result


@requirement(
    "DDP-GROUP-241",
    "Once the process group of a module is replaced, its gradients are averaged over the new group alone.",
    source=f"{SOURCE}: 'so that we can shrink/expand DDP world size without having to reinitialize DDP'",
)
@requirement(
    "DDP-GROUP-242",
    "The process group may be replaced after any step, also when its backward failed or did not synchronize.",
    source=f"{SOURCE}: 'Force a rebuild of buckets for a new process group'; pytorch/pytorch#114194",
)
@pytest.mark.world(3)
def test_replaced(world: World) -> None:
    """Use the world, another group of all ranks, two of them, and all again, after steps of each kind."""
    settings: list[dict[str, Any]] = [
        {"bucket_cap_mb": 1e-6},
        {"gradient_as_bucket_view": True},
        {"find_unused_parameters": True},
        {},
    ]

    def body(rank: Rank) -> None:
        x = torch.tensor(12.0 * (rank.index + 1), device=rank.device)
        groups = [([0, 1, 2], dist.new_group([0, 1, 2])), ([0, 2], dist.new_group([0, 2]))]
        for options in settings:
            model: Any = DistributedDataParallel(Model().to(rank.device), **options)
            module = model.module

            def step(members: list[int], what: str, model: Any = model, module: Any = module) -> None:
                model(x).backward()
                mean = sum(12.0 * (r + 1) for r in members) / len(members)
                assert [p.grad.item() for p in module.parameters()] == [mean, 2.0], what
                model.zero_grad()

            step([0, 1, 2], "at first")
            current = [0, 1, 2]
            for members, group in (*groups, groups[0]):
                for before in ("good", "failed", "not synchronized"):
                    if before == "failed" and "bucket_cap_mb" in options:
                        continue  # then the failed step has begun to reduce a bucket, which nobody waits for
                    what = f"{options}, {members} after a step that was {before}"
                    module.fails = before == "failed"
                    if rank.index in current and module.fails:
                        with pytest.raises(ZeroDivisionError):
                            model(x).backward()
                    elif rank.index in current and before == "not synchronized":
                        with model.no_sync():
                            model(x).backward()
                    module.fails = False
                    model.zero_grad()
                    replicate.update_group(model, group)
                    current = members
                    if rank.index in members:
                        for number in range(3):
                            step(members, f"{what}, step {number}")
            assert model.process_group is groups[0][1]

    world.run(body)
