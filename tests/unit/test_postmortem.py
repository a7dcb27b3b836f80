"""What is made of the ends of ranks: who was first, whose fault it was not, and a text that can always be written."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.worlds.blackbox import Issued
from harness.worlds.handle import HERE, Place
from harness.worlds.launch import Exit
from harness.worlds.places import TORCH
from harness.worlds.postmortem import (
    End,
    RanksFailed,
    compare_issued,
    crash_stack,
    describe_collectives,
    first_to_fail,
    grouped,
    not_later,
    stack_text,
    verdict_of,
)
from harness.worlds.views import Record
from harness.worlds.watchdog import Explanation

KILLED = Exit(int(signal.SIGKILL), 0)
CLOSED = "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711"


def report(message: str = "boom", **other: Any) -> dict[str, Any]:
    return {
        "type": "ValueError",
        "message": message,
        "text": f"test_x.py:3: in body\nE   ValueError: {message}",
        "context": "",
        "frames": [["test_x.py", 3, "body"]],
        "in_collective": False,
        "skip": False,
        "out_of_memory": False,
        "exit_code": None,
        "time_ns": 0,
        **other,
    }


def raised(index: int, time_ns: int = 0, message: str = "boom", **other: Any) -> End:
    return End(index, "raised", time_ns, report=report(message, **other))


def broken_transport(index: int, time_ns: int = 0, message: str = CLOSED) -> End:
    return raised(index, time_ns, message, type="RuntimeError", in_collective=True)


def died(index: int, time_ns: int = 0) -> End:
    return End(index, "died", time_ns, exit=KILLED)


def stopped(index: int) -> End:
    return End(index, "stopped", 99, standing="waiting in all_reduce(float32[4]) at test_x.py:7")


def failure(*ends: End, **other: Any) -> RanksFailed:
    return RanksFailed("2 cpu ranks, gloo", "body", ends, **other)


ONE, OTHER = Place("host one", 3), Place("host other", 5)


class TestClocksOfHosts:
    """Which of two ranks was first is said only if their hosts' clocks can tell."""

    @pytest.mark.parametrize(
        ("places", "times", "maybe"),
        [
            ((ONE, OTHER), (10, 19), [0]),
            ((ONE, OTHER), (10, 18), [0]),
            ((ONE, OTHER), (10, 17), [0, 1]),
            ((ONE, OTHER), (17, 10), [0, 1]),
            ((ONE, ONE), (10, 11), [0]),
            ((HERE, HERE), (11, 10), [1]),
        ],
    )
    def test_maybe_first(self, places: tuple[Place, Place], times: tuple[int, int], maybe: list[int]) -> None:
        """A difference counts if it is larger than both errors, and on one host any difference does."""
        ends = [
            dataclasses.replace(raised(i, time), place=place)
            for i, (time, place) in enumerate(zip(times, places, strict=True))
        ]
        assert [end.index for end in not_later(ends, first_to_fail(ends))] == maybe
        assert failure(*ends).culprits == tuple(maybe)

    def test_broken_transport_is_not_first(self) -> None:
        """A rank whose connection broke is not first, however close it was."""
        ends = [dataclasses.replace(died(0, 10), place=ONE), dataclasses.replace(broken_transport(1, 9), place=OTHER)]
        assert [end.index for end in not_later(ends, first_to_fail(ends))] == [0]

    def test_nobody(self) -> None:
        """Where nobody failed, nobody was first."""
        assert not_later([End(0, "returned"), stopped(1)], None) == []

    def test_said(self) -> None:
        """The headline names both, and each rank has its host."""
        ends = [dataclasses.replace(raised(0, 10), place=ONE), dataclasses.replace(raised(1, 11), place=OTHER)]
        lines = failure(*ends).summary().splitlines()
        why = "ranks 0, 1 of 2 failed, and the clocks of their hosts do not tell which failed first; rank 0: "
        assert lines[0].startswith(why)
        assert lines[2].startswith("  rank 0 on host one: PERHAPS THE FIRST TO FAIL: ")
        assert lines[3].startswith("  rank 1 on host other: PERHAPS THE FIRST TO FAIL: ")


class TestFirstToFail:
    def test_nobody(self) -> None:
        """Where all have returned, or were stopped, nobody failed by itself."""
        assert first_to_fail([End(0, "returned"), stopped(1)]) is None

    def test_earliest(self) -> None:
        """Of several that failed for reasons of their own, the earliest is first."""
        ends = [raised(0, 30), raised(1, 10), died(2, 20)]
        assert first_to_fail(ends) is ends[1]

    def test_same_moment(self) -> None:
        """At the same moment, the lower rank is first."""
        ends = [raised(1, 10), raised(0, 10)]
        assert first_to_fail(ends) is ends[1]

    def test_broken_transport_is_secondary(self) -> None:
        """A rank whose connection broke is not first, although its error was noted before its peer's death."""
        ends = [broken_transport(0, 10), died(1, 20)]
        assert first_to_fail(ends) is ends[1]

    def test_only_broken_transports(self) -> None:
        """Where every rank's connection broke, the earliest is first."""
        ends = [broken_transport(0, 20), broken_transport(1, 10)]
        assert first_to_fail(ends) is ends[1]

    @pytest.mark.parametrize(
        "end", [End(1, "exited", 20, exit=Exit(3 << 8, 0)), End(1, "skipped", 20, report=report())]
    )
    def test_ends_without_an_error_count(self, end: End) -> None:
        """A rank that left or skipped is first before one whose connection broke."""
        assert first_to_fail([broken_transport(0, 10), end]) is end

    def test_same_words_outside_a_collective(self) -> None:
        """An error of the user's own about a connection is the user's own."""
        ends = [raised(0, 10, "connection closed by peer"), died(1, 20)]
        assert first_to_fail(ends) is ends[0]

    def test_other_error_in_a_collective(self) -> None:
        """A collective that refuses its arguments has failed by itself."""
        ends = [raised(0, 10, "Invalid scalar type", in_collective=True), died(1, 20)]
        assert first_to_fail(ends) is ends[0]

    @pytest.mark.parametrize(
        "message",
        [
            CLOSED,
            "Connection reset by peer",
            "[gloo/transport/tcp/pair.cc] writev: Broken pipe",
            "Timed out waiting 1000ms for recv operation to complete",
            "NCCL error: remote process exited or there was a network error",
            "Socket Timeout",
        ],
    )
    def test_transport_messages(self, message: str) -> None:
        """These are what a peer's end looks like from the other side."""
        assert broken_transport(0, message=message).by_transport


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ([raised(0), stopped(1)], "failed"),
        ([End(0, "skipped", report=report()), stopped(1)], "failed"),
        ([died(0), broken_transport(1)], "crashed"),
        ([End(0, "exited", exit=Exit(0, 0)), stopped(1)], "crashed"),
        ([raised(0, 1), died(1, 2)], "failed"),
        ([raised(0, 2), died(1, 1)], "crashed"),
        ([stopped(0), stopped(1)], "hung"),
        ([End(0, "returned"), stopped(1)], "hung"),
    ],
    ids=["raised", "skipped", "died", "exited", "raised then died", "died then raised", "all stopped", "one returned"],
)
def test_verdict_of(ends: list[End], expected: str) -> None:
    """The verdict follows the first to fail; where nobody failed, the world hung."""
    assert verdict_of(ends) == expected


class TestWhat:
    @pytest.mark.parametrize(
        ("end", "expected"),
        [
            (End(0, "returned"), "returned"),
            (raised(0), "ValueError: boom"),
            (raised(0, message=""), "ValueError"),
            (raised(0, message="\n  first\nsecond"), "ValueError: first"),
            (raised(0, context="its result can't be sent"), "its result can't be sent: ValueError: boom"),
            (raised(0, type="SystemExit", exit_code=3), "called sys.exit(3)"),
            (raised(0, type="SystemExit"), "called sys.exit(None)"),
            (raised(0, type="Leave", exit_code="bye"), "called sys.exit('bye')"),
            (died(0), "killed by SIGKILL (by someone, or by the kernel for want of memory)"),
            (End(0, "exited", exit=Exit(7 << 8, 0)), "exited with code 7 before it had a result"),
            (stopped(0), "stopped by the harness while waiting in all_reduce(float32[4]) at test_x.py:7"),
            (raised(0, message="%s {0} {x}"), "ValueError: %s {0} {x}"),
        ],
    )
    def test_one_line(self, end: End, expected: str) -> None:
        """Each end is told in one line."""
        assert end.what == expected

    def test_skip(self) -> None:
        """A rank that skips by itself is told what to do instead."""
        end = End(0, "skipped", report=report("no GPU", skip=True))
        assert end.what == "skipped by itself (no GPU); decide about a skip before any rank starts"

    @pytest.mark.parametrize("kind", ["raised", "skipped"])
    def test_without_report(self, kind: str) -> None:
        """A failure of which nothing is known is not told as a success."""
        assert End(0, kind).what == kind


class TestGrouped:
    def test_equal_tracebacks(self) -> None:
        """Ranks that failed at the same place, with other values, are one group."""
        a, b, c = raised(0, message="1 != 2"), raised(1, message="3 != 4"), raised(2, frames=[["x.py", 9, "f"]])
        assert grouped([a, b, c]) == [[a, b], [c]]

    def test_other_type(self) -> None:
        """Another exception at the same place is another group."""
        assert len(grouped([raised(0), raised(1, type="KeyError")])) == 2

    def test_without_report(self) -> None:
        """Ranks without a traceback are each on their own."""
        assert len(grouped([died(0), died(1)])) == 2


class TestRanksFailed:
    def test_headline(self) -> None:
        """The headline names the first to fail, what it did, and the others that failed."""
        found = failure(broken_transport(0, 1), raised(1, 2), stopped(2)).headline
        assert found == "rank 1 of 3 failed first: ValueError: boom (also failed: 0)"

    def test_headline_of_a_deadlock(self) -> None:
        """A proven deadlock is told as one."""
        found = failure(stopped(0), stopped(1), explanation=Explanation("rank 0 waits"))
        assert (found.headline, found.verdict) == ("deadlock: rank 0 waits", "hung")

    def test_headline_of_a_timeout(self) -> None:
        """Without proof, the reason that was given is told."""
        assert failure(stopped(0), reason="not done after 60 s").headline == "not done after 60 s"

    def test_headline_without_anything(self) -> None:
        """A world that can't go on, nobody knows why, still has a headline."""
        assert failure(stopped(0)).headline == "no rank can go on"

    def test_roles(self) -> None:
        """The summary marks the first, and those that failed because of it."""
        lines = failure(broken_transport(0, 1), died(1, 2)).summary().splitlines()
        assert [line.split(": ")[1] for line in lines[2:]] == ["FIRST TO FAIL", "because of it"]

    def test_odd_one_out(self) -> None:
        """In a deadlock the summary marks whom the explanation blames."""
        text = failure(stopped(0), stopped(1), explanation=Explanation("x", (1,))).summary()
        assert "rank 1: ODD ONE OUT" in text

    def test_explanation_beside_a_failure(self) -> None:
        """Where a rank failed and the collectives differ, both are told."""
        assert "collective 3 differs" in failure(raised(0), explanation=Explanation("collective 3 differs")).summary()

    def test_equal_tracebacks_are_shown_once(self) -> None:
        """Equal tracebacks are shown once, with each rank's own values."""
        text = failure(raised(0, message="1 != 2"), raised(1, message="3 != 4")).render()
        assert (text.count("in body"), "rank 1: ValueError: 3 != 4" in text) == (2, True)

    def test_equal_stacks_are_shown_once(self) -> None:
        """Ranks that stood at the same place share a stack; one that stood elsewhere has its own."""
        ends = [
            End(i, "stopped", stack="test_x.py:9: in other" if i == 1 else "test_x.py:7: in body") for i in range(3)
        ]
        found = RanksFailed("3 ranks", "body", ends).sections()
        assert found == [
            ("where ranks 0, 2 (equal) stood", "test_x.py:7: in body"),
            ("where rank 1 stood", "test_x.py:9: in other"),
        ]

    def test_stack_of_a_crash_is_not_that_of_a_stop(self) -> None:
        """A rank that crashed where another was stopped is told apart from it."""
        ends = [End(0, "died", exit=KILLED, stack="x"), End(1, "stopped", stack="x")]
        titles = [title for title, _ in RanksFailed("2 ranks", "body", ends).sections()]
        assert titles == ["where rank 0 crashed", "where rank 1 stood"]

    def test_place(self) -> None:
        """The place is the user's innermost line in the first to fail."""
        frames = [
            ["/r/harness/worlds/rank.py", 1, "run"],
            ["/r/test_x.py", 3, "body"],
            [f"{TORCH}distributed/x.py", 9, "f"],
        ]
        assert failure(raised(0, frames=frames)).place == ("/r/test_x.py", 3)

    def test_no_place(self) -> None:
        """A rank that was killed before it said anything has no place."""
        assert failure(died(0)).place is None

    def test_output_is_shown(self) -> None:
        """Each rank's output is shown under its name; its end, where it is long."""
        text = failure(End(0, "died", exit=KILLED, output="x" * 100_000 + "\nlast words\n")).render()
        assert ("output of rank 0" in text, "last words" in text, len(text) < 10_000) == (True, True, True)

    def test_no_ranks(self) -> None:
        """A world without ranks makes no trouble here."""
        assert "no rank can go on" in failure().render()

    @pytest.mark.parametrize(
        "text",
        [
            "\x1b[2J\x1b]0;owned\x07",
            "x" * 1_000_000,
            "\ud800\udfff",
            "%s%d%",
            "{0}{x!r}{",
            "\x00",
            "\n" * 1000,
            "",
            "\u2028",
        ],
        ids=["ansi", "1 MB", "surrogates", "percent", "braces", "NUL", "newlines", "empty", "separator"],
    )
    def test_hostile_text(self, text: str) -> None:
        """Whatever ranks say, the report is written, names them all, and keeps the verdict."""
        ends = [
            raised(0, message=text, type=text or "E", text=text, context=text, frames=[[text, 1, text]]),
            End(1, "skipped", 5, report=report(text)),
            End(2, "stopped", standing=text, stack=text, frames=((text, 1, text),), collectives=(text,), output=text),
        ]
        found = RanksFailed(text, text, ends, Explanation(text), text)
        assert all(f"rank {i}: " in str(found) for i in range(3))

    @settings(deadline=None, max_examples=100)
    @given(st.text(), st.text(), st.integers(-(2**70), 2**70))
    def test_any_text(self, text: str, other: str, line: int) -> None:
        """Any text at all can be reported."""
        ends = [raised(0, message=text, text=other, frames=[[text, line, other]]), stopped(1)]
        assert "rank 1" in RanksFailed(other, text, ends).render()


CRASHES = """
import faulthandler, os, signal, sys, threading
def inner(): os.kill(os.getpid(), signal.SIGSEGV)
def outer(): inner()
faulthandler.enable(all_threads=True)
parked, started = threading.Event(), threading.Event()
def second():
    started.set()
    parked.wait()
if "threads" in sys.argv:
    threading.Thread(target=second, daemon=True).start()
    started.wait()
outer()
"""


def dump_of_a_crash(folder: Path, *arguments: str) -> str:
    script = folder / "crashes.py"
    script.write_text(CRASHES)
    command = [sys.executable, str(script), *arguments]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False).stderr


class TestCrashStack:
    def test_real_crash(self, tmp_path: Path) -> None:
        """A dump of faulthandler becomes a stack with the innermost frame last, under the signal's name."""
        lines = crash_stack(dump_of_a_crash(tmp_path)).splitlines()
        found = [lines[0], *(line.split(": ")[-1] for line in lines if line.startswith(str(tmp_path)))]
        assert found == ["Fatal Python error: Segmentation fault", "in <module>", "in outer", "in inner"]

    def test_real_crash_with_threads(self, tmp_path: Path) -> None:
        """With several threads, each has its name, and the crashed one is marked."""
        text = crash_stack(dump_of_a_crash(tmp_path, "threads"))
        assert ("Current thread 0x" in text, "in second" in text, "in inner" in text) == (True, True, True)

    def test_our_monitor_is_left_out(self) -> None:
        """Our own thread is no part of the story."""
        dump = (
            'Thread 0x01 (most recent call first):\n  File "/r/harness/worlds/monitor.py", line 3 in _serve\n'
            '  File "/lib/threading.py", line 1 in run\n\n'
            'Current thread 0x02 (most recent call first):\n  File "/t/x.py", line 4 in f\n'
        )
        assert "monitor" not in crash_stack(dump)

    @pytest.mark.parametrize(
        "dump",
        [
            "",
            "garbage",
            "\x00\xff\x1b[31m",
            "Fatal Python error: Segmentation fault\n",
            "Current thread 0x01 (most recent call first):\n  <no Python frame>\n",
            '  File "x.py", line 3 in f\n',
            "x" * 1_000_000,
        ],
        ids=lambda dump: ascii(dump[:40]),
    )
    def test_not_understood(self, dump: str) -> None:
        """What is not understood is given back as it is."""
        assert crash_stack(dump) == dump

    @pytest.mark.parametrize(
        "frame",
        [
            '"a\x00b", line 1 in f',
            '"\ud800", line 1 in f',
            '"x", line 999999999 in f',
            '"/proc/self/mem", line 1 in f',
            '"", line 0 in ',
        ],
        ids=ascii,
    )
    def test_hostile_frame(self, frame: str) -> None:
        """A file that can't be read or named costs the source line and nothing else."""
        found = crash_stack(f"Current thread 0x01 (most recent call first):\n  File {frame}\n")
        assert found.startswith(frame[1 : frame.index('", line')])

    def test_torn_dump(self) -> None:
        """A dump cut off anywhere gives some text."""
        dump = 'Fatal\n\nCurrent thread 0x01 (most recent call first):\n  File "x.py", line 3 in f\n'
        assert all(crash_stack(dump[:i]) for i in range(1, len(dump)))

    def test_absurd_line_number(self) -> None:
        """A line number of ten thousand digits is no line number."""
        dump = 'Thread 0x01 (most recent call first):\n  File "x.py", line ' + "9" * 10_000 + " in f\n"
        assert crash_stack(dump) == dump

    @settings(deadline=None, max_examples=150)
    @given(st.text(), st.text(), st.text())
    def test_any_text(self, before: str, file: str, function: str) -> None:
        """Whatever is in a dump, it becomes a text."""
        crash_stack(f'{before}\nThread 0x1 (most recent call first):\n  File "{file}", line 7 in {function}\n{before}')


class TestStackText:
    def test_from_the_users_function(self) -> None:
        """A stack begins with the user's function, not with our loop."""
        frames = [("<string>", 1, "<module>"), ("/r/harness/worlds/rank.py", 5, "run"), ("/t/x.py", 4, "body")]
        assert stack_text(frames) == "/t/x.py:4: in body"

    def test_generated_code(self) -> None:
        """Code that was generated in between (a dataclass's __init__) does not cut the stack."""
        frames = [("/r/harness/worlds/rank.py", 5, "run"), ("/t/x.py", 4, "body"), ("<string>", 3, "__init__")]
        assert stack_text(frames) == "/t/x.py:4: in body\n<string>:3: in __init__"

    def test_only_ours(self) -> None:
        """A rank in our own loop shows where in it."""
        assert stack_text([("/r/harness/worlds/rank.py", 5, "run")]) == "/r/harness/worlds/rank.py:5: in run"

    def test_empty(self) -> None:
        """No frames, no text."""
        assert stack_text([], "x()") == ""

    def test_source(self) -> None:
        """Where the source can be read, its line is shown, and the call in it if that says more."""
        line = sys._getframe().f_lineno
        found = stack_text([(__file__, line, "f")], "other()")
        assert found.splitlines()[1:] == ["    line = sys._getframe().f_lineno", "    -> other()"]


def issued(number: int, op: str, tensors: str = "float32[4]", group: str = "0") -> Issued:
    return Issued(number, number, op, tensors, group, f"x.py:{number}")


class TestCompareIssued:
    def test_equal(self) -> None:
        """Ranks that issued the same differ in nothing."""
        calls = [issued(1, "all_reduce"), issued(2, "barrier", "")]
        assert compare_issued({0: calls, 1: calls}) == ""

    def test_different_lengths(self) -> None:
        """A rank that got less far is no difference."""
        calls = [issued(1, "all_reduce"), issued(2, "barrier", "")]
        assert compare_issued({0: calls, 1: calls[:1], 2: []}) == ""

    @pytest.mark.parametrize("odd", [issued(2, "broadcast"), issued(2, "all_reduce", "float32[5]")])
    def test_first_difference(self, odd: Issued) -> None:
        """The first difference is told, with who issued what and where."""
        calls = [issued(1, "all_reduce"), issued(2, "all_reduce"), issued(3, "all_reduce")]
        found = compare_issued({0: calls, 1: calls, 2: [calls[0], odd]})
        expected = (
            "collective 2 of the default group differs: ranks 0, 1 issued all_reduce(float32[4]) at x.py:2, "
            f"rank 2 issued {odd.op}({odd.tensors}) at x.py:2"
        )
        assert found == expected

    def test_each_group_for_itself(self) -> None:
        """Collectives of different groups may come in any order."""
        a, b = issued(1, "all_reduce", group="a"), issued(2, "barrier", "", group="b")
        assert compare_issued({0: [a, b], 1: [b, a]}) == ""

    def test_group_of_some(self) -> None:
        """A rank that is in no group with the others is not compared."""
        assert compare_issued({0: [issued(1, "all_reduce", group="a")], 1: [issued(1, "barrier", group="b")]}) == ""

    @pytest.mark.parametrize("ops", [("send", "recv"), ("scatter", "scatter"), ("recv(any source)", "send")])
    def test_operations_with_sides(self, ops: tuple[str, str]) -> None:
        """Where ranks have different parts to play, other tensors and operations are no difference."""
        assert compare_issued({0: [issued(1, ops[0])], 1: [issued(1, ops[1], "float32[9]")]}) == ""

    def test_nothing(self) -> None:
        """No calls, no difference."""
        assert compare_issued({}) == ""


class TestDescribeCollectives:
    def test_from_the_flight_recorder(self) -> None:
        """A record says whether it is done, and where it was issued if we noted that."""
        records = [
            Record("0", 1, "all_reduce", ((4,),), ("Float",), done=True, time_ns=2),
            Record("0", 1, "send", p2p=True),
        ]
        assert describe_collectives(records, [issued(1, "all_reduce")]) == (
            "all_reduce(float32[4]) #1 on group 0: ended at x.py:1",
            "send() p2p #1 on group 0: NOT DONE",
        )

    def test_from_our_own_record(self) -> None:
        """Without a Flight Recorder, what we noted ourselves is told."""
        assert describe_collectives(None, [issued(1, "barrier", "")]) == ("barrier() on group 0 at x.py:1",)

    def test_the_last_few(self) -> None:
        """Of many, the last are told, oldest first."""
        found = describe_collectives([], [issued(i, f"op{i}") for i in range(20)], most=2)
        assert [line.split("(")[0] for line in found] == ["op18", "op19"]
