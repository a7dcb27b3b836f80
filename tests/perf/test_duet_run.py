"""The loop of a duet: fresh servers and ranks, random turns, what is kept, and how a failing side ends it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console

from harness.bench.duet import deciding, messages
from harness.bench.duet.deciding import EQUAL, FASTER, SLOWER
from harness.bench.duet.journal import read
from harness.bench.duet.messages import Finish, Prepare, Ranks, Servers
from harness.bench.duet.records import Generation, Pair
from harness.bench.duet.run import TURNS, ranks_of, shared, without_place
from harness.bench.duet.shown import markdown, tables
from harness.bench.duet.sides import SideFailed
from harness.bench.duet.state import FAILED, replayed
from harness.bench.duet.view import view
from harness.bench.measuring.asked import OVERLAP
from harness.bench.measuring.collectives import Timed
from harness.bench.measuring.steps import STACKS, eager, usual_steps
from harness.bench.measuring.sweeps import every
from harness.bench.records import Series
from harness.worlds.world import World, WorldSpec
from tests.perf.duets import OFFERS, SIZES, STEPS, Machine, duet


def verdicts(of: object) -> list[str]:
    state = of.state  # type: ignore[attr-defined]
    return [state.verdict(i) for i in range(len(state.begun.series))]


def test_a_slower_side_is_found_on_a_noisy_machine(tmp_path: Path) -> None:
    """A step of one series and a gain of another are found among bursts, drift, and sets of ranks that differ."""
    found = duet(tmp_path, Machine(1), {SIZES[1]: 1.25, SIZES[3]: 0.8}, series=OFFERS[:4])
    found.run(3600)
    assert verdicts(found)[1] == SLOWER
    assert verdicts(found)[3] == FASTER
    assert not {SLOWER, FASTER} & {verdicts(found)[0], verdicts(found)[2]}
    seen = found.state.decided[1].interval
    assert seen.low < 1.25 < seen.high


@pytest.mark.parametrize("seed", range(6))
def test_equal_sides(tmp_path: Path, seed: int) -> None:
    """Nothing is slower or faster on the same machine without a step, and all ends as equal in time."""
    found = duet(tmp_path, Machine(seed, ranks=0.03), series=OFFERS[:2], margin=0.1)
    found.run(3600)
    assert verdicts(found) == [EQUAL, EQUAL]


def test_servers_and_ranks_are_fresh_on_both_sides(tmp_path: Path) -> None:
    """Each generation starts both servers, each pair both sets of ranks, and every series has all its turns."""
    found = duet(tmp_path, Machine(), series=OFFERS[:2])
    found.run(30)
    generations, pairs = found.state.generations, found.state.pairs
    assert generations >= 3
    for side in found.sides.values():
        kinds = Counter(type(request) for request in side.asked)  # type: ignore[attr-defined]
        assert kinds[Servers] == generations
        assert kinds[Ranks] == pairs + generations  # the first set of a generation waits for the server, unmeasured
        assert kinds[Prepare] == kinds[Finish] == 2 * pairs
        assert kinds[messages.Round] == 2 * pairs * TURNS
        assert isinstance(side.asked[-1], messages.End)  # type: ignore[attr-defined]


def test_servers_take_at_most_half_of_the_time(tmp_path: Path) -> None:
    """Where servers start slowly, a generation has more pairs, up to a limit."""
    quick, slow = (duet(tmp_path, Machine(), series=OFFERS[:1]) for _ in range(2))
    for side in slow.sides.values():
        side.server_seconds = 60.0  # type: ignore[attr-defined]
    quick.sides["A"].server_seconds = quick.sides["B"].server_seconds = 0.1  # type: ignore[attr-defined]
    quick.run(1)
    slow.run(1)
    assert quick.state.pairs / quick.state.generations == 2
    assert slow.state.pairs == deciding.MOST_SETS


def test_turns_are_drawn(tmp_path: Path) -> None:
    """Each side goes first in about half of the turns, and both measure as many iterations."""
    found = duet(tmp_path, Machine(), series=OFFERS[:1])
    found.run(200)
    rounds = [one for _, one in found.state.rounds]
    first = Counter(rounds[i].side for i in range(0, len(rounds), 2))
    assert 0.3 < first["A"] / first.total() < 0.7
    assert all(rounds[i].side != rounds[i + 1].side for i in range(0, len(rounds), 2))
    started = [side.name for side in found.sides.values() for request in side.asked if isinstance(request, Ranks)]
    assert started.count("A") == started.count("B")
    assert 0.3 < found.sides["A"].firsts / started.count("A") < 0.7  # type: ignore[attr-defined]
    counts = {request.count for side in found.sides.values() for request in side.asked if hasattr(request, "count")}  # type: ignore[attr-defined]
    assert counts == {100}


def test_decided_series_are_not_measured_any_more(tmp_path: Path) -> None:
    """A large step is decided at the first look, and the time goes to the others."""
    found = duet(tmp_path, Machine(), {SIZES[0]: 3.0}, series=OFFERS[:2])
    found.run(600)
    assert found.state.verdict(0) == SLOWER
    at = found.state.decided[0].at
    assert at <= deciding.PLANNED[3]
    assert len(found.state.differences[0]["fastest"]) == at
    assert len(found.state.differences[1]["fastest"]) == found.state.generations > at


def test_the_time_is_kept(tmp_path: Path) -> None:
    """A duet ends with the generation in which its time is used up, and looks once more."""
    found = duet(tmp_path, Machine(ranks=0.5), series=OFFERS)
    found.run(100)
    assert 100 <= found.state.seconds < 115
    assert found.state.ends == 1
    assert found.state.latest


def test_continued_as_if_it_had_never_ended(tmp_path: Path) -> None:
    """The state from a journal is that of the duet, and an interrupted generation does not count."""
    found = duet(tmp_path, Machine(), {SIZES[0]: 1.5}, series=OFFERS[:3])

    def interrupted(state: object) -> None:
        if found.state.generations == 5 and isinstance(read(found.journal.path)[-1], Pair):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        found.run(600, interrupted)
    records = read(found.journal.path)
    assert isinstance(records[-1], Pair)
    state = replayed(records)
    assert state.differences == found.state.differences
    assert state.generations == 5
    assert sum(isinstance(record, Generation) for record in records) == 5


def test_a_series_that_fails_on_a_side_is_named_and_left_out(tmp_path: Path) -> None:
    """Wrong values of one series end that series; the others are measured on fresh ranks."""
    found = duet(tmp_path, Machine(ranks=0.02), series=OFFERS[:2], margin=0.2)
    side = found.sides["B"]
    prepare = side.prepare

    def wrong(number: int) -> object:
        if number == 1:
            raise SideFailed("B", "values", "rank 0: output[3] is 1, not 2")
        return prepare(number)

    side.prepare = wrong  # type: ignore[method-assign, assignment]
    found.run(600)
    assert verdicts(found) == [EQUAL, FAILED]
    assert found.state.failed[1].side == "B"
    assert replayed(read(found.journal.path)).failed == found.state.failed


def test_an_impossible_figure_is_refused(tmp_path: Path) -> None:
    """A series that is faster than a copy of its data fails."""
    found = duet(tmp_path, Machine(), series=OFFERS[:1])
    side = found.sides["A"]
    side.prepare = lambda number: messages.Prepared(first=1.0, typical=1e-4, copy=1.0)  # type: ignore[method-assign]
    found.run(60)
    assert found.state.failed[0].kind == "impossible"
    assert "less than a copy" in found.state.failed[0].why


def test_a_side_that_dies_ends_the_duet(tmp_path: Path) -> None:
    """It is named, and what was measured is kept."""
    found = duet(tmp_path, Machine(), series=OFFERS[:1])
    found.run(10)
    kept = found.state.generations
    found.sides["B"].fails[Ranks] = SideFailed("B", "gone", "its process was killed by SIGKILL")  # type: ignore[attr-defined]
    with pytest.raises(SideFailed, match="B: its process was killed by SIGKILL"):
        found.run(600)
    assert replayed(read(found.journal.path)).generations == kept


def test_every_series_of_the_suites_is_offered_once() -> None:
    """All benchmarks of collectives are offered, under different names, with the ranks that each needs."""
    offered = [(timed.series(World(WorldSpec(ranks), lambda: None)), ranks) for timed, ranks in every(16 << 20)]  # type: ignore[arg-type, return-value]
    names = [series.name for series, _ in offered]
    assert len(names) == len(set(names)) > 120
    assert all(ranks_of(series) == ranks for series, ranks in offered)
    assert Timed("all_reduce", 1 << 10, group=(1, 3)) in [timed for timed, _ in every(16)]


def test_training_steps_are_offered_once() -> None:
    """Steps without a compiler are offered, under different names, and those that hide more if they are asked for."""
    offered, more = (
        [step.series(World(WorldSpec(ranks), lambda: None)) for step, ranks in eager(more=asked)]  # type: ignore[arg-type, return-value]
        for asked in ((), (OVERLAP,))
    )
    assert len({one.name for one in offered}) == len(offered) == 2 * 3 + 4 + 2
    assert all(one.is_step and ranks_of(one) == one.world for one in offered)
    assert [one.operation for one in usual_steps(more)] == [f"step.{stack}" for stack in STACKS]
    assert set(offered) < set(more)
    assert {ranks for _, ranks in eager((1, 2, 8))} == {2, 8}


def test_servers_import_what_steps_need_while_one_is_open(tmp_path: Path) -> None:
    """Servers are started often, so those of a duet whose steps are decided import no stacks."""
    found = duet(tmp_path, Machine(), {0: 3.0}, (OFFERS[0], STEPS[0]), series=(OFFERS[0], STEPS[0]))
    found.run(600)
    assert found.state.verdict(1) == "slower"
    asked = [one.steps for one in found.sides["A"].asked if isinstance(one, Servers)]  # type: ignore[attr-defined]
    assert asked[0]
    assert not asked[-1]


def test_sides_may_differ_in_their_backend() -> None:
    """Series of two backends are the same series, if nothing else differs."""
    theirs = [Series(operation="all_reduce", bytes=8, backend="mine", device="dev"), Series(operation="other")]
    ours = [Series(operation="all_reduce", bytes=8, backend="gloo", device="cpu"), Series(operation="gather")]
    assert shared({"A": ours, "B": theirs}) == ours[:1]
    assert without_place(ours[0]) == without_place(theirs[0])


def test_steps_are_shown_together(tmp_path: Path) -> None:
    """Steps are rows of one table for each number of ranks, by their names, without a size."""
    found = duet(tmp_path, Machine(), {0: 3.0}, (OFFERS[0], *STEPS), series=(OFFERS[0], *STEPS))
    found.run(600)
    with (console := Console(width=140)).capture() as output:
        console.print(tables(view(found.state)))
    lines = [line.strip() for line in output.get().splitlines()]
    assert lines.count("training steps on 2 ranks") == 1
    assert sum(line.startswith("tp_extension, model 4x2 of 256, 16 rows") for line in lines) == 1
    assert "0 B" not in output.get()
    assert "| step.replicate float32 2 ranks" in markdown(view(found.state))
