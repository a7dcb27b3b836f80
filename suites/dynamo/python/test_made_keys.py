"""Keys that compiled code makes of dataclasses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from harness import World, requirement
from suites.dynamo.objects import summed, unlike


@dataclass(frozen=True)
class Whole:
    """A key all of whose fields count."""

    name: str
    comment: str = ""


@dataclass(frozen=True)
class Commented:
    """A key with a comment that does not count."""

    name: str
    comment: str = field(default="", compare=False)


@dataclass(frozen=True)
class Unhashed:
    """A key with a comment that makes it differ, but not its hash."""

    name: str
    comment: str = field(default="", hash=False)


@dataclass(unsafe_hash=True)
class Changeable:
    """A key that is not frozen."""

    name: str
    comment: str = ""


@requirement(
    "DYN-KEY-3763",
    "In compiled code, two dataclasses are one key of a dictionary if they are equal, by the fields that count.",
    source="dataclasses.field: 'hash: If None (the default), use the value of compare'; torch.compile",
)
@pytest.mark.parametrize(
    "kind",
    [Whole, Commented, Unhashed, Changeable],
    ids=["whole", "compare=False", "hash=False", "unsafe_hash"],
)
@pytest.mark.world(2)
def test_dataclasses(world: World, kind: Callable[..., object]) -> None:
    """Write to a dictionary by a key and by keys that are equal or not, and scale a sum over ranks by its length."""

    def step(x: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
        table = {kind("a"): 1}
        table[kind("a", "again")] = 2
        table[kind("a")] = 3
        return summed(x) * len(table), list(table.values())

    for wrong in world.run(lambda rank: unlike(rank, {"dataclasses": (step, ())})):
        assert not wrong, "\n".join(wrong)
