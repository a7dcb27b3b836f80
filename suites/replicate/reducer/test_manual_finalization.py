"""Backwards of DDP that the caller finalizes. PyTorch has them since 2.15."""

from __future__ import annotations

from typing import Any

import pytest
from torch.nn.parallel import DistributedDataParallel

from fixtures.layers import alone, layers, row
from harness import Rank, World, assert_on_ranks, requirement

SOURCE = "torch.nn.parallel.DistributedDataParallel"
pytestmark = pytest.mark.needs(torch=f"{SOURCE}.finalize_backward")


@requirement(
    "REPL-FINAL-5440",
    "With require_manual_backward_finalization, gradients are averaged once finalize_backward has returned.",
    source=f"{SOURCE}: finalize_backward, require_manual_backward_finalization",
)
@requirement(
    "REPL-FINAL-5441",
    "finalize_backward is refused without manual finalization, before a backward, within no_sync, or a second time.",
    source=f"{SOURCE}.finalize_backward: 'Raises: RuntimeError'",
)
@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
@pytest.mark.world(2)
def test_finalized(world: World, views: bool) -> None:
    """Run three steps with several buckets by hand, and then one as usual."""

    def body(rank: Rank) -> list[Any]:
        model = DistributedDataParallel(layers(rank.device), gradient_as_bucket_view=views, bucket_cap_mb=1e-6)

        def refused() -> None:
            with pytest.raises(RuntimeError):
                model.finalize_backward()

        def backward() -> None:
            model.zero_grad()
            model(row(rank.index).to(rank.device)).sum().backward()

        def seen() -> list[Any]:
            return [p.grad.flatten().tolist() if p.grad is not None else None for p in model.parameters()]

        refused()
        model.require_manual_backward_finalization = True
        found: list[Any] = []
        for step in range(3):
            refused()
            backward()
            model.finalize_backward()
            found.append(seen())
            refused()
            if step == 1:
                with model.no_sync():
                    backward()
                    refused()
                model.zero_grad()
        model.require_manual_backward_finalization = False
        backward()
        return [*found, seen()]

    assert_on_ranks([[alone(2)] * 4] * 2, world.run(body))
