"""What a level takes at the least, read from ``levels.toml``, which has a version of its own (docs/reports.md)."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from harness.profiles.vocabulary import COLLECTIVES, DTYPES, OPS
from harness.requirements import LEVELS
from reports.model import ReportError

FILE = Path(__file__).parent / "levels.toml"
_LARGEST_WORLD = 1024

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Size = Annotated[int, msgspec.Meta(ge=1, le=_LARGEST_WORLD)]
Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Z][A-Z0-9]*(-[A-Z0-9]+)+-[0-9]{2,}$")]


class Minimum(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one level takes at the least."""

    world_sizes: Annotated[tuple[Size, ...], msgspec.Meta(min_length=1)]
    """Sizes of worlds on which tests of the level's stack must have passed, ascending."""
    subgroups: tuple[Name, ...] = ()
    """Ids of requirements about groups of some ranks, none of which may be unsupported."""
    collectives: tuple[str, ...] = ()
    """The collectives that the profile must claim for each of ``dtypes``, and with each of ``ops`` if they reduce."""
    dtypes: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()
    unsupported: Share
    """The largest share of mandatory requirements that are unsupported, or had one rank although they ask for more."""
    drawn: Annotated[int, msgspec.Meta(ge=1, le=_LARGEST_WORLD)]
    """The least number of sizes from which a property that asks for several must have drawn its worlds."""
    examples: Annotated[float, msgspec.Meta(gt=0, le=100)]
    """The least share of the suites' examples that a run must draw to count."""
    waived: Share
    """The largest share of mandatory requirements that are waived for a defect that is not PyTorch's own."""


class Minimums(msgspec.Struct, frozen=True):
    """What every level takes at the least."""

    version: int
    levels: dict[str, Minimum]


class _File(msgspec.Struct, forbid_unknown_fields=True):
    version: Annotated[int, msgspec.Meta(ge=1)]
    levels: dict[str, dict[str, Any]]


@functools.cache
def shipped() -> Minimums:
    """Return the minimums of this Concord.  Errors: :class:`ReportError`."""
    try:
        text = FILE.read_text()
    except (OSError, UnicodeDecodeError) as e:
        raise ReportError(f"{FILE}: {e}; install Concord again") from None
    return read(text, str(FILE))


def read(text: str, file: str) -> Minimums:
    """Read minimums from TOML.

    ``file``: its name in messages.
    Errors: :class:`ReportError`, which names the file, the place in it and what belongs there.
    """
    try:
        found = msgspec.convert(tomllib.loads(text), type=_File)
    except tomllib.TOMLDecodeError as e:
        raise ReportError(f"{file}: not TOML: {e}") from None
    except (msgspec.ValidationError, RecursionError) as e:
        raise ReportError(f"{file}: {e}") from None
    missing, surplus = [*(LEVELS.keys() - found.levels.keys())], [*(found.levels.keys() - LEVELS.keys())]
    if missing or surplus:
        what = f"no table [levels.{min(missing)}]" if missing else f"{min(surplus)[:40]!r} is no level"
        raise ReportError(f"{file}: {what}: write one table for each of {', '.join(LEVELS)}")
    levels = {}
    for level in LEVELS:
        try:
            levels[level] = msgspec.convert(found.levels[level], type=Minimum)
            wrong = _wrong(levels[level])
        except msgspec.ValidationError as e:
            wrong = str(e)
        if wrong:
            raise ReportError(f"{file}: [levels.{level}] {wrong}")
    return Minimums(found.version, levels)


def _wrong(minimum: Minimum) -> str:
    """Say what is wrong with a minimum whose types are right; empty if nothing is."""
    if list(minimum.world_sizes) != sorted({*minimum.world_sizes}):
        return f"world_sizes: {list(minimum.world_sizes)}: write each size once, smallest first"
    for key, known in (("collectives", COLLECTIVES), ("dtypes", DTYPES), ("ops", OPS)):
        unknown = _first_not_in(getattr(minimum, key), known)
        if unknown:
            return f"{key}: {unknown[:40]!r} is none of them: write some of {', '.join(known)}"
    if bool(minimum.collectives) != bool(minimum.dtypes):
        return "collectives and dtypes: give both or neither"
    return ""


def _first_not_in(words: Iterable[str], known: Sequence[str]) -> str:
    return next((word for word in words if word not in known), "")
