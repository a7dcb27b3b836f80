"""What is known of a damage: which test finds it, how that fails, and what it says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from fixtures.faults.collectives import gradients, membership, values, works
from fixtures.faults.collectives.calls import Damage
from fixtures.faults.collectives.catalog import CATALOG, NONE
from harness import World
from tests.collectives.broken import BrokenWorld
from tests.collectives.repairs import REPAIRS

RELATIVES = {damage.name: damage for module in (values, works, membership, gradients) for damage in module.DAMAGES}
"""Narrow relatives of damages, of which a fault audit finds more than are looked for here."""

WRONG = "wrong values"
ERROR = "error"
SILENCE = "no error"
ASSERTION = "assertion"
HANG = "hang"
"""How a test may fail: tensors differ; an error that it does not expect; none where one must be; anything else that it
asserts; ranks are stopped."""


@dataclass(frozen=True)
class Finding:
    """A damage, and a test of the suite that finds it."""

    damage: str
    size: int
    """Of the world."""
    test: Callable[..., None]
    says: str
    """Matches every wrong answer's headline, or somewhere what a test says that has none."""
    arguments: dict[str, Any] = field(default_factory=dict)
    kind: str = WRONG
    """How the test fails."""
    repair: str = ""
    """Of what gloo does wrong, for a test that fails on it as it is."""
    timeout: float | None = None
    """Seconds, for a test that hangs."""

    def __post_init__(self) -> None:
        assert self.damage in (CATALOG | RELATIVES)

    @property
    def repairs(self) -> tuple[Damage, ...]:
        return (REPAIRS[self.repair],) if self.repair else ()

    def run(self, world: World) -> None:
        """The test, with the damage."""
        self._run(BrokenWorld(world, (*self.repairs, (CATALOG | RELATIVES)[self.damage]), self.timeout))

    def run_undamaged(self, world: World) -> None:
        """The test with collectives that are replaced, or repaired, and right."""
        self._run(BrokenWorld(world, (*self.repairs, NONE)))

    def _run(self, world: BrokenWorld) -> None:
        if hasattr(self.test, "hypothesis"):
            _examples(self.test)(world=world, **self.arguments)
        else:
            self.test(world, **self.arguments)


def _examples(test: Any) -> Callable[..., None]:
    """A property on some examples: the same each time, the first that fails not made smaller."""
    few = settings(max_examples=15, phases=(Phase.generate,), derandomize=True, database=None, deadline=None)
    return few(given(data=st.data())(test.hypothesis.inner_test))
