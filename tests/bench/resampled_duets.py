"""What duets as noisy as a measured A/A duet would find: ``python tests/bench/resampled_duets.py JOURNAL``.

Each of ``--trials`` duets has as many generations as the journal, or as fit into ``--minutes`` at the journal's pace.
They are drawn from it with replacement, all series of a generation together, the first ones among the first ones, which
have fewer pairs.  Sides are swapped at random in each, so both are
equal, and then one series gets a step.  Every planned look and the last one are taken.  Other methods get two separate
runs of the same data: A's rounds of the first half of the generations, and B's of the second.  Because generations are
drawn, the halves have no drift between them, which real separate runs have.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import stats

sys.path.insert(0, str(Path(__file__).parents[2]))

from harness.bench.detection.rivals import OF_TWO_RUNS
from harness.bench.duet.deciding import FASTER, FASTEST, PLANNED, SLOWER, UNDECIDED, look, share_of
from harness.bench.duet.journal import read
from harness.bench.duet.records import Begun, Generation, Pair, Session
from harness.bench.duet.state import PLACES, replayed

DUET = "concord perf duet"
STEPS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5)
_EARLY = 16
"""Generations that have few pairs, which are drawn among themselves."""


@dataclass
class Kept:
    """A generation of a journal: for each series, the differences of its figures and the rounds of both sides."""

    differences: list[dict[str, float]]
    rounds: list[dict[str, list[float]]]


def generations_of(path: Path) -> tuple[int, list[Kept]]:
    """Read the generations of an A/A duet in which every series was measured to the end.  Returns seconds, too."""
    records = read(path)
    begun = records[0]
    assert isinstance(begun, Begun)
    found, pairs, seconds = [], [], 0.0
    for record in records:
        if isinstance(record, Session):
            pairs = []
        elif isinstance(record, Pair):
            pairs.append(record)
        elif isinstance(record, Generation):
            seconds += record.seconds
            state = replayed([begun, *pairs, record])
            whole = all(one[FASTEST] for one in state.differences)
            rounds: list[dict[str, list[float]]] = [defaultdict(list) for _ in begun.series]
            for number, one in state.rounds:
                rounds[number][one.side].append(one.figure)
            if whole:
                found.append(Kept([{f: one[f][0] for f in PLACES} for one in state.differences], rounds))
            pairs = []
    return round(seconds), found


def trial(
    kept: list[Kept], generations: int, stepped: int, step: float, margin: float, draw: np.random.Generator
) -> dict[str, set[int]]:
    """Return for each method the series that it calls slower, for the duet with two signs: or faster."""
    series = len(kept[0].differences)
    early, late = range(min(_EARLY, len(kept))), range(min(_EARLY, len(kept)), len(kept))
    order = [int(draw.choice(early if i in early else late)) for i in range(generations)]
    signs = draw.choice([-1, 1], generations)
    shift = [math.log1p(step) if i == stepped else 0.0 for i in range(series)]
    values = {
        i: {
            figure: [sign * kept[g].differences[i][figure] + shift[i] for g, sign in zip(order, signs, strict=True)]
            for figure in PLACES
        }
        for i in range(series)
    }
    found: dict[str, set[int]] = {name: set() for name in (DUET, *OF_TWO_RUNS)}
    undecided = set(range(series))
    looks = [(n, share_of(0)) for n in PLANNED if n <= generations] + [(generations, share_of(1))]
    for count, share in looks:
        part = {i: {figure: all_[:count] for figure, all_ in values[i].items()} for i in undecided}
        for i, one in look(part, share, series, margin, count).items():
            if one.verdict in (SLOWER, FASTER):
                found[DUET].add(i)
            if one.verdict != UNDECIDED:
                undecided.discard(i)
    half = len(order) // 2
    for i in range(series):
        swapped = {-1: "BA", 1: "AB"}
        before = [r for g, s in zip(order[:half], signs, strict=False) for r in kept[g].rounds[i][swapped[int(s)][0]]]
        after = [
            r * math.exp(shift[i])
            for g, s in zip(order[half:], signs[half:], strict=True)
            for r in kept[g].rounds[i][swapped[int(s)][1]]
        ]
        least = min(len(before), len(after))
        for name, rival in OF_TWO_RUNS.items():
            if rival(np.array(before[:least]), np.array(after[:least])):
                found[name].add(i)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("journal", type=Path)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--margin", type=float, default=5.0, help="percent")
    asked = parser.parse_args()
    seconds, kept = generations_of(asked.journal)
    series = len(kept[0].differences)
    count = round(60 * asked.minutes / seconds * len(kept)) if asked.minutes else len(kept)
    print(f"{len(kept)} generations, {series} series, {seconds / 60:.1f} min; trials of {count} generations")
    for step in STEPS:
        draw = np.random.default_rng(asked.seed)
        right: Counter[str] = Counter()
        wrong: Counter[str] = Counter()
        for number in range(asked.trials):
            stepped = number % series
            for name, found in trial(kept, count, stepped, step, asked.margin / 100, draw).items():
                right[name] += stepped in found and step > 0
                wrong[name] += bool(found - ({stepped} if step else set()))
        for name in (DUET, *OF_TWO_RUNS):
            low, high = stats.binomtest(wrong[name], asked.trials).proportion_ci()
            share = f"found {right[name] / asked.trials:4.0%}  " if step else " " * 13
            false = f"runs with another series called {wrong[name] / asked.trials:.1%} ({low:.1%} to {high:.1%})"
            print(f"step {step:4.0%}  {name:<26}  {share}{false}")


if __name__ == "__main__":
    main()
