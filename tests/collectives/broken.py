"""Collectives that are damaged or repaired in the ranks, while a suite's test runs there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from fixtures.faults.collectives.calls import Damage, put
from harness import Rank, World

Repair = Damage
"""The same for the better: what the backend does wrong is done right."""


@dataclass(frozen=True)
class BrokenWorld:
    """A world whose collectives are changed, for a test that wants a world."""

    world: World
    changes: tuple[Damage, ...]
    """From the inside out: repairs before damages."""
    timeout: float | None = None
    """Seconds that a test may take at most, for one that is expected to hang."""
    size: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", self.world.size)

    def run(
        self, fn: Callable[..., Any], *args: Any, timeout: float | None = None, watch: bool = True, **keywords: Any
    ) -> list[Any]:
        """As World.run."""
        return self.world.run(
            run_changed, self.changes, fn, args, keywords, timeout=self.timeout or timeout, watch=watch
        )


def run_changed(rank: Rank, changes: tuple[Damage, ...], fn: Callable[..., Any], args: Any, keywords: Any) -> Any:
    """Call a function on this rank while collectives are changed."""
    with ExitStack() as undone:
        for change in changes:
            undone.enter_context(changed(change))
        return fn(rank, *args, **keywords)


@contextmanager
def changed(change: Damage) -> Iterator[None]:
    """Put a damage or a repair into this process, and take it out again."""
    memory: dict[str, Any] = {}
    replaced = put(change, memory)
    try:
        yield
    finally:
        for where, attribute, right in replaced:
            setattr(where, attribute, right)
        if "later" in memory:
            memory["later"].end()
