"""Inductor's overlap scheduling of coalesced collectives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import Rank, World, assert_same, dyadic, requirement
from harness.stacks.collectives import functional
from harness.stacks.limit import runs_with
from harness.stacks.overlap_scheduling import overlapping
from harness.stacks.tracing import Tracer


@requirement(
    "DYN-PASS-5413",
    "With overlap scheduling, coalesced collectives have their results, alone or before another one in their group.",
    source="torch/_inductor/config.py: aten_distributed_optimizations",
)
@pytest.mark.skipif(runs_with("<2.13"), reason="unsupported: no options for FSDP's collectives")
@pytest.mark.parametrize("place", ["alone", "before another"])
@pytest.mark.world(2, timeout=120)
def test_results(world: World, place: str) -> None:
    """Reduce two tensors at once, and perhaps another one alone, which is used first."""

    def body(rank: Rank) -> None:
        group = dist.group.WORLD

        def code(x: torch.Tensor) -> list[torch.Tensor]:
            one, other = functional.all_reduce_coalesced([x, x + 1], "sum", group)
            last = functional.all_reduce(x * 2, "sum", group) if place == "before another" else one
            return [one, other, last @ x]

        x = dyadic(4, 4, key=rank.index, dtype=torch.float32).to(rank.device)
        right = [y + 0 for y in code(x)]
        torch.compiler.reset()
        compiled: Any = torch.compile(code, backend=Tracer("inductor passes"), fullgraph=True)
        with overlapping({"pre_bucketing_fsdp_collectives": False, "compute_estimator": "analytical"}):
            results = compiled(x)
        for number, (one, result) in enumerate(zip(right, results, strict=True)):
            assert_same(one, result + 0, f"tensor {number}")

    world.run(body)
