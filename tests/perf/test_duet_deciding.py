"""Decisions of a duet: intervals that hold, shares that add up, and simulated machines that must not fool it."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from harness.bench.duet import deciding
from harness.bench.duet.deciding import (
    EQUAL,
    FASTER,
    FASTEST,
    FIGURES,
    LEAST,
    MEDIAN,
    PLANNED,
    SLOWER,
    UNDECIDED,
    Interval,
    critical,
    decided,
    interval,
    look,
    middle,
    needed,
    sets_in,
    share_of,
)


@pytest.mark.parametrize("count", [1, 4, 7, 10])
@pytest.mark.parametrize("mistake", [0.9, 0.3, 0.05, 0.01])
def test_critical_is_exact(count: int, mistake: float) -> None:
    """The rank is the largest whose probability, counted over all signs, is within the share."""
    sums = [sum(r for r, s in enumerate(signs, 1) if s) for signs in itertools.product((0, 1), repeat=count)]
    within = [k for k in range(count * (count + 1) // 2 + 1) if 2 * sum(s <= k for s in sums) <= mistake * len(sums)]
    assert critical(count, mistake) == max(within, default=-1)


@pytest.mark.parametrize("mistake", [1e-2, 1e-4, 1e-5])
def test_critical_of_many(mistake: float) -> None:
    """Where the distribution is approximated, the interval is not narrower than the exact one, and hardly wider."""
    count = deciding._EXACT + 1
    exact = int(np.searchsorted(deciding._cumulative(count), mistake / 2, side="right")) - 1
    assert 0.98 * exact <= critical(count, mistake) <= exact


def test_middle() -> None:
    """The estimate is the median of means of pairs, so one wild value moves it little."""
    assert middle([0.0, 1.0]) == 0.5
    assert middle([1.0, 2.0, 3.0, 1000.0]) < 4


def test_interval_of_known_values() -> None:
    """The interval is that of the signed ranks, and its ratio is an exponential."""
    values = [math.log(x) for x in (1.01, 1.02, 1.04, 1.08, 1.16, 1.32, 1.64)]
    found = interval(values, 2 * 2 / 2**7)  # the smallest and the largest sum, and their neighbors
    means = sorted((a + b) / 2 for a, b in itertools.combinations_with_replacement(values, 2))
    assert found.low == pytest.approx(math.exp(means[1]))
    assert found.high == pytest.approx(math.exp(means[-2]))
    assert found.low < found.ratio < found.high


def test_too_few_have_no_interval() -> None:
    """With few generations, nothing is excluded, so nothing is decided."""
    found = interval([0.5] * 6, 0.01)
    assert (found.low, found.high) == (0.0, math.inf)
    assert found.verdict(0.05) == UNDECIDED
    assert interval([], 0.01).verdict(0.05) == UNDECIDED


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (1.01, 1.2, SLOWER),
        (1.06, 1.2, SLOWER),
        (0.8, 0.99, FASTER),
        (0.97, 1.04, EQUAL),
        (1.01, 1.04, EQUAL),
        (0.96, 0.99, EQUAL),
        (0.97, 1.06, UNDECIDED),
        (0.94, 1.04, UNDECIDED),
    ],
)
def test_verdicts(low: float, high: float, verdict: str) -> None:
    """A series is slower if its interval is above 1, unless all of it is within the margin."""
    assert Interval(1.0, low, high, 20).verdict(0.05) == verdict


WIDE, SLOW, QUICK, SAME = (
    Interval(1.0, low, high, 20) for low, high in ((0.8, 1.3), (1.1, 1.2), (0.8, 0.9), (0.98, 1.02))
)


@pytest.mark.parametrize(
    ("fastest", "median", "verdict", "figure"),
    [
        (SAME, WIDE, EQUAL, FASTEST),
        (SAME, SLOW, SLOWER, MEDIAN),
        (SAME, QUICK, FASTER, MEDIAN),
        (QUICK, SLOW, SLOWER, MEDIAN),
        (SLOW, QUICK, SLOWER, FASTEST),
        (WIDE, SAME, UNDECIDED, FASTEST),
        (WIDE, SLOW, SLOWER, MEDIAN),
    ],
)
def test_both_figures_count(fastest: Interval, median: Interval, verdict: str, figure: str) -> None:
    """A series is slower if either of its figures is, and equal only if neither is known to differ."""
    assert decided({FASTEST: fastest, MEDIAN: median}, 0.05) == (verdict, figure)


def test_shares_add_up() -> None:
    """All planned looks and any number of looks at the end of the time have the rate together."""
    total = len(PLANNED) * share_of(0) + sum(share_of(n) for n in range(1, 60))
    assert total == pytest.approx(deciding.RATE)
    assert sum(FIGURES.values()) == pytest.approx(1.0)


def test_planned_looks() -> None:
    """They are the same in every duet, ascend, and the first can decide something."""
    assert PLANNED[0] == LEAST
    assert list(PLANNED) == sorted(set(PLANNED))
    assert PLANNED[-1] == deciding.MOST
    assert critical(LEAST, share_of(0) * FIGURES[FASTEST]) >= 0


def test_sets() -> None:
    """Generations grow, so that fewer servers are started later."""
    counts = [sets_in(generation) for generation in range(100)]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (2, 8)


def test_what_is_needed() -> None:
    """The forecast is about what a duet takes, and a planned look; nobody can say with few generations."""
    draw = np.random.default_rng(0)
    quiet, loud = (needed((scale * draw.standard_normal(30)).tolist(), 6, 0.05) for scale in (0.03, 0.1))
    assert quiet < loud
    assert quiet in PLANNED
    assert needed([0.1] * 4, 6, 0.05) == math.inf
    assert needed((draw.standard_normal(30)).tolist(), 6, 0.001) == math.inf


# simulated duets, without the loop that measures

SERIES = 6


def heavy(draw: np.random.Generator, count: int) -> np.ndarray:
    """Differences of generations of equal sides: heavy tails, noise that changes, an outlier now and then."""
    scale = np.exp(0.5 * np.sin(np.arange(count) / 7.0))[:, None]
    body = 0.05 * draw.standard_t(3, (count, SERIES)) * scale
    wild = (draw.random((count, SERIES)) < 0.03) * draw.standard_normal((count, SERIES))
    return np.asarray(body + wild)


def run(values: np.ndarray, most: int, *, margin: float = 0.05) -> dict[int, str]:
    """Verdicts of a duet of so many generations, with all looks that it has."""
    open_, found = set(range(values.shape[1])), {}
    looks = [(n, share_of(0)) for n in PLANNED if n <= most] + [(most, share_of(1))]
    for count, share in looks:
        seen = {i: dict.fromkeys(FIGURES, values[:count, i].tolist()) for i in open_}
        for i, one in look(seen, share, SERIES, margin, count).items():
            if one.verdict != UNDECIDED:
                found[i] = one.verdict
                open_.discard(i)
    return found


def false_alarms(trials: int, simulated: object, most: int = 60) -> int:
    return sum(
        any(v in (SLOWER, FASTER) for v in run(simulated(np.random.default_rng(seed), most), most).values())  # type: ignore[operator]
        for seed in range(trials)
    )


def test_equal_sides_raise_no_alarm() -> None:
    """Of 200 simulated duets of equal sides, no more have any alarm in any series at any look than 1 % explain."""
    alarms = false_alarms(200, heavy)
    assert stats.binom.sf(alarms - 1, 200, deciding.RATE) > 1e-3, alarms


def test_pairs_with_the_same_servers_would_raise_alarms() -> None:
    """If pairs that share servers counted as independent, the same test would find too many alarms."""

    def pairs_as_generations(draw: np.random.Generator, count: int) -> np.ndarray:
        servers = np.repeat(0.05 * draw.standard_normal((-(-count // 8), SERIES)), 8, axis=0)[:count]
        return np.asarray(servers + 0.02 * draw.standard_normal((count, SERIES)))

    alarms = false_alarms(60, pairs_as_generations)
    assert stats.binom.sf(alarms - 1, 60, deciding.RATE) < 1e-6, alarms


def test_looking_without_shares_would_raise_alarms(monkeypatch: pytest.MonkeyPatch) -> None:
    """If every look had the whole rate for every series, the same test would find too many alarms."""
    monkeypatch.setattr("tests.perf.test_duet_deciding.share_of", lambda look: deciding.RATE * SERIES)
    alarms = false_alarms(100, heavy)
    assert stats.binom.sf(alarms - 1, 100, deciding.RATE) < 1e-6, alarms


@pytest.mark.parametrize(("step", "generations", "found"), [(0.05, 60, 57), (0.20, 30, 57)])
def test_steps_are_found(step: float, generations: int, found: int) -> None:
    """A step of one series is found in 95 % of simulated duets, and names that series alone."""

    def stepped(draw: np.random.Generator) -> np.ndarray:
        values = 0.05 * draw.standard_normal((generations, SERIES))
        values[:, 2] += math.log1p(step)
        return np.asarray(values)

    verdicts = [run(stepped(np.random.default_rng(seed)), generations) for seed in range(60)]
    assert sum(one.get(2) == SLOWER for one in verdicts) >= found
    assert not any(one.get(i) in (SLOWER, FASTER) for one in verdicts for i in range(SERIES) if i != 2)


def test_equal_is_not_said_of_sides_beyond_the_margin() -> None:
    """A step just beyond the margin is never called equal."""
    for seed in range(60):
        values = 0.03 * np.random.default_rng(seed).standard_normal((60, SERIES)) + math.log(1.06)
        assert EQUAL not in run(values, 60).values()


def test_the_same_data_give_the_same_result() -> None:
    """Nothing is drawn in a decision."""
    values = heavy(np.random.default_rng(5), 60)
    assert run(values, 60) == run(values, 60)
