"""Tensors that autograd has saved and that compiled code changes in place before the backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from harness import Rank, World, assert_on_ranks, requirement
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


def _given(mesh: DeviceMesh, kind: str) -> torch.Tensor:
    """Return a tensor of ones, or one that is sharded."""
    ones = torch.ones(2, device=mesh.device_type)
    return DTensor.from_local(ones, mesh, [Shard(0)], run_check=False) if kind == "sharded" else ones


LATER: dict[str, Callable[[torch.Tensor], object]] = {
    "unchanged": lambda t: t * 2,
    "scaled": lambda t: t.mul_(5),
    "copied into": lambda t: t.copy_(t * 5),
    "stepped": lambda t: torch.optim.SGD([t.requires_grad_()], lr=0.5).step(),
}
"""What happens to a factor between the forward and the backward."""


@requirement(
    "DYN-INPLACE-8804",
    "A backward raises an error if a tensor that compiled code was given, and saved, has been changed in place since.",
    source="autograd mechanics: In-place correctness checks ('version counter'); torch.compile",
)
@pytest.mark.parametrize("kind", ["plain", "sharded"])
@pytest.mark.world(2)
def test_changed_later(world: World, kind: str) -> None:
    """Compile a product, change a factor after it, as a step does, or leave it, and run the backward of the other."""

    def body(rank: Rank) -> list[str]:
        wrong, mesh = [], rank.mesh(2)
        for how, change in LATER.items():
            found = []
            for function in (torch.mul, dynamo.compiled(lambda x, y: x * y)[0]):
                x, factor = _given(mesh, kind).requires_grad_(), _given(mesh, kind)
                factor.grad = torch.ones_like(factor)
                result: Any = function(x, factor)
                change(factor)
                try:
                    (result.to_local() if kind == "sharded" else result).sum().backward()
                    found.append("no error")
                except RuntimeError as error:
                    found.append("error" if "modified by an inplace operation" in str(error) else str(error))
            right = "no error" if how == "unchanged" else "error"
            if found != [right] * 2:
                wrong.append(f"{how}: {found[0]}, compiled {found[1]}")
        return wrong

    assert_on_ranks([[]] * 2, world.run(body))
