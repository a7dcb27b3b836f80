"""Results of queries to the history: nights, their figures, and lines of nights that can be compared."""

from __future__ import annotations

import msgspec

from harness.bench.records import Fingerprint, Series


class Past(msgspec.Struct, frozen=True, kw_only=True):
    """A stored night without its measurements."""

    id: str
    started: float
    fingerprint: str
    commit: str
    profile: str
    profile_hash: str
    subject: str
    complete: bool
    measured: int
    """Number of series."""


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a series in one night, without the samples."""

    value: float | None
    rounds: list[float]
    p50: float | None = None
    p95: float | None = None
    p99: float | None = None
    refused: str = ""


class Accepted(msgspec.Struct, frozen=True, kw_only=True):
    """A step, a missing series, or another alarm that someone accepted."""

    kind: str
    series: str
    """Key of the series; empty: all series together."""
    night: str
    """Id of the first night with the change."""
    reason: str
    who: str
    at: float
    ratio: float = 1.0


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """The environment whose performance was accepted, with which duets compare later nights."""

    environment: str
    """A virtual environment's folder or a Python, and variables; with ``make``, a name that the command knows."""
    make: str = ""
    """The shell command that makes it, with ``{candidate}`` and ``{folder}``; empty: it exists."""
    reason: str
    who: str
    at: float
    """Seconds since the epoch."""


class Dueted(msgspec.Struct, frozen=True, kw_only=True):
    """What a duet of a night's environment with the accepted one said about a series."""

    night: str
    series: Series | None
    """None: about all that were to be measured."""
    verdict: str
    """A verdict of a duet, or ``unmeasured``."""
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    median: bool = False
    """Whether these are ratios of the median iteration and not of the fastest."""
    margin: float = 0.0
    against: str = ""
    """The accepted environment."""
    why: str = ""
    at: float
    """Seconds since the epoch."""


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """Nights that can be compared (same fingerprint, subject and profile), oldest first, with their figures."""

    nights: list[Past]
    figures: dict[str, dict[Series, Figure]]
    accepted: list[Accepted] = []
    dueted: list[Dueted] = []
    """The duets of these nights, in order, without those against an environment that is no longer the accepted one."""
    baseline: Baseline | None = None
    fingerprint: Fingerprint = Fingerprint()
    before: Past | None = None
    """The last earlier night of the same subject and profile on another fingerprint; None: there is none."""
    other: Fingerprint = Fingerprint()
    """The fingerprint of ``before``."""
