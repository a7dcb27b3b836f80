"""How often the gate suspects a step in its first night, by size: ``python -m tests.bench.suspected_steps``.

Nights are made up: 30 nights of 70 series, each with noise of 10 %, and 3 % that all share.  A step is added to one
series in the newest night.
"""

from __future__ import annotations

import sys

import numpy as np

from harness.bench.detection.gate import followed_of
from harness.bench.detection.suspicions import suspected
from harness.bench.detection.tails import RATE
from tests.perf.nights import line, noisy, series

NIGHTS, COUNT = 30, 70
STEPS = (0.0, 0.05, 0.10, 0.20, 0.30, 0.50)
MOST = (6, 12, COUNT)


def main(seeds: int = 40, own: float = 0.10) -> None:
    """Print a table."""
    names = [one for world in range(2, 9) for one in series(10, world=world)]
    hits = {(step, most): 0 for step in STEPS for most in MOST}
    trials, counts = 0, []
    for seed in range(seeds):
        nights = noisy(np.random.default_rng(seed), NIGHTS, COUNT, own=own, outliers=0.01)
        newest = followed_of(line(nights, names), RATE, lambda done, of: None).newest
        counts.append(len(suspected(names, newest.noise, ())))
        for j in range(0, COUNT, 7):
            trials += 1
            for step in STEPS:
                added = np.zeros_like(newest.noise.residual)
                added[-1, j] = np.log1p(step)
                places = [one.series for one in suspected(names, newest.noise, (), added)]
                place = places.index(names[j]) if names[j] in places else COUNT
                for most in MOST:
                    hits[step, most] += place < most
    print(f"{trials} steps of each size; suspected without a step: {np.mean(counts):.1f} of {COUNT} series")
    for most in MOST:
        shares = ", ".join(f"{step:.0%}: {hits[step, most] / trials:.0%}" for step in STEPS)
        print(f"among the first {most}: {shares}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]), *map(float, sys.argv[2:3]))
