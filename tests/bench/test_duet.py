"""Real duets: of equal sides, and of sides of which one is slower by a known share; beside them, other methods.

Run with ``pytest tests/bench/test_duet.py --benchmark-enable``.  ``CONCORD_DUETS`` is the number of duets of each kind
(5), and ``CONCORD_DUET_MINUTES`` the time of each (10).  Nothing here fails for being slow or noisy.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from harness.bench.detection.rivals import OF_TWO_RUNS
from harness.bench.duet.deciding import SLOWER
from harness.bench.duet.journal import Journal
from harness.bench.duet.messages import Begin
from harness.bench.duet.records import SIDES, A, About, Begun
from harness.bench.duet.run import Duet, shared
from harness.bench.duet.sides import Setting, Side
from harness.bench.duet.state import State, replayed
from harness.bench.duet.view import change, view
from harness.versions.environments import variables
from tests.bench.slower import VARIABLE

ROOT = Path(__file__).parents[2]
PYTHON = Path(sys.executable)
DUETS = int(os.environ.get("CONCORD_DUETS", "5"))
MINUTES = float(os.environ.get("CONCORD_DUET_MINUTES", "10"))
SIZES = (8, 8 << 10, 1 << 20)
STEPPED = 8 << 10


def measured(folder: Path, factor: float, seed: int) -> State:
    """Measure a duet in which all_reduce of :data:`STEPPED` bytes takes so many times as long in B."""
    folder.mkdir(parents=True)
    sides = {}
    for name in SIDES:
        more = {VARIABLE: f"{STEPPED}={1.0 if name == A else factor:.3f}"}
        setting = Setting(name, PYTHON, ROOT, tuple({**variables(PYTHON, ROOT), **more}.items()))
        sides[name] = Side(setting, folder / f"{name}.txt", command=("-m", "tests.bench.slower"))
    try:
        for side in sides.values():
            side.send(Begin())
        offers = {name: side.described().offers for name, side in sides.items()}
        every = dict.fromkeys(shared(offers))
        series = [s for s in every if (s.operation, s.op, s.dtype, s.world) == ("all_reduce", "sum", "float32", 2)]
        about = About(label=sys.prefix, python=str(PYTHON), harness=str(ROOT))
        begun = Begun(
            time=time.time(),
            a=about,
            b=about,
            series=tuple(s for s in series if s.bytes in SIZES and not s.variant),
            rate=0.01,
            margin=0.05,
            seed=seed,
        )
        journal = Journal(folder / "duet.jsonl")
        journal.begin(begun)
        duet = Duet(sides, journal, replayed([begun]), offers)
        duet.run(60 * MINUTES)
    finally:
        for side in sides.values():
            side.close()
    return duet.state


def of_others(state: State, series: int) -> dict[str, bool]:
    """What other methods say of two separate runs: A's rounds of the first half, and B's of the second."""
    rounds = [one for number, one in state.rounds if number == series]
    middle = float(np.median([one.time for one in rounds]))
    before = np.array([one.figure for one in rounds if one.side == A and one.time <= middle])
    after = np.array([one.figure for one in rounds if one.side != A and one.time > middle])
    least = min(len(before), len(after))
    return {name: rival(before[:least], after[:least]) for name, rival in OF_TWO_RUNS.items()}


@pytest.mark.timeout(36_000)
@pytest.mark.parametrize("factor", [1.0, 1.05, 1.2], ids=lambda factor: f"{factor - 1:.0%}")
def test_duets(factor: float, asked_for: None, tmp_path: Path, benchmark: object, duets: Callable[..., None]) -> None:
    """How often a step of one series is found, and a series that has none raises an alarm."""
    benchmark.pedantic(lambda: None)  # type: ignore[attr-defined]
    kept = os.environ.get("CONCORD_KEEP_DUETS")
    folder = Path(kept) if kept else tmp_path
    for number in range(DUETS):
        state = measured(folder / f"{factor:.2f}-{number}", factor, number)
        for row in view(state)["series"]:
            series = next(i for i, one in enumerate(state.begun.series) if one.name == row["name"])
            step = factor if row["bytes"] == STEPPED else 1.0
            said = {"concord perf duet": row["verdict"] == SLOWER, **of_others(state, series)}
            text = f"{row['size']}: {row['verdict']} {change(row)}, {row['generations']} generations"
            duets(step, said, text, state.seconds)
        assert not state.failed
        assert state.pairs > 0
