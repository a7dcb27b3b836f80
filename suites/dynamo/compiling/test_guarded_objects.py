"""Compiled code that is called with one object after another does not keep which the first of them was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from harness import World, requirement
from suites.dynamo.objects import summed
from suites.dynamo.turns import Make, by_turns


class Missing:
    """The class of an object that stands for no argument."""


class Other:
    """Another class."""


MISSING = Missing()

IDENTITIES: dict[str, tuple[Callable[[Any], bool], list[Make]]] = {
    "None": (lambda thing: thing is None, [lambda: None, Missing, lambda: None]),
    "class": (lambda thing: type(thing) is Missing, [Missing, Other, Missing]),
    "object": (lambda thing: thing is MISSING, [lambda: MISSING, Missing, lambda: MISSING]),
    "no object": (lambda thing: thing is not MISSING, [Missing, lambda: MISSING, Missing]),
    "two objects": (lambda pair: pair[0] is pair[1], [lambda: (MISSING, Missing()), lambda: (MISSING, MISSING)]),
}
"""What asks which object it has, and what it is given by turns."""


@requirement(
    "DYN-GUARD-3752",
    "Compiled code that asks which object it has answers for the object of this call, not for an earlier one of its "
    "class.",
    source="Python: Identity comparisons, 'x is y is true if and only if x and y are the same object'; torch.compile",
)
@pytest.mark.parametrize("what", IDENTITIES)
@pytest.mark.world(2)
def test_identity(world: World, what: str) -> None:
    """Scale a sum over ranks if a thing is the one that is asked for, by turns."""
    ask, makes = IDENTITIES[what]

    def step(x: torch.Tensor, thing: Any) -> torch.Tensor:
        return summed(x) * 2 if ask(thing) else summed(x)

    for wrong in world.run(lambda rank: by_turns(rank, step, makes, name=what)):
        assert not wrong, "\n".join(wrong)


class OfClass:
    """Settings that are two in the class."""

    scale = 2


class Fallback:
    """Settings that are two if they are not set."""

    def __getattr__(self, name: str) -> int:
        return 2


def _set(kind: Callable[[], Any], scale: int | None) -> Any:
    settings = kind()
    if scale is not None:
        settings.scale = scale
    return settings


@requirement(
    "DYN-GUARD-3753",
    "Compiled code reads an attribute where the object of this call has it, be it in the object, in its class or from "
    "__getattr__.",
    source="Python: object.__getattr__, 'Called when the default attribute access fails'; torch.compile",
)
@pytest.mark.parametrize("kind", [OfClass, Fallback], ids=["class", "fallback"])
@pytest.mark.world(2)
def test_attributes(world: World, kind: Callable[[], Any]) -> None:
    """Scale a sum over ranks by an attribute that is not set, and then set."""

    def step(x: torch.Tensor, settings: Any) -> torch.Tensor:
        return summed(x) * settings.scale

    makes = [lambda scale=scale: _set(kind, scale) for scale in (None, 6, None, 7)]
    for wrong in world.run(lambda rank: by_turns(rank, step, makes, name=kind.__name__)):
        assert not wrong, "\n".join(wrong)
