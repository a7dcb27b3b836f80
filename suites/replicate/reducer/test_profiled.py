"""What a profile has of DistributedDataParallel's steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from harness import Rank, World, requirement
from harness.stacks.limit import runs_with

pytestmark = pytest.mark.usefixtures("with_buckets")


@requirement(
    "DDP-PROFILE-61",
    "A profile has an event for each all-reduce that DDP's backward launches, named after its backend.",
    source="torch.profiler; torch.autograd.profiler; distributed_test.py: test_ddp_profiling_torch_profiler",
)
@requirement(
    "DDP-PROFILE-62",
    "A profile has an event for each forward of a DDP module, and another if it searches for unused parameters.",
    source="torch.profiler; distributed_test.py: _test_ddp_profiling",
)
@pytest.mark.skipif(runs_with("<2.12"), reason="before 2.12, profiles have other events of the first step")
@pytest.mark.world(2)
def test_events(world: World) -> None:
    """Record steps from the first one on, or only later ones, by both profilers, of one bucket and of three."""
    cases: list[tuple[dict[str, Any], int]] = [
        ({}, 1),
        ({"bucket_cap_mb": 1e-6}, 3),
        ({"static_graph": True}, 1),
        ({"find_unused_parameters": True, "gradient_as_bucket_view": True}, 2),  # and one of what is used
    ]

    def recorded(kind: str, steps: int, run: Any) -> list[str]:
        if kind == "torch.profiler":
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
                for _ in range(steps):
                    run()
            return [event.name for event in profiler.events()]
        with torch.autograd.profiler.profile() as old:
            for _ in range(steps):
                run()
        return [event.name for event in old.function_events]

    def body(rank: Rank) -> None:
        name = f"{dist.get_backend()}:all_reduce"
        for kind in ("torch.profiler", "torch.autograd.profiler"):
            for options, buckets in cases:
                layers = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3))).to(rank.device)
                model = DistributedDataParallel(layers, **options)

                def run(model: Any = model) -> None:
                    model(torch.ones(1, 4, device=rank.device)).sum().backward()
                    model.zero_grad()

                searched = "find_unused_parameters" in options
                for begins, steps in ((0, 2), (3, 1), (4, 3)):
                    names = recorded(kind, steps, run)
                    what = f"{kind}, {options}, from step {begins}"
                    sent = sum(each == name for each in names)
                    assert sent == buckets * steps if begins else sent >= steps, what
                    assert sum(each == "DistributedDataParallel.forward" for each in names) == steps, what
                    assert any("unused" in each for each in names) == searched, what
                    if begins == 0:
                        run()

    world.run(body)
