"""The gate names what is wrong in one line, and says nothing where nothing is."""

from __future__ import annotations

from itertools import product

import msgspec
import numpy as np
import pytest

from harness.bench.detection.alarms import Alarm, Decision
from harness.bench.detection.gate import decide
from harness.bench.history.lines import Accepted, Line
from harness.bench.records import Fingerprint, Series
from tests.perf.nights import line, noisy, series

NIGHTS = 30
SIZES = [1024 << i for i in range(6)]
MEASURED = [
    Series(operation="all_reduce", op="sum", dtype=dtype, bytes=size, world=4, variant=(("place", place),))
    for dtype, place, size in product(("bfloat16", "float32"), ("in", "out"), SIZES)
]


def changed(size: float, *, since: int = NIGHTS - 3, where: object = lambda one: True, **noise: float) -> np.ndarray:
    """Nights in which some series are slower by a ratio from a night on."""
    logs = noisy(np.random.default_rng(5), NIGHTS, len(MEASURED), **{"outliers": 0.0, **noise})  # type: ignore[arg-type]
    those = [where(one) for one in MEASURED]  # type: ignore[operator]
    logs[since:, those] += np.log1p(size)
    return logs


def the_one(found: Decision) -> Alarm:
    (alarm,) = found.alarms
    assert found.code == 1
    return alarm


def test_nothing_is_wrong() -> None:
    """Noise that all share, drift, and a slow night raise nothing."""
    logs = changed(0.0, drift=0.002)
    logs[-1] += 0.08  # of all of them, with a common noise of 3 %
    found = decide(line(logs, MEASURED))
    assert (found.alarms, found.code) == ([], 0)


def test_a_band_of_sizes() -> None:
    """A step at three sizes of one dtype is one line that names both, how much, since when and how sure."""

    def where(one: Series) -> bool:
        return one.dtype == "float32" and 2048 <= one.bytes <= 8192

    alarm = the_one(decide(line(changed(0.25, where=where), MEASURED)))
    assert {(s.dtype, s.bytes) for s in alarm.series} == {("float32", 2048 << i) for i in range(3)}
    assert alarm.text.startswith("all_reduce sum float32 2 KiB to 8 KiB on 4 ranks +")
    assert "since 1970-01-29 00:00 (commit c27), confidence " in alarm.text
    assert (alarm.kind, alarm.since) == ("step", "n27")
    assert alarm.low < 1.25 < alarm.high
    assert alarm.confidence > 0.99


def test_one_dtype() -> None:
    """A step of a whole dtype leaves out what goes without saying."""
    alarm = the_one(decide(line(changed(0.2, where=lambda one: one.dtype == "bfloat16"), MEASURED)))
    assert alarm.text.startswith("all_reduce sum bfloat16 of every size on 4 ranks +")
    assert len(alarm.series) == 12


def test_steps_that_differ_by_size() -> None:
    """A delay that is the same for all sizes, so another ratio for each, is one band with its range."""
    logs = changed(0.0)
    for j, one in enumerate(MEASURED):
        if one.dtype == "float32" and one.bytes <= 4096:
            logs[-3:, j] += np.log1p(400 / one.bytes)
    alarm = the_one(decide(line(logs, MEASURED)))
    assert {s.bytes for s in alarm.series} == {1024, 2048, 4096}
    assert alarm.low < 1.12
    assert alarm.high > 1.36


def test_everything_at_once() -> None:
    """A step of all series is one line, though it is the common factor that moved."""
    alarm = the_one(decide(line(changed(0.4), MEASURED)))
    assert alarm.everything
    assert alarm.text.startswith("all 24 series together +")
    assert alarm.low < 1.4 < alarm.high


def test_everything_and_one_much_more() -> None:
    """A step of all does not hide that one of them became several times as slow: both are told."""
    logs = changed(0.25)
    logs[-3:, 3] += np.log(3)
    everything, one = decide(line(logs, MEASURED)).alarms
    assert everything.everything
    assert everything.low < 1.25 < everything.high
    assert one.series == [MEASURED[3]]
    assert one.low < 1.25 * 3 < one.high


def test_everything_not_by_the_same() -> None:
    """A change for all that some take twice as hard as others is one change."""
    logs = changed(0.0)
    logs[-3:] += np.linspace(0.15, 0.35, len(MEASURED))
    assert the_one(decide(line(logs, MEASURED))).everything


def test_an_improvement_is_reported_and_passes() -> None:
    """What got faster is said, and fails nothing."""
    found = decide(line(changed(-0.2, where=lambda one: one.bytes == 4096), MEASURED))
    (better,) = found.improvements
    assert (found.alarms, found.code) == ([], 0)
    assert {s.bytes for s in better.series} == {4096}
    assert better.ratio == pytest.approx(0.8, rel=0.02)


def accepted(kind: str, night: str, *some: Series) -> list[Accepted]:
    return [Accepted(kind=kind, series=one.key, night=night, reason="r", who="w", at=1.0) for one in some]


def test_an_accepted_step_is_the_new_level() -> None:
    """A step stays an alarm until it is accepted; then another one on top of it is."""
    one = MEASURED[3]
    logs = changed(0.3, since=15, where=lambda other: other == one)
    assert the_one(decide(line(logs, MEASURED))).since == "n15"
    assert decide(line(logs, MEASURED, accepted("step", "n15", one))).alarms == []
    logs[-3:, 3] += 0.2
    assert the_one(decide(line(logs, MEASURED, accepted("step", "n15", one)))).since == "n27"


def test_a_step_that_was_undone() -> None:
    """What got slower and was mended is no alarm any more, nor an improvement of that size."""
    logs = changed(0.3, since=18, where=lambda one: one.bytes == 1024)
    logs[25:, [one.bytes == 1024 for one in MEASURED]] -= np.log1p(0.3)
    found = decide(line(logs, MEASURED))
    assert found.alarms == []
    assert all(one.ratio > 0.95 for one in found.improvements)


def test_a_short_history_says_so() -> None:
    """With few nights nothing is told, not even a large step, and a note says how many are missing."""
    logs = changed(0.5)[-8:]
    found = decide(line(logs, MEASURED))
    assert found.alarms == []
    assert found.notes == ["learning: all of 24 series: 8 of 16 nights; no steps are told yet"]


def quiet(nights: int = 4) -> np.ndarray:
    return np.zeros((nights, 3)) - 5


def test_missing_series() -> None:
    """A series that is not measured any more is an alarm until that is accepted, and again if it comes and goes."""
    logs = quiet()
    logs[2:, :2] = np.nan
    alarm = the_one(decide(line(logs, series())))
    assert (alarm.kind, alarm.since) == ("missing", "n2")
    assert alarm.text.startswith("missing: all_reduce sum float32 1 KiB to 2 KiB on 4 ranks: not measured since")
    gone = accepted("missing", "n2", *series()[:2])
    assert decide(line(logs, series(), gone)).alarms == []
    again = np.vstack([logs, quiet(1), logs[-1:]])
    assert the_one(decide(line(again, series(), gone))).since == "n5"


def test_incomplete_night() -> None:
    """A run that did not end is an alarm, besides what it lacks."""
    given = line(quiet(), series())
    cut = msgspec.structs.replace(given.nights[-1], complete=False)
    given = msgspec.structs.replace(given, nights=[*given.nights[:-1], cut])
    assert the_one(decide(given)).text.startswith("the night is incomplete")


def test_refused_figures() -> None:
    """A figure that was refused is an alarm with its reason."""
    given = line(quiet(), series())
    for one in series()[:2]:
        figures = given.figures["n3"]
        figures[one] = msgspec.structs.replace(figures[one], refused="above the physical limit")
    alarm = the_one(decide(given))
    assert alarm.text == "refused: all_reduce sum float32 1 KiB to 2 KiB on 4 ranks: above the physical limit"


def test_changed_environment() -> None:
    """The first night elsewhere names what changed; the very first night of all is none."""
    first = line(quiet(1), series())
    assert decide(first).code == 0
    old = Fingerprint(machine=(("cores", "2"),), software=(("torch", "2.12"),))
    new = Fingerprint(machine=(("cores", "2"),), software=(("nccl", "2.27"), ("torch", "2.13")))
    moved = msgspec.structs.replace(first, before=first.nights[0], other=old, fingerprint=new)
    alarm = the_one(decide(moved))
    assert "nccl: none to 2.27; torch: 2.12 to 2.13:" in alarm.text
    assert "cores" not in alarm.text


def counted(*counts: float, accepted: list[Accepted] | None = None) -> Line:
    one = series(1, metric="collectives")[0]
    return line(np.log(np.array(counts)[:, None]), [one], accepted or [])


def test_counts_are_exact() -> None:
    """One collective more is an alarm from the second night of a history on, until it is accepted; so is one less."""
    assert decide(counted(4, 4)).alarms == []
    alarm = the_one(decide(counted(4, 4, 5, 5)))
    assert (alarm.kind, alarm.since, alarm.ratio) == ("count", "n2", pytest.approx(1.25))
    assert "(collectives): 4 to 5 since" in alarm.text
    assert decide(counted(4, 3)).code == 1
    known = accepted("count", "n2", series(1, metric="collectives")[0])
    assert decide(counted(4, 4, 5, 5, accepted=known)).alarms == []
    assert decide(counted(4, 4, 5, 5, 4, accepted=known)).code == 1


def test_no_nights() -> None:
    """Nothing to judge is an error."""
    with pytest.raises(ValueError, match="no nights"):
        decide(Line(nights=[], figures={}))
