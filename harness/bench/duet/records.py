"""What a duet is about and what it measured: plain data, as its journal keeps it."""

from __future__ import annotations

import hashlib
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from harness.bench.records import Fingerprint, Series
from harness.safe_io.untrusted import Moment

VERSION = 1

SHARES = (0.0, 0.05, 0.10, 0.25, 0.50)
"""The quantiles of iterations that a journal keeps of each pair of sets."""

Duration: TypeAlias = Annotated[float, Meta(gt=0, le=1e6)]
"""Seconds of an iteration."""
Amount: TypeAlias = Annotated[float, Meta(ge=0, le=1e18)]
Small: TypeAlias = Annotated[int, Meta(ge=0, le=1_000_000)]
Text: TypeAlias = Annotated[str, Meta(max_length=4000)]
Name: TypeAlias = Annotated[str, Meta(max_length=400)]
Needs: TypeAlias = Annotated[dict[Name, Amount], Meta(max_length=100)]
"""Counts by name."""
A, B = "A", "B"
SIDES = (A, B)


class About(msgspec.Struct, frozen=True, kw_only=True):
    """What a side is, for people and to tell whether it is still the same."""

    label: Text
    """What the user calls it: a folder, a commit, variables."""
    python: Text
    harness: Text
    commit: Text = ""
    """The commit from which its torch was built."""
    source: Text = ""
    """The commit of the sources that it runs, if it was asked for."""
    profile: Text = ""
    faults: tuple[Name, ...] = ()
    variables: tuple[tuple[Name, Text], ...] = ()
    """Variables that this side alone was given, as they may be shown."""
    fingerprint: Fingerprint = Fingerprint()


class Begun(msgspec.Struct, tag="duet", tag_field="record", frozen=True, kw_only=True):
    """The first line: two sides, the series, and how they are judged."""

    time: Moment
    a: About
    b: About
    series: Annotated[tuple[Series, ...], Meta(min_length=1, max_length=10_000)]
    rate: Annotated[float, Meta(gt=0, lt=1)]
    margin: Annotated[float, Meta(gt=0, le=10)]
    seed: Small = 0
    version: int = VERSION

    def of(self, side: str) -> About:
        """Return what a side is."""
        return self.a if side == A else self.b


class Session(msgspec.Struct, tag="session", tag_field="record", frozen=True):
    """A call of the command works on the duet from here on."""

    time: Moment


class Round(msgspec.Struct, frozen=True, array_like=True):
    """One round of a side."""

    side: Annotated[str, Meta(pattern="^[AB]$")]
    time: Moment
    """When it ended."""
    figure: Duration
    """The median iteration: with the others, it shows what the machine did."""


class Taken(msgspec.Struct, frozen=True, kw_only=True):
    """A series on one pair of fresh sets of ranks."""

    series: Small
    """Its number among the series of the duet."""
    a: Annotated[tuple[Duration, ...], Meta(min_length=len(SHARES), max_length=len(SHARES))]
    """Quantiles (:data:`SHARES`) of the slowest rank's iterations, of all rounds together."""
    b: Annotated[tuple[Duration, ...], Meta(min_length=len(SHARES), max_length=len(SHARES))]
    rounds: Annotated[tuple[Round, ...], Meta(max_length=1000)] = ()


class Pair(msgspec.Struct, tag="pair", tag_field="record", frozen=True):
    """A pair of fresh sets of ranks has been measured."""

    taken: Annotated[tuple[Taken, ...], Meta(max_length=10_000)]


class Counts(msgspec.Struct, tag="counts", tag_field="record", frozen=True, kw_only=True):
    """What a series needs, counted on sets of fresh ranks: of one call, and of all ranks together."""

    series: Small
    a: Annotated[tuple[Needs, ...], Meta(max_length=100)]
    b: Annotated[tuple[Needs, ...], Meta(max_length=100)]
    why: Text = ""
    """Why there are none."""


class Failed(msgspec.Struct, tag="failed", tag_field="record", frozen=True):
    """A series failed on a side; it is not measured any more."""

    series: Small
    side: Annotated[str, Meta(pattern="^[AB]$")]
    kind: Name
    why: Text


class Generation(msgspec.Struct, tag="generation", tag_field="record", frozen=True):
    """The pairs since the last generation make one generation."""

    seconds: Annotated[float, Meta(ge=0, le=1e7)]
    """What it took, with the start of the servers."""


class Ended(msgspec.Struct, tag="ended", tag_field="record", frozen=True):
    """The time was used up, and the series that were not decided had a last look."""


Record = Begun | Session | Counts | Pair | Failed | Generation | Ended


def identity(begun: Begun) -> str:
    """Return what tells a duet from others: the sides, the series and how they are judged, but not the time."""
    same = msgspec.structs.replace(begun, time=0.0)
    return hashlib.sha256(msgspec.json.encode(same, order="deterministic")).hexdigest()[:12]
