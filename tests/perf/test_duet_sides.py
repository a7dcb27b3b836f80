"""Sides of a duet: processes that answer, die, hang, babble, print, or have ranks with wrong values."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.bench.duet.journal import Journal
from harness.bench.duet.messages import Begin, Described, End, Finish, Ranks, Servers
from harness.bench.duet.records import Begun
from harness.bench.duet.run import Duet
from harness.bench.duet.sides import Setting, Side, SideFailed
from harness.bench.duet.state import replayed
from harness.versions.environments import variables
from tests.perf.duets import ABOUT

ROOT = Path(__file__).parents[2]
PYTHON = Path(sys.executable)


def setting(name: str = "A") -> Setting:
    return Setting(name, PYTHON, ROOT, tuple(sorted(variables(PYTHON, ROOT).items())))


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[Callable[..., Side]]:
    """Starts a side that runs a script instead of a runner."""
    made: list[Side] = []

    def start(script: str, patience: float = 20.0) -> Side:
        made.append(Side(setting(), tmp_path / "log.txt", patience=patience, command=("-c", script)))
        return made[-1]

    yield start
    for one in made:
        one.close()


READ = "import sys, os, time\nsys.stdin.readline()\n"


@pytest.mark.parametrize(
    ("script", "says"),
    [
        (READ + "sys.exit(3)", "its process exited with 3"),
        (READ + "print('boom', file=sys.stderr); sys.exit(1)", "exited with 1; its last words: boom"),
        (READ + "os.kill(os.getpid(), 9)", "its process was killed by SIGKILL"),
        (READ + "print('hello', flush=True); sys.stdin.read()", "no answer but something else"),
        (READ + """print('{"type":"measured","seconds":[1]}', flush=True); sys.stdin.read()""", "another question"),
        (
            READ + """print('{"type":"wrong","kind":"ranks","text":"rank 1 \\\\u001b[31m died"}', flush=True)""",
            "rank 1",
        ),
        (READ + "print('[' * 100000, flush=True); sys.stdin.read()", "no answer but something else"),
        (READ + "sys.stdout.write('x' * (33 << 20)); sys.stdout.flush(); sys.stdin.read()", "more than 32 MiB"),
    ],
)
def test_what_is_no_answer(scripted: Callable[..., Side], script: str, says: str) -> None:
    """A side that ends or says something else is named, with its last words, and nothing drives the terminal."""
    side = scripted(script)
    with pytest.raises(SideFailed, match=says) as found:
        side.do(Servers())
    assert found.value.side == "A"
    assert "\x1b" not in str(found.value)


def test_a_side_that_hangs(scripted: Callable[..., Side], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for it longer than its patience, and it is ended."""
    monkeypatch.setattr("harness.bench.duet.sides._END", 0.2)
    side = scripted(READ + "import signal; signal.signal(15, signal.SIG_IGN); time.sleep(600)", patience=0.3)
    began = time.monotonic()
    with pytest.raises(SideFailed, match=r"A: no answer within 0.3 s"):
        side.do(Servers())
    assert time.monotonic() - began < 10
    side.close()
    assert not Path(f"/proc/{side.pid}").exists()


@pytest.mark.parametrize("seconds", ["[]", "[1.0, 2.0]", "[0.0, 1.0, 1.0]", "[-1.0, 1.0, 1.0]", "[1.0, 1.0, 1e999]"])
def test_rounds_that_are_none(scripted: Callable[..., Side], seconds: str) -> None:
    """A round has as many times as were asked for, all of them above zero and finite."""
    side = scripted(READ + f"""print('{{"type":"measured","seconds":{seconds}}}', flush=True); sys.stdin.read()""")
    with pytest.raises(SideFailed, match="measured|something else"):
        side.round(0, 3, 1)


def test_a_python_that_is_none(tmp_path: Path) -> None:
    """It is named at once."""
    with pytest.raises(SideFailed, match="no-python: No such file"):
        Side(Setting("A", tmp_path / "no-python", ROOT), tmp_path / "log")


# real sides


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., Side]]:
    """Starts real sides, which end with the test."""
    made: list[Side] = []

    def start(name: str = "A", **asked: object) -> Side:
        side = Side(setting(name), tmp_path / f"{name}.txt")
        made.append(side)
        side.send(Begin(**asked))  # type: ignore[arg-type]
        return side

    yield start
    for one in made:
        one.close()


def number_of(described: Described, size: int) -> int:
    """The plain all_reduce of so many bytes on two ranks."""
    return next(
        i
        for i, one in enumerate(described.offers)
        if (one.operation, one.op, one.dtype, one.bytes, one.world, one.variant)
        == ("all_reduce", "sum", "float32", size, 2, ())
    )


def seconds_of_cpu(above: int) -> float:
    """The CPU time of all processes below a process."""
    parents: dict[int, tuple[int, float]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(entry.name)] = int(fields[1]), sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")

    def below(pid: int) -> bool:
        while pid in parents:
            pid = parents[pid][0]
            if pid == above:
                return True
        return False

    return sum(seconds for pid, (_, seconds) in parents.items() if below(pid))


def test_ranks_that_wait_use_no_cpu(started: Callable[..., Side]) -> None:
    """While one side measures, the other side's ranks sleep, although they hold a prepared series."""
    busy, idle = started("A"), started("B")
    numbers = [number_of(side.described(), 8) for side in (busy, idle)]
    for side, number in zip((busy, idle), numbers, strict=True):
        side.do(Ranks(2))
        side.prepare(number)
    before, began = seconds_of_cpu(idle.pid), time.monotonic()
    worked = seconds_of_cpu(busy.pid)
    while time.monotonic() - began < 1.5:
        busy.round(numbers[0], 200, 3)
    assert seconds_of_cpu(busy.pid) - worked > 0.3
    assert seconds_of_cpu(idle.pid) - before <= 0.05
    for side, number in zip((busy, idle), numbers, strict=True):
        side.do(Finish(number))


def test_bad_requests(started: Callable[..., Side]) -> None:
    """What can't be done is said, and the side goes on."""
    side = started(faults=("no-such-fault",))
    with pytest.raises(SideFailed, match="no fault is called no-such-fault"):
        side.described()
    side.send(Begin(profile="no-such-profile"))
    with pytest.raises(SideFailed, match="no profile of that name"):
        side.described()
    with pytest.raises(SideFailed, match="there are no ranks"):
        side.round(0, 1, 1)
    with pytest.raises(SideFailed, match="list index out of range"):
        side.prepare(10**6)
    side.do(End())


def test_a_line_that_is_no_request(started: Callable[..., Side]) -> None:
    """It gets an answer that says so, and the side goes on."""
    side = started()
    side.described()
    assert side._process.stdin is not None
    for line in (b"garbage\n", b'{"type":"round","series":"x"}\n', b"[" * 100_000 + b"\n"):
        side._process.stdin.write(line)
        side._process.stdin.flush()
        with pytest.raises(SideFailed, match="no request"):
            side.receive()
    side.do(End())


def test_a_duet_of_real_sides(started: Callable[..., Side], tmp_path: Path) -> None:
    """Two sides are measured in turns; a series whose values are wrong in B fails, is named, and the other goes on."""
    sides = {"A": started("A"), "B": started("B", faults=("float32-summed-as-bfloat16",))}
    described = {name: side.described() for name, side in sides.items()}
    offers = {name: one.offers for name, one in described.items()}
    broadcast = next(one for one in offers["A"] if (one.operation, one.bytes, one.world) == ("broadcast", 1024, 2))
    series = (broadcast, offers["A"][number_of(described["A"], 8 << 10)])
    begun = Begun(time=time.time(), a=ABOUT, b=ABOUT, series=series, rate=0.01, margin=0.05)
    journal = Journal(tmp_path / "duet.jsonl")
    journal.begin(begun)
    duet = Duet(sides, journal, replayed([begun]), offers)
    duet.run(0.1)
    assert duet.state.generations == 1
    assert duet.state.pairs == 2
    assert [len(one["fastest"]) for one in duet.state.differences] == [1, 0]
    assert all(1e-7 < figure < 1.0 for pair in duet.state.figures[0] for figure in pair)
    failed = duet.state.failed[1]
    assert (failed.side, failed.kind) == ("B", "values")
    assert "rank 0: the first call: output" in failed.why
    assert "a call after the last that was timed" in failed.why


def test_a_rank_that_dies(started: Callable[..., Side]) -> None:
    """It is named, and the side can start others."""
    side = started()
    number = number_of(side.described(), 8)
    side.do(Ranks(2))
    side.prepare(number)
    ranks = [int(pid) for pid in _ranks_of(side.pid)]
    os.kill(ranks[-1], 9)
    time.sleep(0.5)
    with pytest.raises(SideFailed, match=r"A: .*rank \d") as found:
        side.round(number, 200, 3)
    assert found.value.kind == "ranks"
    side.do(Ranks(2))
    assert side.prepare(number).typical > 0


def _ranks_of(above: int) -> list[str]:
    """The processes without children below a process that have a store's connection: the last that were forked."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[entry.name] = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            except OSError:
                continue
    found, generation = [], {str(above)}
    while generation:
        generation = {pid for pid, parent in parents.items() if parent in generation}
        if generation:
            found = sorted(generation, key=int)
    return found
