"""What duets with the accepted environment add to the gate's decision."""

from __future__ import annotations

from collections.abc import Collection

from harness.bench.detection.alarms import Alarm, since_night
from harness.bench.history.lines import Dueted, Line
from harness.bench.records import Series

KIND = "duet"
SLOWER, UNMEASURED = "slower", "unmeasured"
_ORDER = ("failed", "slower", "undecided", "faster", "equal")
_MOST = 6


def newest_of(line: Line) -> dict[Series, Dueted]:
    """Return the newest verdict on each series that was measured; one that was not measured changes nothing."""
    return {one.series: one for one in line.dueted if one.series is not None and one.verdict != UNMEASURED}


def standing(line: Line) -> dict[Series, Dueted]:
    """Return the series that the last duet with them found slower, unless that was accepted."""
    index = {night.id: i for i, night in enumerate(line.nights)}
    accepted: dict[str, int] = {}
    for one in line.accepted:
        if one.kind == KIND:
            accepted[one.series] = max(accepted.get(one.series, -1), index.get(one.night, -1))
    return {
        series: one
        for series, one in newest_of(line).items()
        if one.verdict == SLOWER and _since(line, series) > accepted.get(series.key, -1)
    }


def _since(line: Line, series: Series) -> int:
    """Return the first night of those at the end of which every duet found a series slower."""
    index = {night.id: i for i, night in enumerate(line.nights)}
    since = len(line.nights) - 1
    for one in reversed(line.dueted):
        if one.series != series or one.verdict == UNMEASURED or one.night not in index:
            continue
        if one.verdict != SLOWER:
            break
        since = index[one.night]
    return since


def alarms(line: Line, told: Collection[Series]) -> list[Alarm]:
    """Return an alarm for each series that a duet found slower.  ``told``: those that history reports anyway."""
    found = []
    for series, one in standing(line).items():
        if series not in told:
            since = _since(line, series)
            text = f"{series.name} {change(one)} in a duet with {one.against}, told{since_night(line, since)}"
            found.append(
                Alarm(
                    kind=KIND,
                    text=text,
                    series=[series],
                    since=line.nights[since].id,
                    ratio=one.ratio or 1.0,
                    low=one.low or 1.0,
                    high=one.high or 1.0,
                )
            )
    return found


def notes(line: Line) -> list[str]:
    """Say what the duet of the newest night said, one line for each verdict, or why there was none."""
    here = [one for one in line.dueted if one.night == line.nights[-1].id]
    found = [f"no duet: {one.why}" for one in here[-1:] if one.series is None]
    newest = {one.series: one for one in here if one.series is not None}
    for verdict in (*_ORDER, UNMEASURED):
        some = [one for one in newest.values() if one.verdict == verdict]
        if some:
            names = ", ".join(filter(None, (_named(one) for one in some[:_MOST])))
            more = f" and {len(some) - _MOST} more" if len(some) > _MOST else ""
            found.append(f"duet with {some[0].against}: {verdict}{_within(some[0])}: {names}{more}")
    return found


def _within(one: Dueted) -> str:
    return f" within {100 * one.margin:g} %" if one.verdict == "equal" else ""


def _named(one: Dueted) -> str:
    assert one.series is not None
    why = f" ({one.why})" if one.why else ""
    return " ".join(filter(None, (one.series.name, change(one)))) + why


def change(one: Dueted) -> str:
    """Describe a change: ``+12.1 % (+8.4 to +16.0 %)``; empty if nothing is known."""
    if one.ratio is None:
        return ""
    size = f"{100 * (one.ratio - 1):+.1f} %" + (" in the median" if one.median else "")
    if one.low is None or one.high is None:
        return f"{size} (?)"
    return f"{size} ({100 * (one.low - 1):+.1f} to {100 * (one.high - 1):+.1f} %)"
