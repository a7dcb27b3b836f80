"""What compiled code says of the gradients of tensors that it has changed in place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from harness import Rank, World, requirement
from harness.stacks import dynamo
from suites.dynamo.objects import summed, unlike


def _itself(w: torch.Tensor) -> torch.Tensor:
    a = torch.zeros_like(w)
    a.add_(w)
    return a


def _second_name(w: torch.Tensor) -> torch.Tensor:
    a = torch.zeros_like(w)
    b = a
    a += w
    return b


def _base(w: torch.Tensor) -> torch.Tensor:
    a = torch.zeros_like(w)
    a[0].add_(w[0])
    return a


def _view(w: torch.Tensor) -> torch.Tensor:
    a = torch.zeros_like(w)
    b = a.view(-1)
    a[0] = w[0]
    return b


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "itself": _itself,
    "second name": _second_name,
    "base": _base,
    "view": _view,
}
"""Functions that change a tensor by a weight in place, and return it under some name."""


@requirement(
    "DYN-INPLACE-3757",
    "Compiled code that changes a tensor by a weight in place finds that it requires a gradient, under each of its "
    "names.",
    source="torch.Tensor.requires_grad: 'True if gradients need to be computed for this Tensor'; torch.compile",
)
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.world(2)
def test_requires_grad(world: World, name: str) -> None:
    """Ask a changed tensor whether it requires a gradient, beside a sum over ranks."""

    def step(x: torch.Tensor) -> tuple[torch.Tensor, bool]:
        return summed(x), CHANGES[name](x.clone().requires_grad_()).requires_grad

    for wrong in world.run(lambda rank: unlike(rank, {name: (step, ())})):
        assert not wrong, "\n".join(wrong)


SETTINGS: dict[str, tuple[bool, ...]] = {
    "on": (True,),
    "off": (False,),
    "off and on": (False, True),
    "on and off": (True, False),
}
"""What requires_grad_ is given, one after the other."""


@requirement(
    "DYN-INPLACE-3758",
    "A tensor that compiled code makes and returns requires a gradient as requires_grad_ was last told.",
    source="torch.Tensor.requires_grad_: 'Change if autograd should record operations on this tensor'; torch.compile",
)
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.world(2)
def test_settings(world: World, settings: str) -> None:
    """Return a sum over ranks after requires_grad_ was called, and ask the result."""

    def step(x: torch.Tensor) -> torch.Tensor:
        y = summed(x)
        for setting in SETTINGS[settings]:
            y.requires_grad_(setting)
        return y

    def body(rank: Rank) -> list[bool]:
        compiled, _ = dynamo.compiled(step, backend="eager", fullgraph=False)
        return [call(torch.ones(2, device=rank.device)).requires_grad for call in (step, compiled)]

    for told, found in world.run(body):
        assert found == told, f"after {settings}: requires_grad is {told} uncompiled, {found} compiled"
