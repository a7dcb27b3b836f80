"""The check of runs against the challenge that a verifier made before they began."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from harness.results import Challenge, ChallengeError, Run
from harness.results.challenge import LARGEST, decode
from harness.safe_io.files import FileError, contents
from reports.model import ReportError
from reports.text import moment


def read(path: Path) -> Challenge:
    """Read a challenge.  Errors: :class:`ReportError`."""
    try:
        return decode(contents(path, LARGEST))
    except FileError as e:
        raise ReportError(str(e)) from None
    except ChallengeError as e:
        raise ReportError(f"{path}: {e}") from None


def challenge_problems(runs: Sequence[Run], challenge: Challenge) -> Iterator[str]:
    """Find runs with a random seed that does not come from a challenge.

    ``runs``: in the order of their names.  Whether a seed follows from the challenge of its own run is checked with
    the run's arguments (:mod:`reports.invocation`).
    """
    answering = [number for number, run in enumerate(runs, 1) if run.header.challenge == challenge]
    if not answering:
        yield f"no run answers the challenge that was made on {moment(challenge.made)}"
        return
    for number, run in enumerate(runs, 1):
        if run.header.challenge is not None and number not in answering:
            yield f"{_name(number)}: answers another challenge, made on {moment(run.header.challenge.made)}"
        elif run.header.seed_drawn and number not in answering:
            yield f"{_name(number)}: its seed {run.header.seed[:40]} was drawn by whoever ran it, not by the challenge"


def told(runs: Sequence[Run], challenge: Challenge) -> Iterator[str]:
    """Say of each run how it relates to a challenge in time; the times are those that the run states."""
    for number, run in enumerate(runs, 1):
        header, end = run.header, run.end
        after = header.started - challenge.made
        when = f"{_span(abs(after))} {'after' if after >= 0 else 'before'} the challenge was made"
        took = f", and ended {_span(max(0.0, end.finished - header.started))} later" if end is not None else ""
        if header.challenge == challenge:
            yield f"{_name(number)}: answers it with the seed {header.seed[:40]}; it began {when}{took}"
        else:
            seed = header.seed[:40] or "none"
            yield f"{_name(number)}: has the seed {seed}, of which it says nothing; it began {when}"


def _name(number: int) -> str:
    return f"runs/{number}.jsonl"


def _span(seconds: float) -> str:
    """Format a duration of any length, as in ``40 s``, ``2 h 05 min`` or ``3 d 4 h``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"
