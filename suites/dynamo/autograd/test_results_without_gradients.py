"""Metrics that compiled code returns beside a loss: they require no gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import Rank, World, requirement
from harness.stacks import dynamo
from harness.stacks.collectives import functional


def _summed(x: torch.Tensor) -> torch.Tensor:
    return functional.all_reduce(x, "sum", dist.group.WORLD)


def _detached(y: torch.Tensor) -> torch.Tensor:
    return y.detach().sum() * 2


def _without_mode(y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return _summed(y.mean())


def _whole_number(y: torch.Tensor) -> torch.Tensor:
    return y.argmax()


def _compared(y: torch.Tensor) -> torch.Tensor:
    return y > 0


def _made(y: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(y)


METRICS: list[Callable[[torch.Tensor], torch.Tensor]] = [_detached, _without_mode, _whole_number, _compared, _made]


def beside(order: list[int], x: torch.Tensor, w: torch.Tensor, seen: torch.Tensor) -> list[torch.Tensor]:
    """Return metrics in some order, with a loss before them, between them and after them; count calls."""
    y = _summed(x * w)
    seen.add_(1)
    first, *others = [METRICS[number](y) for number in order]
    return [y.sum(), first, *others[:1], y.square().sum(), *others[1:], y * 2]


@requirement(
    "DYN-RESULT-5000",
    "Results of compiled code require gradients where those of uncompiled code do, however many are returned in "
    "whatever order.",
    source="torch.compile: the compiled function does what the function does; torch.Tensor.requires_grad",
)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.world(2)
def test_metrics(world: World, backend: str) -> None:
    """Return five metrics that were detached, made without gradients, are no floats, or are new, in two orders."""

    def body(rank: Rank) -> list[str]:
        wrong = []
        for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0]):

            def step(*given: torch.Tensor, order: list[int] = order) -> list[torch.Tensor]:
                return beside(order, *given)

            found: list[Any] = []
            for run in step, dynamo.compiled(step, backend=backend)[0]:
                w = torch.tensor([0.5, -2.0], device=rank.device, requires_grad=True)
                results = run(
                    torch.full((2,), rank.index + 1.0, device=rank.device), w, torch.zeros((), device=rank.device)
                )
                torch.stack([y.sum() for y in results if y.requires_grad]).sum().backward()
                assert w.grad is not None
                found.append(([y.requires_grad for y in results], w.grad.tolist()))
            if found[0] != found[1]:
                wrong.append(f"{order}: {found[0]} uncompiled, {found[1]} compiled")
        return wrong

    for wrong in world.run(body):
        assert not wrong, "\n".join(wrong)
