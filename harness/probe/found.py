"""The outcome of a probe as data: versioned, written as JSON, and compared with what a profile claims."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from harness.profiles import Claims, Platform, Profile
from harness.profiles.vocabulary import FEATURES
from harness.safe_io.untrusted import Refused, json_checked, said

FORMAT = "concord.probe/1"

RIGHT = "right"
"""The trial gave the right values."""
ENDS = (RIGHT, "refused", "wrong", "crashed", "hung", "not-tried")
"""How a trial can end.  ``refused``: with a Python error on every rank; ``not-tried``: the time was up, or the
collective had hung too often."""


class Trial(msgspec.Struct, frozen=True):
    """One collective with one dtype and one reduction, and how it ended."""

    collective: str
    dtype: str
    op: str
    """Empty if there is none."""
    end: str
    detail: str = ""
    """What was wrong, on one line."""

    @property
    def name(self) -> str:
        by = f" with {self.op}" if self.op else ""
        return f"{self.collective} of {self.dtype}{by}"


class Ability(msgspec.Struct, frozen=True):
    """A feature of a stack, or the stack itself (``feature`` is empty), and how trying it ended."""

    stack: str
    feature: str
    end: str
    detail: str = ""

    @property
    def name(self) -> str:
        return f"{self.feature} of {self.stack}" if self.feature else self.stack


class Size(msgspec.Struct, frozen=True):
    """A world size, and how trying it ended."""

    size: int
    end: str
    detail: str = ""


class Found(msgspec.Struct, frozen=True):
    """Everything that a probe found."""

    backend: str
    device: str
    imports: tuple[str, ...]
    platform: dict[str, str]
    sizes: tuple[Size, ...]
    trials: tuple[Trial, ...]
    abilities: tuple[Ability, ...]
    seconds: float = 0.0
    format: str = FORMAT

    @property
    def right(self) -> set[tuple[str, str, str]]:
        """Collective, dtype and reduction of every trial that was right."""
        return {(t.collective, t.dtype, t.op) for t in self.trials if t.end == RIGHT}


class Difference(msgspec.Struct, frozen=True):
    """The differences between what was found and what a profile claims."""

    profile: str
    undeclared: tuple[str, ...]
    """Right, but not claimed."""
    not_found: tuple[str, ...]
    """Claimed and tried, but not right."""


def described(platform: Platform) -> dict[str, str]:
    """Return a platform as data."""
    return {name: getattr(platform, name) for name in ("torch", "python", "machine", "os")}


def against(found: Found, profile: Profile, claims: Claims) -> Difference:
    """Compare what was found with a profile.  ``claims``: the profile's claims on this platform."""
    undeclared, missing = [], []

    def judge(name: str, end: str, claimed: bool, detail: str) -> None:
        if end == RIGHT and not claimed:
            undeclared.append(name)
        elif claimed and end not in (RIGHT, "not-tried"):
            missing.append(f"{name}: {end}{f': {detail}' if detail else ''}")

    for size in found.sizes:
        claimed = not profile.world_sizes or size.size in profile.world_sizes
        judge(f"worlds of {size.size}", size.end, claimed, size.detail)
    for trial in found.trials:
        judge(trial.name, trial.end, claims.has(trial.collective, trial.dtype, trial.op), trial.detail)
    for ability in found.abilities:
        features = [ability.feature] if ability.feature else []
        judge(ability.name, ability.end, not claims.lacks_features(ability.stack, features), ability.detail)
    return Difference(profile.name, tuple(undeclared), tuple(missing))


def encoded(found: Found, difference: Difference | None) -> str:
    """Return what was found as JSON, with its difference from a profile's claims, or null, as ``against``."""
    both = {**msgspec.to_builtins(found), "against": msgspec.to_builtins(difference) if difference else None}
    return msgspec.json.format(msgspec.json.encode(both), indent=1).decode() + "\n"


def decoded(text: str | bytes) -> Found:
    """Read what :func:`encoded` has written.  Errors: ValueError that says what is wrong and where."""
    try:
        data = text.encode() if isinstance(text, str) else text
        outcome = msgspec.json.decode(json_checked(data), type=Found)
    except (Refused, msgspec.MsgspecError, UnicodeError, RecursionError) as e:
        raise ValueError(f"this is no probe's outcome: {said(e)}") from e
    if outcome.format != FORMAT:
        raise ValueError(f"the format {outcome.format!r}; this Concord reads {FORMAT!r}")
    return outcome


def claimed_features(abilities: Iterable[Ability], stack: str) -> list[str]:
    """Return the features of a stack that the suites know and that were right or had no trial."""
    tried = {a.feature: a.end for a in abilities if a.stack == stack}
    return [name for name in FEATURES[stack] if tried.get(name, RIGHT) == RIGHT]


# the shortest way to write combinations

Cell = tuple[str, str, str]
Box = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]


def words_of(right: Iterable[Cell], orders: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    """Return, for each axis, the words that any cell has, in the given order.  An empty word does not count."""
    cells = list(right)
    return tuple(
        tuple(word for word in order if any(cell[axis] == word for cell in cells)) for axis, order in enumerate(orders)
    )


def boxes(missing: Sequence[Cell], right: set[Cell], axes: Sequence[Sequence[str]]) -> list[Box]:
    """Return products of words that together contain every missing cell, and no right cell or unneeded word.

    A cell without a reduction (an empty third word) is in a box whose third axis is empty, which means everything.
    """
    products: list[Box] = []
    left = list(missing)
    while left:
        first = left[0]
        box: list[set[str]] = [{first[0]}, {first[1]}, {first[2]} if first[2] else set()]
        for axis in (2, 1, 0):
            if axis == 2 and not first[2]:
                continue
            for word in axes[axis]:
                grown = [*box]
                grown[axis] = {*box[axis], word}
                if not any(_inside(cell, grown) for cell in right):
                    box = grown
        met = [cell for cell in missing if _inside(cell, box)]
        box = [{cell[axis] for cell in met} if words else set() for axis, words in enumerate(box)]
        listed = tuple(tuple(word for word in axes[axis] if word in box[axis]) for axis in range(3))
        products.append((listed[0], listed[1], listed[2]))
        left = [cell for cell in left if not _inside(cell, box)]
    return products


def _inside(cell: Cell, box: Sequence[set[str]]) -> bool:
    return all(not words or word in words for word, words in zip(cell, box, strict=True))


def platform_line(found: Found) -> str:
    """Describe the platform of a probe for people."""
    where: dict[str, Any] = found.platform
    return f"torch {where.get('torch', '?')}, Python {where.get('python', '?')}, {where.get('machine', '?')}"
