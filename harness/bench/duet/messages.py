"""What the controller of a duet and its two sides say to each other: one JSON object on each line."""

from __future__ import annotations

import msgspec

from harness.bench.records import Fingerprint, Series

LONGEST = 32 << 20
"""Bytes of the longest line."""


class Begin(msgspec.Struct, tag="begin", frozen=True):
    """Say what you are and what you can measure."""

    profile: str = ""
    """Name or file of a profile; empty: gloo on the host."""
    faults: tuple[str, ...] = ()
    """Names of faults to put into every rank."""
    largest: int = 0
    """Bytes of the largest message; 0: the default."""
    ranks: tuple[int, ...] = ()
    """Numbers of ranks; empty: the profile's, or the usual ones."""
    more: tuple[str, ...] = ()
    """What is offered besides (:data:`harness.bench.measuring.asked.MORE`)."""


class Servers(msgspec.Struct, tag="servers", frozen=True):
    """Start a fresh server, from which ranks are forked."""

    steps: bool = False
    """Whether it imports what training steps need."""


class Ranks(msgspec.Struct, tag="ranks", frozen=True):
    """Start a fresh set of ranks."""

    size: int


class Prepare(msgspec.Struct, tag="prepare", frozen=True):
    """Prepare a series: check its values, and warm up."""

    series: int
    """Its number in what the side offers."""


class Round(msgspec.Struct, tag="round", frozen=True):
    """Measure a round."""

    series: int
    count: int
    lead: int


class Count(msgspec.Struct, tag="count", frozen=True):
    """Count what a series needs, on the ranks that there are."""

    series: int
    """Its number in what the side offers."""
    times: int = 20
    """Calls over which to count."""


class Finish(msgspec.Struct, tag="finish", frozen=True):
    """Check the values of a series again, and forget it."""

    series: int


class End(msgspec.Struct, tag="end", frozen=True):
    """End the ranks."""


Request = Begin | Servers | Ranks | Prepare | Round | Count | Finish | End


class Described(msgspec.Struct, tag="described", frozen=True):
    """What a side is."""

    fingerprint: Fingerprint
    commit: str
    """The commit from which its torch was built."""
    harness: str
    """Folder of the Concord that measures."""
    offers: tuple[Series, ...]


class Done(msgspec.Struct, tag="done", frozen=True):
    """It is done."""


class Prepared(msgspec.Struct, tag="prepared", frozen=True):
    """A series is ready.  Times are in seconds."""

    first: float
    typical: float
    copy: float


class Measured(msgspec.Struct, tag="measured", frozen=True):
    """A round."""

    seconds: tuple[float, ...]
    """The slowest rank's seconds of each iteration."""


class Counted(msgspec.Struct, tag="counted", frozen=True):
    """What one call needs, on all ranks together."""

    counts: dict[str, float]
    ranks: int
    missing: dict[str, str] = {}
    """Counts that can't be had there, with the reason."""


class Wrong(msgspec.Struct, tag="wrong", frozen=True):
    """A request failed: wrong values, ranks that failed, or input that can't be used."""

    kind: str
    """``values``, ``ranks`` or ``input``."""
    text: str


Answer = Described | Done | Prepared | Measured | Counted | Wrong


class Protocol(ValueError):
    """A line that is no message."""


def encoded(message: Request | Answer) -> bytes:
    """Return the line of a message."""
    return msgspec.json.encode(message) + b"\n"


_REQUESTS = msgspec.json.Decoder(Request)
_ANSWERS = msgspec.json.Decoder(Answer)


def request(line: bytes) -> Request:
    """Read a request.  Errors: :class:`Protocol`."""
    try:
        found: Request = _REQUESTS.decode(line)
    except (msgspec.MsgspecError, RecursionError, ValueError) as e:
        raise Protocol(str(e)) from e
    return found


def answer(line: bytes) -> Answer:
    """Read an answer.  Errors: :class:`Protocol`."""
    try:
        found: Answer = _ANSWERS.decode(line)
    except (msgspec.MsgspecError, RecursionError, ValueError) as e:
        raise Protocol(str(e)) from e
    return found
