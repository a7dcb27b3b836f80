"""What a thorough run tells its user: a line about each property while it runs, and a table at the end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest

from harness.thorough.effort import Effort, shown
from harness.thorough.journal import Journal, JournalError, Progress
from harness.thorough.live import Live


class Ticker:
    """Shows the progress of properties at intervals. It reads the journal, whatever else the process does."""

    def __init__(self, kept: Journal, asked: Effort, config: pytest.Config) -> None:
        self._journal, self._asked = kept, asked
        self._seen: dict[str, tuple[int, int]] = {}
        every = min(60.0, max(1.0, asked.budget / 60)) if asked.budget else 30.0
        live = Live(config, self._news, every, "concord-progress")
        self.start, self.stop = live.start, live.stop

    def _news(self) -> str:
        try:
            tally = self._journal.read()
        except JournalError:
            return ""  # the process that runs tests meets and reports it, too
        lines = []
        for key, p in tally.properties.items():
            counts = p.passed, p.given_up
            if p.outcome or counts == self._seen.get(key, (0, 0)):
                continue
            self._seen[key] = counts
            lines.append(f"concord: {_line(p, timed=bool(self._asked.budget))}")
        return "\n".join(lines) + f"; {tally.done} of {len(tally.properties)} properties done\n" if lines else ""


def _line(p: Progress, *, timed: bool) -> str:
    """Return a line about the progress of a property."""
    left = f"{shown(max(0.0, p.goal - p.seconds))} left" if timed else f"{max(0, round(p.goal) - p.passed)} left"
    return f"{p.test}: {p.passed} passed, {p.given_up} given up, {shown(p.seconds)}, {left}"


def table(properties: Iterable[Progress]) -> Iterator[str]:
    """Yield the lines of a table of what a run has done."""
    rows = [
        (
            p.test,
            str(p.passed),
            str(len(p.contents)),
            str(p.given_up),
            shown(p.seconds),
            (p.outcome or ("interrupted" if p.seconds else "not begun"))
            + (f" (seed {p.seed})" if p.outcome == "failed" and p.seed is not None else ""),
        )
        for p in properties
    ]
    head = ("property", "passed", "unique", "given up", "time", "outcome")
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(5)]
    for row in (head, *rows):
        yield "  ".join(
            [f"{row[0]:<{widths[0]}}", *(f"{x:>{w}}" for x, w in zip(row[1:5], widths[1:], strict=True)), row[5]]
        )
