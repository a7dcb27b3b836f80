"""Other methods on two separate runs: each finds a large step, and none finds a large gain."""

from __future__ import annotations

import numpy as np
import pytest

from harness.bench.detection.rivals import OF_TWO_RUNS


def samples(seed: int, level: float = 1.0, noise: float = 0.05) -> np.ndarray:
    return level * np.exp(noise * np.random.default_rng(seed).standard_normal(40))


@pytest.mark.parametrize("name", OF_TWO_RUNS)
def test_large_steps(name: str) -> None:
    """A run that takes half as long again is slower, and the one before it is not."""
    before, after = samples(1), samples(2, 1.5)
    assert OF_TWO_RUNS[name](before, after)
    assert not OF_TWO_RUNS[name](after, before)


def test_each_has_its_own_threshold() -> None:
    """3 % with little noise: significant by the t-tests, too small for those that want 5 %."""
    found = {name: rival(samples(1, noise=0.01), samples(2, 1.03, noise=0.01)) for name, rival in OF_TWO_RUNS.items()}
    assert [name for name, slower in found.items() if slower] == ["t-test, p < 0.05", "pyperf"]


def test_asv_wants_significance() -> None:
    """A ratio above 5 % in noise is nothing for asv, and an alarm for a comparison of means."""
    before, after = np.array([1.0, 9.0] * 5), np.array([1.2, 9.9] * 5)
    assert not OF_TWO_RUNS["asv, factor 1.05"](before, after)
    assert OF_TWO_RUNS["pytest-benchmark mean:5%"](before, after)
