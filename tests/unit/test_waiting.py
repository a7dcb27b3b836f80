"""A wait for ranks, its watchdog and its post-mortem: with ranks that are made up, on a clock that nobody waits for."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.worlds import answers, wire
from harness.worlds.blackbox import Issued
from harness.worlds.launch import Output
from harness.worlds.pool import Pool
from harness.worlds.postmortem import RanksFailed
from harness.worlds.rank_set import Ranks
from harness.worlds.terminal import Terminal
from harness.worlds.waiting import EXIT, Waiting
from harness.worlds.world import World, WorldSpec
from tests.unit.fake_ranks import SETUP, FakeLauncher, FakeRank, in_collective, record, snapshot

SLEEPING = snapshot(frames=[("/repo/tests/test_x.py", 13, "slow")])
THREAD = "Current thread 0x1 (most recent call first):\n"
CRASH = f'Fatal Python error: Segmentation fault\n\n{THREAD}  File "/repo/x.py", line 3 in f\n'
DUMP = f'{THREAD}  File "/repo/x.py", line 7 in in_c\n'


class Shown(Terminal):
    """A terminal that remembers what it was to show."""

    def __init__(self) -> None:
        self.outputs: dict[int, str] = {}
        self.returned = False

    def live(self, index: int, data: bytes) -> None:
        pass

    def finished(self, index: int, output: Output) -> None:
        self.outputs[index] = output.text()

    def gone(self, index: int) -> None:
        pass

    @contextlib.contextmanager
    def lent(self) -> Iterator[tuple[int, int]]:
        yield 10, 11
        self.returned = True


def waiting_for(launcher: FakeLauncher, terminal: Terminal | None = None, **how: Any) -> Waiting:
    ranks = Ranks(launcher.ranks, launcher, terminal, SETUP)
    how = {"answer": "returned", "timeout": 60.0, "proof": True, "on_host": True, "on_device": False, **how}
    return Waiting(ranks, job=1, function="body", world="2 ranks", **how)


def failure(launcher: FakeLauncher, **how: Any) -> RanksFailed:
    """What a wait for the ranks of a launcher raises."""
    with pytest.raises(RanksFailed) as raised:
        waiting_for(launcher, **how).results()
    return raised.value


@pytest.fixture
def launcher() -> FakeLauncher:
    return FakeLauncher()


def block(*ranks: FakeRank, records: tuple[dict[str, Any], ...] = (record(),)) -> None:
    """Have ranks wait in a collective."""
    for rank in ranks:
        rank.snapshot = in_collective(*records)


GROUPS = {"0": [0, 1], "side": [0, 1]}
SIDE = record(group="side")


def circle(launcher: FakeLauncher) -> None:
    """Have two ranks wait for one another, each in a group that the other has not used."""
    for rank, issued in zip(launcher.ranks, (record(), SIDE), strict=True):
        rank.main = "R"  # a wait for a device may spin
        rank.ticks_per_second = 100
        rank.snapshot = {**snapshot(issued, called="tensor.tolist()"), "groups": GROUPS}


class TestAnswers:
    @settings(deadline=None, max_examples=10)
    @given(st.lists(st.floats(0, 2), min_size=1, max_size=4))
    def test_any_order(self, times: list[float]) -> None:
        """Results are in the order of ranks, whatever order they come in, and are there with the last of them."""
        launcher = FakeLauncher(len(times))
        for rank, seconds in zip(launcher.ranks, times, strict=True):
            rank.snapshot = SLEEPING
            launcher.at(seconds, rank.returns, f"of {rank.index}")
        assert waiting_for(launcher).results() == [f"of {i}" for i in range(len(times))]
        assert launcher.seconds == pytest.approx(max(times), abs=0.002)

    def test_frame_is_sent_to_all(self, launcher: FakeLauncher) -> None:
        """Every rank gets the frame, and what is done beside comes before the wait."""
        seen = []
        for rank in launcher.ranks:
            rank.on_frame = FakeRank.returns
        frame = wire.parts_of(b"body")
        found = waiting_for(launcher).results(frame, beside=lambda: seen.append(launcher.seconds))
        assert (found, seen, [rank.sent for rank in launcher.ranks]) == ([None] * 2, [0.0], [[b"".join(frame)]] * 2)

    def test_output_that_comes_with_the_answer(self, launcher: FakeLauncher) -> None:
        """What was printed before the last answer is shown with the rest."""
        terminal = Shown()
        for rank in launcher.ranks:
            launcher.at(1.0, rank.returns)
            launcher.at(1.0, rank.prints, b"printed by %d" % rank.index)
        waiting_for(launcher, terminal).results()
        assert terminal.outputs == {0: "printed by 0", 1: "printed by 1"}

    def test_closed_output_is_not_listened_to(self, launcher: FakeLauncher) -> None:
        """A rank whose output is closed can still answer."""
        launcher.ranks[0].output_closed = True
        for rank in launcher.ranks:
            launcher.at(1.0, rank.returns, rank.index)
        assert waiting_for(launcher).results() == [0, 1]

    def test_result_that_must_be_tried_out(self) -> None:
        """A result that is no plain data is read in a spare process first, and then here."""
        launcher = FakeLauncher(1)
        launcher.ranks[0].returns(os.path.join)
        assert waiting_for(launcher).results() == [os.path.join]
        assert [setup.reads for setup in launcher.spawned] == [True]

    def test_result_that_kills_its_reader(self) -> None:
        """A result whose reading ends the spare process is that rank's failure, and says how it ended."""
        launcher = FakeLauncher(1, reader=lambda rank: rank.dies(int(signal.SIGSEGV), crash=CRASH))
        launcher.ranks[0].returns(os.path.join)
        assert "reading it was killed by SIGSEGV" in failure(launcher).headline

    def test_result_that_takes_for_ever(self) -> None:
        """A result whose reading does not end is given up with the run's timeout, with the stack of the reading."""

        def never(rank: FakeRank) -> None:
            rank.stack = DUMP

        launcher = FakeLauncher(1, reader=never)
        launcher.ranks[0].returns(os.path.join)
        error = failure(launcher, timeout=30.0)
        assert "not done after 30 s" in error.headline
        assert "in_c" in str(error)
        assert launcher.seconds == pytest.approx(30.0, abs=0.1)

    def test_rank_that_ends_while_a_result_is_tried_out(self, launcher: FakeLauncher) -> None:
        """The end of another rank is not missed while the reading of a result is waited for."""
        launcher._reader = lambda reader: launcher.at(2.0, reader.returns)
        launcher.at(1.0, launcher.ranks[1].dies, int(signal.SIGKILL))
        launcher.ranks[0].returns(os.path.join)
        error = failure(launcher)
        assert ([end.kind for end in error.ends], launcher.seconds) == (
            ["returned", "died"],
            pytest.approx(2.0, abs=0.01),
        )


class TestFirstToFail:
    def test_others_are_blocked(self) -> None:
        """Once a rank has raised, ranks that wait for it are stopped after a moment, and it is the one to blame."""
        launcher = FakeLauncher(3)
        block(launcher.ranks[0], launcher.ranks[2])
        launcher.at(0.1, launcher.ranks[1].raises, "ValueError", "wrong")
        error = failure(launcher)
        assert error.headline == "rank 1 of 3 failed first: ValueError: wrong"
        assert ([end.kind for end in error.ends], error.verdict) == (["stopped", "raised", "stopped"], "failed")
        assert launcher.seconds < 0.6

    def test_others_finish(self, launcher: FakeLauncher) -> None:
        """A rank that is at work when another fails gets the time to end."""
        launcher.ranks[0].snapshot, launcher.ranks[0].ticks_per_second = SLEEPING, 100
        launcher.at(0.1, launcher.ranks[1].raises)
        launcher.at(3.0, launcher.ranks[0].returns)
        error = failure(launcher)
        assert ([end.kind for end in error.ends], launcher.seconds) == (
            ["returned", "raised"],
            pytest.approx(3.0, abs=0.01),
        )

    def test_others_go_on_for_ever(self, launcher: FakeLauncher) -> None:
        """A rank that computes without end is stopped five seconds after another has failed."""
        launcher.ranks[0].snapshot, launcher.ranks[0].ticks_per_second = SLEEPING, 100
        launcher.at(0.1, launcher.ranks[1].raises)
        error = failure(launcher)
        assert error.ends[0].what == "stopped by the harness while running, in slow at /repo/tests/test_x.py:13"
        assert launcher.seconds == pytest.approx(5.1, abs=0.01)

    @pytest.mark.parametrize("ahead_ns", [0, 3600 * 10**9, -(3600 * 10**9)])
    def test_heard_of_later(self, launcher: FakeLauncher, ahead_ns: int) -> None:
        """The rank that raised first is to blame, though its exception came last, and whatever its clock says."""
        early = launcher.ranks[1]
        early.clock_ahead_ns = ahead_ns
        launcher.at(0.1, launcher.ranks[0].raises, "KeyError")
        when = launcher.clock.monotonic_ns() + 50_000_000 + ahead_ns
        launcher.at(0.2, early.raises, "ValueError", time_ns=when)
        assert failure(launcher).culprits == (1,)

    def test_broken_connection_follows_from_an_end(self, launcher: FakeLauncher) -> None:
        """A collective that broke because its peer was gone is not what failed first, though it was heard of first."""
        message = "Connection closed by peer"
        launcher.at(0.1, launcher.ranks[0].raises, "RuntimeError", message, in_collective=True)
        launcher.at(0.2, launcher.ranks[1].dies, int(signal.SIGABRT))
        error = failure(launcher)
        assert (error.culprits, error.verdict) == ((1,), "crashed")

    def test_difference_that_only_black_boxes_show(self, launcher: FakeLauncher) -> None:
        """Ranks that died with their Flight Recorders are compared by what their black boxes hold."""
        for rank, op in zip(launcher.ranks, ("broadcast", "all_reduce"), strict=True):
            rank.box.issued = [Issued(1, 0, op, "float32[4]", "0", "test_x.py:12")]
            launcher.at(0.1, rank.dies, int(signal.SIGABRT))
        assert "collective 1 of the default group differs" in failure(launcher).headline

    def test_skip(self, launcher: FakeLauncher) -> None:
        """A rank that skips by itself has failed."""
        launcher.ranks[0].returns()
        launcher.ranks[1].raises("Skipped", "no", skip=True)
        assert "skipped by itself (no)" in failure(launcher).headline


class TestDeadlock:
    def test_proof(self, launcher: FakeLauncher) -> None:
        """Ranks that wait for different collectives are a deadlock once they have stood still for 0.75 s."""
        block(launcher.ranks[0], records=(record("all_reduce"),))
        block(launcher.ranks[1], records=(record("broadcast"),))
        error = failure(launcher)
        assert (error.verdict, error.explanation is not None and error.explanation.mismatch) == ("hung", True)
        assert "collective 1 of the default group differs" in error.headline
        first_quiet_look = 0.5
        assert launcher.seconds == pytest.approx(first_quiet_look + 0.75, abs=0.02)

    def test_one_has_returned(self, launcher: FakeLauncher) -> None:
        """A rank that waits for one that has returned is a deadlock, and the other is named."""
        block(launcher.ranks[0])
        launcher.at(0.1, launcher.ranks[1].returns)
        error = failure(launcher)
        assert (error.culprits, "for rank 1, which has returned" in error.headline) == ((1,), True)

    def test_progress_starts_anew(self, launcher: FakeLauncher) -> None:
        """Ranks that moved on in the meantime have to stand still for as long once more."""
        block(*launcher.ranks)
        launcher.at(1.2, block, *launcher.ranks, records=(record(done=True), record(seq=2)))
        for rank in launcher.ranks:
            launcher.at(1.9, rank.returns)
        assert waiting_for(launcher).results() == [None, None]

    def test_without_proof(self, launcher: FakeLauncher) -> None:
        """Where no proof is asked for, a deadlock is waited for until the time is over."""
        block(launcher.ranks[0])
        error = failure(launcher, proof=False, timeout=20.0)
        assert (launcher.seconds >= 20.0, error.reason[:23]) == (True, "not finished after 20 s")

    def test_accelerator(self, launcher: FakeLauncher) -> None:
        """Where ranks wait for a device, only what the records show is a proof."""
        block(*launcher.ranks)
        for rank in launcher.ranks:
            launcher.at(9.0, rank.returns)
        assert waiting_for(launcher, on_host=False).results() == [None, None]

    def test_circle_on_an_accelerator(self, launcher: FakeLauncher) -> None:
        """Ranks that wait for a device, each in a group that the other has not used, are a deadlock in under 5 s."""
        circle(launcher)
        error = failure(launcher, on_host=False)
        assert error.verdict == "hung"
        assert "collective 1 of the default group" in error.headline
        assert error.culprits == (1,)
        assert 3.0 < launcher.seconds < 5.0

    @pytest.mark.parametrize(
        "other",
        [
            pytest.param({"records": [SIDE, record()]}, id="both issued"),
            pytest.param({"records": [SIDE, {**record("send"), "p2p": True}]}, id="a message outstanding"),
            pytest.param({"complete": False}, id="records dropped"),
            pytest.param({"records": None}, id="no records"),
            pytest.param({"threads": SLEEPING["threads"]}, id="may still issue it"),
        ],
    )
    def test_no_circle_on_an_accelerator(self, launcher: FakeLauncher, other: dict[str, Any]) -> None:
        """If a collective may still complete, ranks that wait for a device are waited for."""
        circle(launcher)
        launcher.ranks[1].snapshot = {**(launcher.ranks[1].snapshot or {}), **other}
        for rank in launcher.ranks:
            launcher.at(20.0, rank.returns, rank.index)
        assert waiting_for(launcher, on_host=False).results() == [0, 1]

    def test_circle_that_opens(self, launcher: FakeLauncher) -> None:
        """A rank that waits for other work of its device, and then issues what was missing, has 3 s for it."""
        circle(launcher)
        opened = {**snapshot(SIDE, record(), called="tensor.tolist()"), "groups": GROUPS}
        launcher.at(2.8, setattr, launcher.ranks[1], "snapshot", opened)
        for rank in launcher.ranks:
            launcher.at(20.0, rank.returns, rank.index)
        assert waiting_for(launcher, on_host=False).results() == [0, 1]

    def test_stopped_by_a_signal(self, launcher: FakeLauncher) -> None:
        """A rank that somebody has stopped counts as gone after a while, and is named; it is not asked."""
        block(launcher.ranks[0], records=())
        launcher.ranks[1].main = "T"
        error = failure(launcher)
        assert error.headline == "deadlock: rank 1 stopped by a signal, the others wait"
        assert error.ends[1].what == "stopped by the harness while stopped by a signal (SIGSTOP), in phase running"
        assert launcher.seconds < 5.0


class TestSlow:
    """A rank that may move by itself is slow: nothing is proven, and nobody is to blame."""

    def slow(self, **what: Any) -> FakeLauncher:
        launcher = FakeLauncher()
        block(launcher.ranks[0])
        launcher.ranks[1].snapshot = SLEEPING
        for name, value in what.items():
            setattr(launcher.ranks[1], name, value)
        return launcher

    @pytest.mark.parametrize(
        "what",
        [
            pytest.param({"snapshot": in_collective(record()), "ticks_per_second": 100}, id="uses the processor"),
            pytest.param({"snapshot": in_collective(record()), "threads": ("S", "R")}, id="has a thread that runs"),
            pytest.param({"snapshot": in_collective(record()), "main": "D"}, id="waits for a disk"),
            pytest.param({"snapshot": in_collective(record()), "waking": frozenset({1})}, id="sleeps in C"),
            pytest.param({"snapshot": in_collective({**record(), "timeout_s": 30.0})}, id="has its own limit"),
            pytest.param({"snapshot": None}, id="does not answer"),
            pytest.param({}, id="is somewhere else"),
        ],
    )
    def test_is_waited_for(self, what: dict[str, Any]) -> None:
        """It is waited for, for as long as there is time."""
        launcher = self.slow(**what)
        for rank in launcher.ranks:
            launcher.at(20.0, rank.returns, rank.index)
        assert waiting_for(launcher).results() == [0, 1]

    def test_too_slow(self) -> None:
        """When the time is over, the wait ends on the spot, with who was waited for."""
        launcher = self.slow()
        error = failure(launcher, timeout=10.0)
        assert error.reason.startswith("not finished after 10 s: rank 0 waits in all_reduce")
        assert "for rank 1, which is in slow at /repo/tests/test_x.py:13" in error.reason
        assert (error.verdict, error.ends[1].kind) == ("hung", "stopped")
        assert launcher.seconds == pytest.approx(10.0, abs=0.02)

    def test_begun_an_answer(self) -> None:
        """Of a rank that has begun to answer, it is said how much has come."""
        error = failure(self.slow(begun="3 bytes of an answer of 8 bytes"), timeout=1.0)
        assert error.ends[1].what.endswith("it has sent 3 bytes of an answer of 8 bytes")


class TestEnds:
    def test_crash(self, launcher: FakeLauncher) -> None:
        """A rank that crashed is first, with the stack that it left behind."""
        block(launcher.ranks[0])
        launcher.at(0.1, launcher.ranks[1].dies, int(signal.SIGSEGV), crash=CRASH)
        error = failure(launcher)
        assert (error.verdict, error.culprits) == ("crashed", (1,))
        assert "killed by SIGSEGV" in error.headline
        assert ("Segmentation fault" in error.ends[1].stack, "/repo/x.py:3: in f" in error.ends[1].stack) == (
            True,
            True,
        )

    def test_without_an_answer(self, launcher: FakeLauncher) -> None:
        """A rank that leaves without a result has failed."""
        launcher.ranks[0].returns()
        launcher.at(0.1, launcher.ranks[1].dies, 3 << 8)
        assert failure(launcher).headline == ("rank 1 of 2 failed first: exited with code 3 before it had a result")

    def test_last_words(self, launcher: FakeLauncher) -> None:
        """What a rank had answered before it ended counts."""
        launcher.ranks[0].returns(1)
        launcher.ranks[1].returns(2)
        launcher.ranks[1].dies(0)
        assert waiting_for(launcher).results() == [1, 2]

    def test_leave(self, launcher: FakeLauncher) -> None:
        """Ranks that were told to close answer by ending with code 0."""
        for rank in launcher.ranks:
            launcher.at(1.0, rank.dies, 0)
        assert waiting_for(launcher, answer=EXIT).results() == [None, None]

    def test_late_leave(self, launcher: FakeLauncher) -> None:
        """A rank that does not end in time is said to be stuck where its black box has it."""
        launcher.at(1.0, launcher.ranks[0].dies, 0)
        launcher.ranks[1].box.phase = "atexit"
        error = failure(launcher, answer=EXIT, proof=False, timeout=15.0)
        assert error.reason.startswith("rank 1 did not end within 15 s: stuck in its exit handlers")

    def test_output_after_the_end(self, launcher: FakeLauncher) -> None:
        """What comes out of a rank's pipe after its end is part of its evidence."""
        launcher.ranks[0].snapshot, launcher.ranks[0].ticks_per_second = SLEEPING, 100
        launcher.ranks[1].prints(b"before, ")
        launcher.at(0.1, launcher.ranks[1].dies, 1 << 8)
        launcher.at(0.5, launcher.ranks[1].prints, b"after")
        launcher.at(1.0, launcher.ranks[0].returns)
        assert failure(launcher).ends[1].output == "before, after"

    def test_server_is_lost(self, launcher: FakeLauncher) -> None:
        """Where the launcher has lost all ranks, none is to blame, and the launcher's word is the headline."""
        block(*launcher.ranks)
        launcher.at(0.4, launcher.lose, "the server was killed by SIGKILL")
        error = failure(launcher)
        assert (error.headline, error.culprits) == ("no rank is to blame: the server was killed by SIGKILL", ())
        assert [end.kind for end in error.ends] == ["lost", "lost"]


class TestCounts:
    def test_of_all_ranks(self, launcher: FakeLauncher) -> None:
        """The collectives of all ranks are added; a name that is none of a collective is left out."""
        wait = waiting_for(launcher)
        launcher.ranks[0].answers(answers.Returned(1, issued={"all_reduce": 2, "barrier": 1}, on_groups=4))
        launcher.ranks[1].answers(answers.Returned(1, issued={"all_reduce": 3, "made up": 9}, on_groups=3))
        wait.results()
        assert wait.issued == {"all_reduce": 5, "barrier": 1}
        assert wait.on_groups == 7


class TestGarbage:
    @pytest.mark.parametrize(
        ("says", "told"),
        [
            (lambda rank: rank.says(b"\xff garbage"), "garbage"),
            (lambda rank: rank.breaks_off(wire.NotAFrame("it begins with b'hello'")), "it begins with b'hello'"),
            (lambda rank: rank.answers(answers.Returned(7)), "'returned' for job 7, which nobody waits for"),
            (lambda rank: rank.answers(answers.Checked(1, [])), "'checked' for job 1, which nobody waits for"),
        ],
        ids=["no answer", "no frame", "another job's", "of another kind"],
    )
    def test_named(self, launcher: FakeLauncher, says: Callable[[FakeRank], None], told: str) -> None:
        """A rank that says what is no answer has failed, with what it said."""
        launcher.ranks[0].returns()
        says(launcher.ranks[1])
        error = failure(launcher)
        assert (error.ends[1].kind, error.culprits) == ("garbled", (1,))
        assert "wrote what is no answer to its control channel: " in error.headline
        assert told in error.headline

    def test_descriptor(self, launcher: FakeLauncher) -> None:
        """The message has the number that the rank has for the channel, once it has said so."""
        wait = waiting_for(launcher)
        wait._ranks.descriptors[1] = 5
        launcher.ranks[0].returns()
        launcher.ranks[1].says(b"")
        with pytest.raises(RanksFailed, match=r"control channel \(descriptor 5\)"):
            wait.results()

    def test_after_the_answer(self, launcher: FakeLauncher) -> None:
        """An answer that is followed by garbage is no success."""
        launcher.at(0.2, launcher.ranks[0].returns)
        launcher.ranks[1].returns()
        launcher.ranks[1].says(b"\xff")
        assert [end.kind for end in failure(launcher).ends] == ["returned", "garbled"]

    def test_then_the_end(self, launcher: FakeLauncher) -> None:
        """That a rank has ended says more than what it said last."""
        launcher.ranks[0].returns()
        launcher.at(0.1, launcher.ranks[1].says, b"\xff")
        launcher.at(0.1, launcher.ranks[1].dies, int(signal.SIGBUS))
        assert failure(launcher).ends[1].kind == "died"

    def test_connection_has_closed(self, launcher: FakeLauncher) -> None:
        """A connection that closes is not an end yet: how the rank ended comes from the launcher."""
        launcher.ranks[0].returns()
        launcher.ranks[1].breaks_off(wire.WireError("the peer closed the connection"))
        launcher.at(2.0, launcher.ranks[1].dies, 1 << 8)
        assert (failure(launcher).ends[1].kind, launcher.seconds) == ("exited", pytest.approx(2.0, abs=0.01))

    def test_snapshot(self, launcher: FakeLauncher) -> None:
        """A monitor that answers with anything proves nothing."""
        block(launcher.ranks[0])
        launcher.ranks[1].snapshot = {"threads": [{"native": "x"}, 1], "records": 3}
        for rank in launcher.ranks:
            launcher.at(9.0, rank.returns)
        assert waiting_for(launcher).results() == [None, None]


class TestMissingSnapshots:
    def test_stack_instead(self, launcher: FakeLauncher) -> None:
        """A rank whose monitor does not answer is asked for its stacks, and said to be in C."""
        block(launcher.ranks[0])
        launcher.ranks[1].snapshot, launcher.ranks[1].stack = None, DUMP
        error = failure(launcher, timeout=5.0)
        assert error.ends[1].what == (
            "stopped by the harness while in C code that holds the interpreter lock (kernel state S)"
        )
        assert "/repo/x.py:7: in in_c" in error.ends[1].stack

    def test_no_stack_either(self, launcher: FakeLauncher) -> None:
        """Stacks that never come are waited for a few seconds, and the rest is told without."""
        launcher.ranks[1].snapshot, launcher.ranks[1].stack_takes = None, math.inf
        block(launcher.ranks[0])
        error = failure(launcher, proof=False, timeout=5.0)
        assert (error.ends[1].stack, launcher.seconds) == ("", pytest.approx(5.0 + 0.6 + 5.0, abs=0.02))

    def test_machine_with_much_to_do(self, launcher: FakeLauncher) -> None:
        """A rank that waits for a core gets longer to answer."""
        block(launcher.ranks[0])
        launcher.ranks[1].snapshot, launcher.ranks[1].snapshot_takes = SLEEPING, 3.0
        launcher.ranks[1].threads = ("R",)
        error = failure(launcher, proof=False, timeout=5.0)
        assert (error.ends[1].frames != (), launcher.seconds) == (True, pytest.approx(8.0, abs=0.02))

    def test_dies_while_it_is_asked(self, launcher: FakeLauncher) -> None:
        """A rank that ends while its monitor is asked is not waited for."""
        block(launcher.ranks[0])
        launcher.ranks[1].snapshot = None
        launcher.at(5.1, launcher.ranks[1].dies, int(signal.SIGKILL))
        error = failure(launcher, proof=False, timeout=5.0)
        assert (error.ends[1].kind, launcher.seconds < 5.2) == ("died", True)

    def test_written_over(self, launcher: FakeLauncher) -> None:
        """A monitor's channel that something else wrote into is named."""
        block(launcher.ranks[0])
        launcher.ranks[1].monitor_lost = True
        error = failure(launcher, timeout=5.0)
        assert "something wrote into its monitor channel what is no answer" in error.ends[1].what


class TestInterruption:
    def test_note(self, launcher: FakeLauncher) -> None:
        """Whatever else ends the wait has what the ranks were doing as a note."""

        def interrupt() -> None:
            raise KeyboardInterrupt

        block(*launcher.ranks)
        with pytest.raises(KeyboardInterrupt) as raised:
            waiting_for(launcher).results(beside=interrupt)
        (note,) = raised.value.__notes__
        assert "rank 1: stopped by the harness while waiting in all_reduce(float32[4])" in note


class TestDebugger:
    def asking(self) -> FakeLauncher:
        launcher = FakeLauncher()
        launcher.at(1.0, launcher.ranks[1].answers, answers.Debug(1))
        launcher.ranks[0].returns()
        launcher.ranks[1].snapshot = SLEEPING
        return launcher

    def test_clock_stands_still(self) -> None:
        """The terminal is lent until the rank gives it back, and that time is not the run's."""
        launcher, terminal = self.asking(), Shown()
        launcher.at(500.0, launcher.ranks[1].answers, answers.Debugged(1))
        launcher.at(540.0, launcher.ranks[1].returns, 2)
        assert waiting_for(launcher, terminal).results() == [None, 2]
        assert (launcher.ranks[1].lent, terminal.returned) == ((10, 11), True)

    def test_no_terminal(self) -> None:
        """Where there is none to lend, that is said."""
        assert failure(self.asking()).reason.startswith("rank 1 asks for a debugger, but there is no terminal to lend")

    def test_dies_in_it(self) -> None:
        """A rank that ends in its debugger gives the terminal back."""
        launcher, terminal = self.asking(), Shown()
        launcher.at(500.0, launcher.ranks[1].dies, 1 << 8)
        error = failure(launcher, terminal=terminal)
        assert (error.ends[1].kind, terminal.returned) == ("exited", True)


ON_GPUS = WorldSpec(2, backend="any", device="gpu", warm=True)


def warm_world(pool: Pool, devices: tuple[str, str]) -> World:
    """A clean warm world of made-up ranks that waits in the pool."""
    world = pool.acquire(ON_GPUS, devices)
    for rank in world._processes:
        assert isinstance(rank, FakeRank)
        rank.on_frame = lambda rank: rank.answers(answers.Checked(1, []))
    assert pool.release(world, devices) == []
    return world


class TestWorlds:
    """Worlds of made-up ranks, from a pool that starts another launcher where one is lost."""

    def test_run_check_close(self) -> None:
        """A world starts, runs, is looked at and ends; its ranks are given back."""
        launcher = FakeLauncher()
        told = ([FakeRank.returns] * 2, [lambda r: r.answers(answers.Checked(2, []))] * 2, [lambda r: r.dies(0)] * 2)
        todo = {rank.index: [each[rank.index] for each in told] for rank in launcher.ranks}
        for rank in launcher.ranks:
            rank.on_frame = lambda rank: todo[rank.index].pop(0)(rank)
        pool = Pool(launcher=lambda **how: launcher)
        world = pool.acquire(WorldSpec(2, backend="any", warm=True))
        pids = world.pids
        assert (world.run(os.getpid), world.check()) == ([None, None], [])
        world.close()
        pool.close()
        assert (pids, world.pids, [rank.closed for rank in launcher.ranks]) == ([1000, 1001], [], [True, True])
        assert (launcher.killed, launcher.closed) == ([], True)

    def test_warm_worlds_that_crowd_a_device(self) -> None:
        """Of the warm worlds on a device with more ranks than it may have, the oldest is closed; others stay."""
        launchers = [FakeLauncher() for _ in range(3)]
        for launcher in launchers:
            for rank in launcher.ranks:
                todo = [lambda r: r.answers(answers.Checked(1, [])), lambda r: r.dies(0)]
                rank.on_frame = lambda rank, todo=todo: todo.pop(0)(rank)
        made = iter(launchers)
        pool = Pool(launcher=lambda **how: next(made), most_on_a_device=3)
        worlds = []
        for i, device in enumerate(["gpu:1", "gpu:0", "gpu:0"]):
            pool._launchers.clear()
            spec = WorldSpec(2, backend="any", device="gpu", warm=True, timeout=60.0 + i)
            worlds.append((pool.acquire(spec, (device, device)), (device, device)))
            pool.release(*worlds[-1])
        assert [world.live for world, _ in worlds] == [True, False, True]

    @pytest.mark.parametrize(
        ("devices", "hosts"),
        [(("gpu:0", "gpu:0"), ["host-0", "host-1"]), (("gpu:0", "gpu:1"), [None, None]), (("cpu",), [None, None])],
    )
    def test_ranks_that_share_a_device(self, devices: tuple[str, ...], hosts: list[str | None]) -> None:
        """Ranks that share a device have further variables, with their numbers; others have not, nor has the host."""
        launcher = FakeLauncher()
        spec = WorldSpec(
            2, backend="any", device=devices[0].split(":")[0], shared_device_env=(("HOST", "host-{rank}"),)
        )
        Pool(launcher=lambda **how: launcher).acquire(spec, devices)
        assert [setup.env.get("HOST") for setup in launcher.spawned] == hosts

    def test_warm_world_of_other_devices(self) -> None:
        """A warm world serves only its own devices; the pool names those of the one that was used last."""
        launchers = [FakeLauncher() for _ in range(3)]
        made = iter(launchers)
        pool = Pool(launcher=lambda **how: next(made))
        worlds = []
        for devices in (("gpu:0", "gpu:1"), ("gpu:2", "gpu:3")):
            pool._launchers.clear()
            worlds.append(warm_world(pool, devices))
        assert (worlds[1] is worlds[0], pool.devices_of(ON_GPUS)) == (False, ("gpu:2", "gpu:3"))
        assert pool.devices_of(dataclasses.replace(ON_GPUS, timeout=1.0)) == ()
        assert pool.acquire(ON_GPUS, ("gpu:0", "gpu:1")) is worlds[0]
        assert [launcher.spawned == [] for launcher in launchers] == [False, False, True]

    @pytest.mark.parametrize(
        ("fail", "gone"),
        [
            pytest.param(lambda r: r.raises("torch.OutOfMemoryError", out_of_memory=True), True, id="out of memory"),
            pytest.param(lambda r: r.raises("RuntimeError", "out of memory"), False, id="other error"),
        ],
    )
    def test_memory_is_given_back(self, fail: Callable[[FakeRank], None], gone: bool) -> None:
        """If a rank runs out of memory, warm worlds that wait on its devices have ended when the test hears of it."""
        launchers = [FakeLauncher() for _ in range(3)]
        made = iter(launchers)
        pool = Pool(launcher=lambda **how: next(made))
        waiting = [warm_world(pool, ("gpu:1", "gpu:1"))]
        pool._launchers.clear()
        waiting.append(warm_world(pool, ("gpu:2", "gpu:3")))
        pool._launchers.clear()
        world = pool.acquire(WorldSpec(2, backend="any", device="gpu"), ("gpu:0", "gpu:1"))
        launchers[2].ranks[1].on_frame = fail
        with pytest.raises(RanksFailed):
            world.run(os.getpid)
        assert [each.live for each in waiting] == [not gone, True]
        assert pool.devices_of(ON_GPUS) == ("gpu:2", "gpu:3")
        assert bool(pool.retired) == gone

    def test_memory_is_given_back_for_a_start(self) -> None:
        """If a world does not come up, whatever it says, warm worlds that wait on its devices are ended."""
        launchers = [FakeLauncher() for _ in range(2)]
        made = iter(launchers)
        pool = Pool(launcher=lambda **how: next(made))
        waiting = warm_world(pool, ("gpu:0", "gpu:1"))
        pool._launchers.clear()
        rank = launchers[1].ranks[0]
        rank.answers = lambda ready: rank.dies(int(signal.SIGABRT))  # type: ignore[method-assign]
        with pytest.raises(RanksFailed):
            pool.acquire(WorldSpec(2, backend="any", device="gpu"), ("gpu:0", "gpu:1"))
        assert not waiting.live

    def test_failed_ranks_are_killed(self) -> None:
        """After a run that failed no rank is left, and the next run starts fresh ones."""
        launchers = [FakeLauncher(), FakeLauncher()]
        launchers[0].ranks[0].on_frame = FakeRank.raises
        block(*launchers[0].ranks)
        world = Pool(launcher=lambda **how: launchers[0]).acquire(WorldSpec(2, backend="any"))
        with pytest.raises(RanksFailed):
            world.run(os.getpid)
        assert (world.live, launchers[0].killed) == (False, launchers[0].ranks)

    def test_launcher_is_replaced(self) -> None:
        """A launcher that is lost between two tests is closed and another one made, which is told."""
        launchers = [FakeLauncher(), FakeLauncher()]
        made = iter(launchers)
        pool = Pool(launcher=lambda **how: next(made))
        pool.prepare()
        launchers[0].lost = "the server was killed"
        pool.acquire(WorldSpec(2, backend="any"))
        assert (pool.replaced, launchers[0].closed) == (["the server was killed"], True)
        assert [len(launcher.spawned) for launcher in launchers] == [0, 2]

    def test_lost_in_a_start(self) -> None:
        """A launcher that turns out to be lost as ranks are started is replaced in the same start."""
        launchers = [FakeLauncher(), FakeLauncher()]
        made = iter(launchers)
        spawn = launchers[0].spawn

        def lose_first(setups: Any) -> Any:
            launchers[0].lost = "the server was killed"
            return spawn(setups)

        launchers[0].spawn = lose_first  # type: ignore[method-assign]
        world = Pool(launcher=lambda **how: next(made)).acquire(WorldSpec(2, backend="any"))
        assert (world.started, world.live) == (1, True)


def test_failure_holds_no_handle() -> None:
    """A failure outlives its ranks, so it holds none of their handles."""
    launcher = FakeLauncher()
    launcher.at(0.1, launcher.ranks[1].dies, 9)
    block(launcher.ranks[0])
    held = [value for end in failure(launcher).ends for value in dataclasses.asdict(end).values()]
    assert not [value for value in held if isinstance(value, FakeRank)]
