"""Nights as the history gives them back: listed, with their figures, in a line of those that can be compared."""

from __future__ import annotations

import msgspec

from harness.bench.records import Fingerprint, Series


class Past(msgspec.Struct, frozen=True, kw_only=True):
    """A night as it is listed: all but its measurements."""

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
    """What a night said of a series, without the samples."""

    value: float | None
    rounds: list[float]
    p50: float | None = None
    p95: float | None = None
    p99: float | None = None
    refused: str = ""


class Accepted(msgspec.Struct, frozen=True, kw_only=True):
    """A step, a series that is gone, or another alarm that someone accepted."""

    kind: str
    series: str
    """Key of the series; empty: of all of them together."""
    night: str
    """Id of the first night that has it."""
    reason: str
    who: str
    at: float
    ratio: float = 1.0


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """Nights that can be compared: of one fingerprint, subject and profile, the oldest first; what they measured."""

    nights: list[Past]
    figures: dict[str, dict[Series, Figure]]
    accepted: list[Accepted] = []
    fingerprint: Fingerprint = Fingerprint()
    before: Past | None = None
    """Where the first of ``nights`` is the newest: the last night of the same subject and profile on another one."""
    other: Fingerprint = Fingerprint()
    """That night's fingerprint."""
