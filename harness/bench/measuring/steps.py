"""Training steps that are measured: which of them, of which sizes, and with which options.

What runs them on ranks is :mod:`harness.bench.measuring.stepping`, which imports the stacks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from harness.bench.measuring.asked import OVERLAP, RANKS, at_least
from harness.bench.records import STEP, Series, pairs
from harness.worlds.world import World

STACKS = ("replicate", "replicate_fsdp", "tp_extension")
SYNCED = STACKS[:2]
"""Those that can leave micro-batches unaveraged."""


@dataclass(frozen=True)
class Step:
    """A training step: one or several micro-batches, forward and backward, then SGD."""

    stack: str
    pairs: int = 4
    width: int = 256
    rows: int = 16
    """Rows of one micro-batch on one rank."""
    micro_batches: int = 1
    synced: bool = True
    """Whether gradients are averaged after every micro-batch, or only after the last."""
    compiler: str = ""
    """Backend of ``torch.compile``; empty: not compiled."""
    options: tuple[tuple[str, Any], ...] = ()
    """Names and values of the stack's options: ``(("bucket_cap_mb", 1),)``."""

    def __post_init__(self) -> None:
        if self.stack not in STACKS:
            raise ValueError(f"no stack {self.stack!r}; there are {', '.join(STACKS)}")
        if min(self.pairs, self.width, self.rows, self.micro_batches) < 1:
            raise ValueError(f"{self}: sizes are whole numbers from 1")

    @property
    def operation(self) -> str:
        """The operation of its series."""
        return f"{STEP}{self.stack}"

    @property
    def variant(self) -> tuple[tuple[str, str], ...]:
        """The variant of its series."""
        named = {
            "compiled": self.compiler,
            "micro-batches": str(self.micro_batches) if self.micro_batches > 1 else "",
            "model": f"{self.pairs}x2 of {self.width}, {self.rows} rows",
            "synced": "last" if self.micro_batches > 1 and not self.synced else "",
            **{name: str(value) for name, value in self.options},
        }
        return pairs(named)

    def series(self, world: World, metric: str = "time") -> Series:
        """Return the series of one metric of this step in a world."""
        return Series(
            operation=self.operation,
            metric=metric,
            dtype="float32",
            world=world.size,
            backend=world.spec.backend,
            device=world.spec.device,
            variant=self.variant,
        )


BUCKETS = {"whole": 25.0, "quarter": 0.5}
"""Bucket sizes in MiB; the model has 2 MiB of parameters."""
WIDE = {"width": 1024, "rows": 64}
"""A step with enough compute to hide communication behind."""


def accumulating(stack: str, *, synced: bool) -> Step:
    """Return a step of four micro-batches.  ``synced``: each of them is averaged, not only the last."""
    return Step(stack, micro_batches=4, synced=synced)


def bucketed(capacity: float) -> Step:
    """Return a step of composable DDP with buckets of so many MiB."""
    return Step("replicate", options=(("bucket_cap_mb", capacity),))


def overlapping(*, more: bool, compiled: bool) -> list[Step]:
    """Return the steps of every stack.

    ``more``: also wide ones, and ones of which only the last of four micro-batches is averaged.  ``compiled``: whether
    they are for compilers, whose backend is left to the caller.
    """
    usual = [Step(stack) for stack in STACKS]
    wide = [replace(step, **WIDE) for step in usual]  # type: ignore[arg-type]
    late = [accumulating(stack, synced=False) for stack in SYNCED]
    return usual + (wide + (late if compiled else []) if more else [])


def eager(asked: Collection[int] = (), more: Collection[str] = ()) -> Iterator[tuple[Step, int]]:
    """Yield every step that is measured without a compiler, with its number of ranks.

    ``asked``: numbers of ranks, the usual ones by default.  ``more``: some of
    :data:`~harness.bench.measuring.asked.MORE`.
    """
    for ranks in at_least(2, asked) or RANKS:
        yield from ((step, ranks) for step in overlapping(more=OVERLAP in more, compiled=False))
    others = [accumulating(stack, synced=synced) for stack in SYNCED for synced in (True, False)]
    others += map(bucketed, BUCKETS.values())
    for ranks in at_least(2, asked) or (2,):
        yield from ((step, ranks) for step in others)


def usual_steps(offered: Iterable[Series]) -> list[Series]:
    """Return the usual step of each stack on 2 ranks, of those that are offered."""
    usual = {(step.operation, step.variant) for step in map(Step, STACKS)}
    return [one for one in offered if one.world == 2 and (one.operation, one.variant) in usual]


def described(step: Step) -> str:
    """Describe a step for a test's id."""
    words = (step.stack, "wide" if step.width > Step.width else "", "last" if step.micro_batches > 1 else "")
    return "-".join(filter(None, words))
