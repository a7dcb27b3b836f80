"""Steps are told from noise of every kind, and noise of every kind from steps."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from harness.bench.detection.changes import (
    CONFIRM,
    Judgment,
    judge,
    learn,
    memory_of,
    nights_needed,
    nights_to_judge,
    within_nights,
)
from harness.bench.detection.follow import EVERY, follow
from harness.bench.detection.tails import RATE, tail_of
from tests.perf.nights import noisy

HISTORY, SERIES = 40, 24


def newest(logs: np.ndarray, **given: object) -> Judgment:
    _, residual = memory_of(logs)
    return judge(learn(residual, len(logs) - 1, **given))  # type: ignore[arg-type]


def slower(found: Judgment) -> set[int]:
    return {step.series for step in found.steps if step.size > 0}


NOISE = {
    "quiet": {"common": 0.0, "outliers": 0.0},
    "shared by all": {"common": 0.1, "outliers": 0.0},
    "outliers": {"outliers": 0.04},
    "two modes": {"bimodal": 3},
    "drift": {"drift": 0.002},
}


@pytest.mark.parametrize("kind", NOISE)
def test_noise_raises_little(kind: str) -> None:
    """Of 60 nights with no step in them, no more raise an alarm than the wanted rate allows by chance."""
    alarms = 0
    for seed in range(2):
        logs = noisy(np.random.default_rng(seed), HISTORY + 30, SERIES, **NOISE[kind])  # type: ignore[arg-type]
        _, residual = memory_of(logs)
        alarms += sum(bool(slower(judge(learn(residual, night)))) for night in range(HISTORY, len(logs)))
    assert alarms <= stats.binom.isf(1e-3, 60, RATE)


@pytest.mark.parametrize("kind", NOISE)
def test_a_step_is_found_whatever_the_noise(kind: str) -> None:
    """A step well above a series' noise is found within three nights, with its night and about its size."""
    logs = noisy(np.random.default_rng(7), HISTORY, SERIES, **NOISE[kind])  # type: ignore[arg-type]
    logs[-CONFIRM:, 20] += 0.15
    found = newest(logs)
    assert slower(found) == {20}
    (step,) = (one for one in found.steps if one.series == 20)
    assert step.since == HISTORY - CONFIRM
    assert step.low < 0.15 < step.high or abs(step.size - 0.15) < 0.03


def test_one_outlier_is_no_step() -> None:
    """A single night that is off as outliers of this history are is not told."""
    logs = noisy(np.random.default_rng(1), HISTORY, SERIES, outliers=0.05)
    logs[-1, 3] += 0.15
    assert slower(newest(logs)) == set()


def test_a_large_step_is_found_at_once() -> None:
    """Where nothing like it was ever seen, one night is enough."""
    logs = noisy(np.random.default_rng(1), HISTORY, SERIES, outliers=0.0)
    logs[-1, 3] += 1.5
    assert slower(newest(logs)) == {3}


def test_a_second_mode_is_noise() -> None:
    """A series that is in its slow mode for two nights, as it often was for one, is not told."""
    logs = noisy(np.random.default_rng(2), HISTORY, SERIES, outliers=0.0)
    logs[5::4, 3] += 0.2
    logs[-2:, 3] += 0.2
    assert slower(newest(logs)) == set()


def test_a_common_step_is_told_once() -> None:
    """A change of all series is a step of the common factor, and of no series."""
    logs = noisy(np.random.default_rng(3), HISTORY, SERIES, common=0.01, outliers=0.0)
    logs[-CONFIRM:] += 0.2
    assert slower(newest(logs)) == {EVERY}


def test_a_step_of_half_the_series_is_theirs() -> None:
    """What a third of the series do is not taken for what all do."""
    logs = noisy(np.random.default_rng(3), HISTORY, SERIES, outliers=0.0)
    logs[-CONFIRM:, :8] += 0.2
    found = newest(logs)
    assert slower(found) == set(range(8))
    assert len(found.steps) == 8


@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_series(count: int) -> None:
    """A single series has no others to be compared with; its steps are found all the same."""
    logs = noisy(np.random.default_rng(4), HISTORY, count, common=0.0, outliers=0.0)
    assert slower(newest(logs)) == set()
    logs[-CONFIRM:, 0] += 0.3
    assert 0 in slower(newest(logs)) or EVERY in slower(newest(logs))


def test_learning() -> None:
    """With fewer nights than are needed nothing is judged; how many that is follows from the chance of an alarm."""
    needed = nights_needed(RATE / (SERIES + 1) / CONFIRM)
    assert (
        stats.t.isf(1e-4, nights_needed(1e-4) - 1)
        <= 2 * stats.norm.isf(1e-4)
        < stats.t.isf(1e-4, nights_needed(1e-4) - 2)
    )
    logs = noisy(np.random.default_rng(4), nights_to_judge(needed) - 1, SERIES, outliers=0.0)
    logs[-CONFIRM:] += 1.0
    assert newest(logs).steps == ()
    more = noisy(np.random.default_rng(4), nights_to_judge(needed), SERIES, outliers=0.0)
    more[-CONFIRM:, 2] += 1.0
    assert 2 in slower(newest(more))


def test_missing_nights_are_no_steps() -> None:
    """Series that miss nights are judged by what is there; one that is new, or gone, raises nothing."""
    logs = noisy(np.random.default_rng(6), HISTORY, SERIES, outliers=0.0)
    logs[np.random.default_rng(6).random(logs.shape) < 0.2] = np.nan
    logs[:-2, 0] = np.nan
    logs[-2:, 1] = np.nan
    logs[:, 2] = np.nan
    found = newest(logs)
    assert slower(found) == set()
    logs[-CONFIRM:, 5] = np.nanmedian(logs[:, 5]) + 0.5
    assert 5 in slower(newest(logs))


def test_equal_values_are_no_trouble() -> None:
    """Series that never change at all, and one that does at last."""
    logs = np.full((HISTORY, 4), -5.0)
    assert newest(logs).steps == ()
    logs[-1, 1] += 0.1
    assert slower(newest(logs)) == {1}


def test_a_wider_spread_of_rounds_is_a_floor() -> None:
    """Noise of nights is not taken to be less than that of the rounds within them."""
    logs = noisy(np.random.default_rng(7), HISTORY, SERIES, outliers=0.0)
    logs[-CONFIRM:, 3] += 0.1
    assert slower(newest(logs, within=np.full(SERIES, 0.1))) == set()
    rounds = np.exp(0.1 * np.random.default_rng(0).standard_normal((30, 25)))
    assert within_nights(rounds.tolist()) == pytest.approx(0.1 * np.sqrt(np.pi / 2 / 25), rel=0.1)
    assert within_nights([[1.0]]) == 0.0


def test_the_tail_of_a_sum_is_that_of_its_terms() -> None:
    """Chances that come from the convolution are what simulation of normal deviates shows."""
    generator = np.random.default_rng(0)
    tail = tail_of(generator.standard_normal((400, 50)), 1e-4, CONFIRM)
    for total in (2.5, 4.0, 5.5):
        each = np.full((CONFIRM, 1), total / CONFIRM)
        expected = stats.norm.sf(total / np.sqrt(CONFIRM))
        assert expected < float(tail.chances(each)[-1, 0]) < 1.35 * expected
    ideal = (stats.norm.isf(1e-4) + stats.norm.isf(0.05)) / np.sqrt(CONFIRM)
    assert ideal < tail.detectable < 1.1 * ideal


def test_a_heavy_tail_is_believed() -> None:
    """The single night's threshold is far out where history has outliers, and near where it has none."""
    generator = np.random.default_rng(0)
    light = tail_of(generator.standard_normal((60, 50)), 1e-4, CONFIRM)
    heavy = tail_of(generator.standard_t(3, (60, 50)), 1e-4, CONFIRM)
    at = np.array([6.0])
    assert light.single(at)[0] < 1e-4 < heavy.single(at)[0]
    assert stats.t.sf(30, 3) / 3 < heavy.single(np.array([30.0]))[0] < 10 * stats.t.sf(30, 3)


def test_follow_needs_nights() -> None:
    """No nights are an error."""
    with pytest.raises(ValueError, match="no nights"):
        follow(np.zeros((0, 3)))


def test_a_step_stands_until_it_is_undone() -> None:
    """A step that was found long ago still stands, with all nights since in its size."""
    logs = noisy(np.random.default_rng(8), HISTORY, 12, outliers=0.0)
    logs[20:, 4] += 0.1
    followed = follow(logs)
    (step,) = (one for one in followed.standing if one.series == 4)
    assert (step.since, step.found <= 22) == (20, True)
    assert step.low < 0.1 < step.high
    assert step.high - step.low < 0.05


def test_an_accepted_common_step_is_the_new_level() -> None:
    """Nothing stands after a step of all series that was accepted."""
    logs = noisy(np.random.default_rng(8), HISTORY, 12, outliers=0.0)
    logs[25:] += 0.5
    assert [step.series for step in follow(logs).standing] == [EVERY]
    assert follow(logs, accepted=[(EVERY, 25)]).standing == ()
