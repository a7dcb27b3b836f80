"""Alarms and decisions of the gate, and the alarms that need no statistics."""

from __future__ import annotations

import msgspec

from harness.bench.detection.bands import bands, describe
from harness.bench.detection.suspicions import Suspicion
from harness.bench.history.lines import Line
from harness.bench.records import COUNTS, Series, day_of


class Alarm(msgspec.Struct, frozen=True, kw_only=True):
    """A line of text for a person, and the change that it reports."""

    kind: str
    """``step``, ``duet``, ``count``, ``missing``, ``refused``, ``incomplete``, ``environment``."""
    text: str
    series: list[Series] = []
    everything: bool = False
    """Whether it is about all series together."""
    since: str = ""
    """Id of the first night with the change."""
    ratio: float = 1.0
    """New level over old, median of the series."""
    low: float = 1.0
    high: float = 1.0
    confidence: float = 1.0
    """One minus the probability that noise alone raises this or any other alarm in such a night."""


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The gate's decision on one night."""

    night: str
    alarms: list[Alarm] = []
    improvements: list[Alarm] = []
    notes: list[str] = []
    suspicions: list[Suspicion] = []
    """What may be slower and is no alarm; the most suspicious first."""

    @property
    def code(self) -> int:
        """The exit code: 1 if there is an alarm, 0 otherwise."""
        return 1 if self.alarms else 0


def since_night(line: Line, index: int) -> str:
    """Return the end of a sentence that says since when: the night's start and its commit."""
    night = line.nights[index]
    before = line.nights[index - 1].commit if index else ""
    commit = ""
    if night.commit:
        same = ", the same as the night before" if night.commit == before else ""
        commit = f" (commit {night.commit[:12]}{same})"
    return f" since {day_of(night.started)}{commit}"


def environment(line: Line) -> list[Alarm]:
    """Return an alarm if this is the first night of its fingerprint and there is one of another fingerprint."""
    if len(line.nights) > 1 or line.before is None:
        return []
    changed = []
    for part in ("machine", "software"):
        old, new = dict(getattr(line.other, part)), dict(getattr(line.fingerprint, part))
        changed += [
            f"{k}: {old.get(k, 'none')} to {new.get(k, 'none')}" for k in sorted(old | new) if old.get(k) != new.get(k)
        ]
    text = f"the environment changed: {'; '.join(changed)}: nothing to compare with, history starts anew"
    return [Alarm(kind="environment", text=text, since=line.nights[-1].id)]


def incomplete(line: Line) -> list[Alarm]:
    """Return an alarm if the newest night is incomplete, unless that was accepted."""
    newest = line.nights[-1]
    if newest.complete or _is_accepted(line, "incomplete", newest.id):
        return []
    text = f"the night is incomplete: the run did not end, {newest.measured} series were measured"
    return [Alarm(kind="incomplete", text=text, since=newest.id)]


def _is_accepted(line: Line, kind: str, night: str) -> bool:
    return any(one.kind == kind and one.night == night for one in line.accepted)


def missing(line: Line) -> list[Alarm]:
    """Return alarms for series that an earlier night measured and the newest did not, unless that was accepted."""
    newest = line.figures[line.nights[-1].id]
    order = {night.id: i for i, night in enumerate(line.nights)}
    gone = {one.series: order.get(one.night, -1) for one in line.accepted if one.kind == "missing"}
    last: dict[Series, int] = {}
    for i, night in enumerate(line.nights[:-1]):
        last.update(dict.fromkeys(line.figures[night.id], i))
    gone_now = [s for s, i in last.items() if s not in newest and not (s.key in gone and i < gone[s.key])]
    out = []
    for band in bands(gone_now, list(last)):
        since = max(last[one] for one in band) + 1
        text = f"missing: {describe(band, list(last))}: not measured{since_night(line, since)}"
        out.append(Alarm(kind="missing", text=text, series=band, since=line.nights[since].id))
    return out


def refused(line: Line) -> list[Alarm]:
    """Return alarms for the figures of the newest night that the benchmarks rejected."""
    newest = line.figures[line.nights[-1].id]
    reasons: dict[str, list[Series]] = {}
    for one, figure in newest.items():
        if figure.refused:
            reasons.setdefault(figure.refused, []).append(one)
    return [
        Alarm(
            kind="refused",
            text=f"refused: {describe(band, list(newest))}: {reason}",
            series=band,
            since=line.nights[-1].id,
        )
        for reason, some in reasons.items()
        for band in bands(some, list(newest))
    ]


def counts(line: Line) -> list[Alarm]:
    """Return alarms for counts that differ from the first night's, or from those of the night last accepted."""
    newest, changes = line.figures[line.nights[-1].id], []
    order = {night.id: i for i, night in enumerate(line.nights)}
    for one, figure in newest.items():
        if one.metric not in COUNTS or figure.value is None:
            continue
        start = max([order.get(a.night, 0) for a in line.accepted if a.kind == "count" and a.series == one.key] or [0])
        past = [(i, line.figures[n.id].get(one)) for i, n in enumerate(line.nights) if i >= start]
        known = [(i, f.value) for i, f in past if f and f.value is not None]
        if known[0][1] != figure.value:
            since = next(i for i, _ in known if all(v == figure.value for k, v in known if k >= i))
            changes.append((one, known[0][1], figure.value, since))
    out = []
    for change in dict.fromkeys((old, new, since) for _, old, new, since in changes):
        some = [one for one, *rest in changes if tuple(rest) == change]
        for band in bands(some, list(newest)):
            old, new, since = change
            text = f"{describe(band, list(newest))}: {old:g} to {new:g}{since_night(line, since)}, a count"
            ratio = new / old if old else float("inf")
            out.append(Alarm(kind="count", text=text, series=band, since=line.nights[since].id, ratio=ratio))
    return out
