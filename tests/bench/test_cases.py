"""What it costs that results say which cases tests executed: the same work with and without the record, in turns.

Run with ``pytest tests/bench/test_cases.py --benchmark-enable``; nothing here fails for being slow.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness import Pool, World, WorldSpec, executed
from harness.programs import assert_same_as_alone
from harness.redaction import current
from harness.results import NOT_REACHED, PASSED, CaseOf, Table, TestResult
from harness.specs.program import Layout, Linear, Model, Program
from harness.stacks.collectives import assert_right, kind_of
from suites.collectives.cases import crossing

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ROUNDS = 40
PROGRAM = Program(Model((4,), (Linear(4), Linear(2))), Layout("replicate", 2))


@pytest.fixture
def world(asked_for: None) -> Iterator[World]:
    pool = Pool()
    yield pool.acquire(WorldSpec(2))
    pool.close()


def as_recorded(work: Callable[[], None]) -> None:
    """Do the work of a test, record its cases, and write them, with all of them new in the file."""
    with executed.recording() as found:
        work()
    tried, new = Table().refer(found.plain())
    assert new
    result = TestResult(nodeid="a", verdict="passed", tried=tried)
    msgspec.json.encode([current().record(msgspec.to_builtins(each)) for each in (result, *new)])


def unrecorded(work: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> float:
    """Return the seconds that the same work takes when nobody records."""
    with monkeypatch.context() as patch:
        patch.setattr(executed, "_running", [])
        began = time.perf_counter()
        work()
        return time.perf_counter() - began


@pytest.mark.parametrize("name", ["all_reduce", "all_to_all"])
def test_collectives(name: str, compare: Callable[..., Any], world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test with the most different cases of a collective: a crossing."""
    cases = crossing(name, 2, False)

    def work() -> None:
        assert_right(world, cases)

    compare(
        f"{len(cases)} cases of {name}",
        lambda: as_recorded(work),
        lambda: unrecorded(work, monkeypatch),
        against="the same without the record",
        wanted="1.03 at most",
        rounds=200,
    )


def test_record_alone(compare: Callable[..., Any], world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record without the work, beside the work: what noise of ranks cannot hide."""
    cases = crossing("all_to_all", 2, False)

    def record() -> None:
        with executed.Batch([kind_of(case, 2) for case in cases], 2, NOT_REACHED) as batch:
            batch.end(range(len(cases)), PASSED)

    compare(
        f"the record of {len(cases)} cases",
        lambda: as_recorded(record),
        lambda: unrecorded(lambda: assert_right(world, cases), monkeypatch),
        against="the work that it is about",
        wanted="0.03 at most",
        rounds=60,
    )


def test_programs(compare: Callable[..., Any], world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small training run, beside which a record weighs most."""

    def work() -> None:
        assert_same_as_alone(lambda size: world, PROGRAM)

    compare(
        "a small program",
        lambda: as_recorded(work),
        lambda: unrecorded(work, monkeypatch),
        against="the same without the record",
        wanted="1.03 at most",
        rounds=60,
    )


def processor_seconds(pid: int) -> float:
    """The processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_share_of_processor_time(
    world: World, monkeypatch: pytest.MonkeyPatch, figures: Callable[[str, str], None]
) -> None:
    """The record's share of the processor time of this process and one rank: other work on the machine adds nothing."""
    cases = crossing("all_to_all", 2, False)
    kinds = [kind_of(case, 2) for case in cases]

    def a_batch() -> None:
        with executed.Batch(kinds, 2, NOT_REACHED) as batch:
            batch.end(range(len(cases)), PASSED)

    def a_program() -> None:
        with executed.Batch(executed_settings, 2, NOT_REACHED) as batch:
            batch.end(range(len(executed_settings)), PASSED)

    with executed.recording() as found:
        assert_same_as_alone(lambda size: world, PROGRAM)
    executed_settings = [msgspec.convert(["setting", *each[1:]], CaseOf) for each in found.plain()[0][2]]
    for what, work, record in (
        (f"{len(cases)} cases of all_to_all", lambda: assert_right(world, cases), a_batch),
        ("a small program", lambda: assert_same_as_alone(lambda size: world, PROGRAM), a_program),
    ):
        unrecorded(work, monkeypatch)
        before = time.process_time() + processor_seconds(world.pids[0])
        for _ in range(ROUNDS):
            unrecorded(work, monkeypatch)
        spent = (time.process_time() + processor_seconds(world.pids[0]) - before) / ROUNDS
        as_recorded(record)
        before = time.process_time()
        for _ in range(ROUNDS):
            as_recorded(record)
        recording = (time.process_time() - before) / ROUNDS
        figures(
            what, f"{recording * 1e3:.2f} ms of {spent * 1e3:.1f} ms: {recording / spent:.1%} (wanted: 3 % at most)"
        )
