"""Nights that are made are like those that were, and rates that are measured are right."""

from __future__ import annotations

import numpy as np
import pytest

from harness.bench.detection.calibrate import GATE, Share, bands_of, calibrate, quiet, relative_rounds, resample
from harness.bench.detection.follow import follow
from harness.bench.detection.rivals import E_DIVISIVE, RIVALS, Rival
from harness.bench.records import Series
from tests.perf.nights import line, noisy, series


def spread(generator: np.random.Generator, nights: int, count: int, of: float = 0.004) -> np.ndarray:
    return of * generator.standard_normal((nights, count, 5))


def test_made_nights_vary_as_real_ones() -> None:
    """Levels, variances and correlations between series stay; two draws of one night differ by their rounds."""
    generator = np.random.default_rng(0)
    real = noisy(generator, 60, 12, outliers=0.0)
    made, seconds = resample(real, spread(generator, 60, 12), 2000, generator)
    assert np.median(made, 0) == pytest.approx(np.median(real, 0), abs=0.02)
    assert made.std(0) == pytest.approx(real.std(0), rel=0.15)
    assert np.corrcoef(made.T) == pytest.approx(np.corrcoef(real.T), abs=0.15)
    assert len(np.unique(made[:, 0])) > 3 * 60
    assert np.median(np.log(seconds), 2) == pytest.approx(made, abs=1e-9)


def test_nights_in_a_row_stay_in_a_row() -> None:
    """What a night leaves to the next is in made nights as well."""
    generator = np.random.default_rng(1)
    real = np.zeros((90, 3))
    for i in range(1, 90):
        real[i] = 0.9 * real[i - 1] + 0.01 * generator.standard_normal(3)
    made, _ = resample(real, spread(generator, 90, 3, 1e-4), 900, generator)
    assert np.corrcoef(made[1:, 0], made[:-1, 0])[0, 1] > 0.5


def test_steps_are_taken_out_before_nights_are_made() -> None:
    """A step in the real nights is no noise of made ones."""
    logs = noisy(np.random.default_rng(2), 40, 12, common=0.01, outliers=0.0)
    logs[20:, 3] += 0.5
    logs[30:] += 0.4
    left = quiet(logs, follow(logs))
    assert abs(np.median(left[:20, 3]) - np.median(left[20:30, 3])) < 0.05
    assert np.abs(np.median(left[20:30], 0) - np.median(left[30:], 0)).max() < 0.05


def test_calibration_of_quiet_nights() -> None:
    """On quiet nights the gate raises little and finds 10 %; the same seed gives the same figures."""
    generator = np.random.default_rng(3)
    logs = noisy(generator, 40, 12, common=0.01, own=0.005, outliers=0.0)
    given = {"nights": 25, "trials": 6, "rivals": ["t-test, p < 0.05"]}
    rounds = spread(generator, 40, 12, 0.001)
    found = calibrate(logs, rounds, [[0, 1, 2]], **given)  # type: ignore[arg-type]
    assert found.alarms[GATE].hits <= 2
    assert found.alarms["t-test, p < 0.05"].value > 0.5
    assert all(step <= 0.1 for step in found.smallest.values())
    assert found.expected < 0.05
    assert found == calibrate(logs, rounds, [[0, 1, 2]], **given)  # type: ignore[arg-type]


def test_a_rate_that_is_asked_for_is_about_what_is_got() -> None:
    """A gate that may be wrong in every second night is wrong more often than one that may not."""
    generator = np.random.default_rng(4)
    logs = noisy(generator, 40, 12, common=0.01, outliers=0.0)
    rounds = spread(generator, 40, 12, 0.001)
    loose, strict = (
        calibrate(logs, rounds, [[0]], nights=50, trials=5, rivals=[], rate=rate).alarms[GATE] for rate in (0.5, 0.01)
    )
    assert strict.hits <= 3 < loose.hits


def test_shares() -> None:
    """Intervals are Clopper and Pearson's: the rule of three at none, one at all."""
    assert Share(0, 300).interval == (0.0, pytest.approx(0.0122, abs=1e-4))
    assert Share(5, 5).interval == (pytest.approx(0.478, abs=1e-3), 1.0)


def test_bands() -> None:
    """Bands are three neighbouring sizes of what differs in nothing else."""
    some = [*series(4), Series(operation="step")]
    assert bands_of(some) == [[0, 1, 2], [1, 2, 3], [4]]


def test_rounds_are_relative_to_their_night() -> None:
    """Rounds come in logarithms about the night's median."""
    found = relative_rounds(line(np.zeros((2, 3)), series()), series())
    assert found.shape == (2, 3, 3)
    assert found[0, 0] == pytest.approx([-0.001, 0.0, 0.001], abs=1e-5)


@pytest.mark.parametrize("name", RIVALS)
def test_each_rival_sees_a_large_step_and_not_every_noise(name: str) -> None:
    """All of them raise an alarm at twice the time, of that series; on equal nights none does of most."""
    generator = np.random.default_rng(5)
    rival: Rival = RIVALS[name]
    logs = 0.005 * generator.standard_normal((40, 8))
    calm = rival(logs, np.exp(logs[:, :, None] + spread(generator, 40, 8, 0.01)), 8)
    assert calm.sum() <= 4
    logs[-1 if name != E_DIVISIVE else -3 :, 2] += np.log(2)
    found = rival(logs, np.exp(logs[:, :, None] + spread(generator, 40, 8, 0.01)), 8)
    assert found[2]
    assert not rival(-logs, np.exp(-logs[:, :, None] + spread(generator, 40, 8, 0.01)), 8)[2]


def test_e_divisive_finds_the_split() -> None:
    """The energy statistic is largest where the level changes."""
    from harness.bench.detection.rivals import _best_split

    one = np.concatenate([np.zeros(12), np.ones(8)]) + 0.01 * np.random.default_rng(6).standard_normal(20)
    (at,), _ = _best_split(np.abs(one[:, None] - one[None, :])[None])
    assert at == 12
