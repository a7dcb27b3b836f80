"""Tensors that autograd has saved and that compiled code changes in place before the backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from harness import Rank, World, requirement
from harness.stacks import dynamo
from harness.stacks.collectives import functional
from suites.dynamo.backends import INDUCTOR


def _reduced(t: torch.Tensor) -> None:
    dist.all_reduce(t)


def _scaled(t: torch.Tensor) -> None:
    t.mul_(2)


def _part(t: torch.Tensor) -> None:
    t[:1].add_(1)


def _gathered(t: torch.Tensor) -> None:
    dist.all_gather_into_tensor(t, t[:1] * 2)


def _broadcast(t: torch.Tensor) -> None:
    t.copy_(functional.broadcast(t, 1, dist.group.WORLD))


def _unchanged(t: torch.Tensor) -> None:
    dist.all_reduce(t * 2)


CHANGES: dict[Callable[[torch.Tensor], None], bool] = {
    _reduced: True,
    _scaled: True,
    _part: True,
    _gathered: True,
    _broadcast: True,
    _unchanged: False,
}
"""Functions, and whether they change the tensor that they are given."""


@requirement(
    "DYN-INPLACE-5000",
    "A backward raises an error if compiled code has changed in place what autograd saved for it.",
    source="autograd mechanics: In-place correctness checks ('version counter'); torch.compile",
)
@pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
@pytest.mark.world(2, timeout=120)
def test_versions(world: World, backend: str) -> None:
    """Change a factor of a loss by arithmetic and by collectives, with gradients on or off, or leave it.

    Inductor compiles only what needs no kernel.
    """

    def body(rank: Rank) -> list[str]:
        wrong = []
        for function, changes in CHANGES.items():
            if backend == "inductor" and function not in (_reduced, _broadcast):
                continue
            compiled = dynamo.compiled(function, backend=backend)[0]
            for grad in (True, False):
                w = torch.ones(2, device=rank.device, requires_grad=True)
                factor = torch.full((2,), rank.index + 1.0, device=rank.device)
                loss = (w * factor).sum()
                with torch.set_grad_enabled(grad):
                    compiled(factor)
                found = "no error"
                try:
                    loss.backward()
                except RuntimeError as error:
                    found = "error" if "modified by an inplace operation" in str(error) else str(error)
                if found != ("error" if changes else "no error"):
                    wrong.append(f"{function.__name__.strip('_')}, gradients {grad}: {found}, gradient {w.grad}")
        return wrong

    for wrong in world.run(body):
        assert not wrong, "\n".join(wrong)
