"""What ranks say, whatever it is: an answer that is as it should be, or one clear error."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from harness.worlds import answers, postmortem, unpickling, watchdog, wire
from harness.worlds.blackbox import SIZE, BlackBox, fixed_file
from harness.worlds.evidence import describe_exception
from harness.worlds.local import LocalLauncher
from harness.worlds.local_rank import LocalRank
from harness.worlds.postmortem import End, RanksFailed
from harness.worlds.views import view_of

REPORT = describe_exception(ValueError("boom"))
ANSWERS = [
    answers.frame(answers.Ready(0, 7)),
    answers.returned(3, b"", []),
    answers.returned(3, *wire.pickled([1, "two"])),
    answers.returned(3, *wire.pickled(torch.ones(3))),
    answers.returned(3, b"", [], {"all_reduce": 2}, 3),
    answers.raised(3, REPORT),
    answers.checked(4, ["a thread"]),
    answers.frame(answers.Debug(1)),
]
TYPES = (answers.Ready, answers.Returned, answers.Raised, answers.Checked, answers.Debug, answers.Debugged)


def read_all(data: bytes) -> list[Any]:
    """Everything that can be read of some bytes, and at the end why the rest can't be."""
    ours, theirs = socket.socketpair()
    found = []
    with ours, theirs:
        ours.setblocking(False)
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        theirs.sendall(data)
        reader = wire.FrameReader(ours)
        try:
            while (frame := reader.read()) is not None:
                found.append(answers.read(frame)[0])
        except (wire.NotAFrame, answers.NotAnAnswer) as e:
            found.append(str(e))
    return found


@pytest.mark.parametrize("parts", ANSWERS, ids=range(len(ANSWERS)))
def test_every_answer_arrives(parts: list[bytes]) -> None:
    """An answer is read back as it was sent."""
    (found,) = read_all(b"".join(parts))
    assert answers.frame(found)[1] == parts[1]


def test_report_of_any_size_is_cut() -> None:
    """Whatever an exception's report holds, what is sent of it is what the controller takes."""
    endless = {
        **REPORT,
        "type": "\ud800" * 5000,
        "message": "\U0001f525" * 10_000,
        "text": "\udfff" * 300_000,
        "frames": [("f" * 9000 + str(i), i, "g" * 9000) for i in range(1000)],
        "exit_code": 10**4000,
    }
    (found,) = read_all(b"".join(answers.raised(1, endless)))
    assert isinstance(found, answers.Raised)
    assert (len(found.report.frames), len(found.report.text)) == (300 // 3 * 2, 100_000)
    assert found.report.frames[-1][1] == 999


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"text": "x" * 100_001}, "length <= 100000"),
        ({"frames": [("f", -1, "g")]}, ">= 0"),
        ({"frames": [("f", "1", "g")]}, "Expected `int`"),
        ({"frames": [["f", 1, "g", 4]]}, "length 3"),
        ({"message": None}, "Expected `str`"),
        ({"time_ns": -1}, ">= 0"),
        ({"more": 1}, "unknown field"),
        ({"skip": 1}, "Expected `bool`"),
    ],
    ids=str,
)
def test_report_that_is_none(change: dict[str, Any], why: str) -> None:
    """A report with another type, length or range is refused with the place."""
    body = msgspec.msgpack.encode({"type": "raised", "job": 1, "report": {**REPORT, **change}})
    with pytest.raises(answers.NotAnAnswer, match=why):
        answers.read((body, []))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"issued": {"all_reduce": -1}}, ">= 0"),
        ({"issued": {str(number): 1 for number in range(101)}}, "length <= 100"),
        ({"issued": {"x" * 1001: 1}}, "length <= 1000"),
        ({"on_groups": 1 << 41}, "<= 1099511627776"),
        ({"on_groups": "many"}, "Expected `int`"),
    ],
    ids=["negative", "too many", "too long", "too large", "no number"],
)
def test_counts_that_are_none(change: dict[str, Any], why: str) -> None:
    """Counts of collectives are bounded, whatever a rank sends."""
    body = msgspec.msgpack.encode({"type": "returned", "job": 1, "pickled": b"", **change})
    with pytest.raises(answers.NotAnAnswer, match=why):
        answers.read((body, []))


def check_frames(data: st.DataObject) -> None:
    whole = b"".join(b"".join(data.draw(st.sampled_from(ANSWERS))) for _ in range(data.draw(st.integers(0, 3))))
    changed = bytearray(whole + data.draw(st.binary(max_size=64)))
    for _ in range(data.draw(st.integers(0, 6))):
        if changed:
            at = data.draw(st.integers(0, len(changed) - 1))
            changed[at : at + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=9))
    for answer in read_all(bytes(changed)):
        assert isinstance(answer, TYPES) or 0 < len(answer) < 1000


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_any_frames(data: st.DataObject) -> None:
    """Frames of which some bytes are others are answers or an error, and nothing else."""
    check_frames(data)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@settings(deadline=None, max_examples=20_000, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_frames_for_long(data: st.DataObject) -> None:
    """As above, with more of them."""
    check_frames(data)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
THREAD = st.fixed_dictionaries(
    {},
    optional={
        "name": JSON,
        "native": JSON,
        "main": JSON,
        "called": JSON,
        "timeout": JSON,
        "frames": st.lists(st.tuples(st.text(max_size=9), st.integers(), st.text(max_size=9)), max_size=3) | JSON,
    },
)
RECORD = st.fixed_dictionaries(
    dict.fromkeys(("group", "op", "done", "p2p"), JSON),
    optional={
        "seq": st.integers() | JSON,
        "sizes": st.lists(st.lists(st.integers(), max_size=3), max_size=2) | JSON,
        "dtypes": JSON,
        "timeout_s": st.floats() | JSON,
        "time_ns": st.integers() | JSON,
    },
)
SNAPSHOT = st.fixed_dictionaries(
    {},
    optional={
        "threads": st.lists(THREAD, max_size=3) | JSON,
        "records": st.lists(RECORD, max_size=4) | JSON,
        "groups": st.dictionaries(st.text(max_size=3), st.lists(st.integers(-2, 5), max_size=4), max_size=3) | JSON,
    },
)


def check_snapshots(found: list[Any]) -> None:
    """What is made of ranks' snapshots ends in time, without an error, with a text that can be shown."""
    texts = [json.dumps(each) for each in found]
    views = [view_of(i, json.loads(text), quiet=True, stopped=False, alarm_of={}) for i, text in enumerate(texts)]
    watchdog.deadlocked(views, 60.0)
    watchdog.progress(views)
    explanation = watchdog.explain(views)
    watchdog.suspect(views)
    ends = [
        End(
            view.index,
            "stopped",
            standing=watchdog.standing(view),
            stack=postmortem.stack_text(view.frames, view.called),
            frames=view.frames,
            collectives=postmortem.describe_collectives(view.records, ()),
        )
        for view in views
    ]
    error = RanksFailed("2 ranks", "f", ends, explanation, "")
    assert all(c in "\n\t" or c.isprintable() or c.isspace() for c in f"{error}{error.headline}")
    assert error.place is None or isinstance(error.place[1], int)


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(SNAPSHOT, min_size=1, max_size=3))
def test_any_snapshots(found: list[Any]) -> None:
    """Whatever monitors say, what is said of it is text."""
    check_snapshots(found)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@settings(deadline=None, max_examples=20_000, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(SNAPSHOT, min_size=1, max_size=3))
def test_any_snapshots_for_long(found: list[Any]) -> None:
    """As above, with more of them."""
    check_snapshots(found)


@pytest.mark.parametrize("what", ["threads", "records", "groups"])
def test_more_than_a_monitor_tells(what: str) -> None:
    """Lists that are longer than any monitor's are not gone through."""
    found: dict[str, Any] = {"threads": [], "records": [], "groups": {}}
    found[what] = {str(i): [] for i in range(100_000)} if what == "groups" else [{}] * 100_000
    assert not view_of(0, found, quiet=True, stopped=False, alarm_of={}).answered


@pytest.fixture
def process() -> Iterator[tuple[LocalRank, int]]:
    """A rank's process without one, and its crash file."""
    control, theirs = socket.socketpair()
    monitor, its = socket.socketpair()
    box, crash = BlackBox.create("test"), fixed_file("test", 1 << 20)
    out, closed = os.pipe()
    os.close(closed)
    found = LocalRank(0, 1, control, monitor, out, BlackBox(box), crash)
    os.close(box)
    with theirs, its:
        yield found, crash
        found.close()


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.binary(max_size=200) | st.sampled_from([b'  File "', b'", line ', b" in f\n", b"Thread 0x1"])))
def test_any_crash_text(process: tuple[LocalRank, int], parts: list[bytes]) -> None:
    """Whatever is in a crash file, it is read up to its first zero, and shown as text."""
    rank, crash = process
    data = b"".join(parts) + b"\0"
    os.pwrite(crash, data, 0)
    rank._crash_read = 0
    text = rank.crash_text()
    assert text == data.split(b"\0")[0].decode(errors="replace")
    assert isinstance(postmortem.crash_stack(text), str)


def test_long_crash_text() -> None:
    """A crash file full of frames is shown in part."""
    shown = postmortem.crash_stack("Thread 0x1 (most recent call first):\n" + '  File "x", line 1 in f\n' * 50_000)
    assert (len(shown) < 50_000, "line 1" in shown or "x:1" in shown) == (True, True)


def test_black_box_that_can_change_its_size_is_refused() -> None:
    """Nothing is mapped that could be cut short: reading it would end the process."""
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, SIZE)
    with pytest.raises(ValueError, match="fixed size"):
        BlackBox(fd)
    os.close(fd)


@pytest.mark.parametrize("texts", ["\x1b[2J\x1b[31m", "\u202eevil", "\x9b\x07\x08", "\ud800\x00"], ids=ascii)
def test_nothing_that_ranks_say_drives_a_terminal(texts: str) -> None:
    """A failure's texts have escapes in the place of what is not seen, wherever it comes from."""
    report = {**REPORT, "message": texts, "text": texts, "type": texts, "context": texts}
    ends = [
        End(0, "raised", report=report, stack=texts, collectives=(texts,), output=texts),
        End(1, "stopped", standing=texts),
    ]
    error = RanksFailed(texts, texts, ends, watchdog.Explanation(texts), texts)
    found = "".join([str(error), error.headline, error.ends[0].output, *error.ends[0].collectives])
    assert set(texts) - {"[", "2", "J", "3", "1", "m", *"evil"} & set(found) == set()
    assert ascii(texts)[1:-1].split("[")[0] in found


def plain_of(value: Any) -> Any:
    return unpickling.plain(*wire.pickled(value))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "value",
    [
        None,
        [1, 2.5, "x", b"y", {"a": (1,)}, {1, 2}, frozenset([3]), 1 + 2j, bytearray(b"z")],
        torch.float32,
        torch.channels_last,
        torch.Size([1, 2]),
        {"w": torch.ones(2, requires_grad=True), "b": torch.zeros(0, dtype=torch.bfloat16)},
        torch.nn.Parameter(torch.ones(1)),
        watchdog.Explanation("x"),
        End(0, "returned"),
    ],
    ids=lambda v: type(v).__name__,
)
def test_plain_data(value: Any) -> None:
    """Data, tensors and Concord's own classes are read in place."""
    assert type(plain_of(value)) is type(value)


class Calls:
    def __init__(self, *what: Any) -> None:
        self.what = what

    def __reduce__(self) -> Any:
        return self.what[0], self.what[1:]


@pytest.mark.parametrize(
    "what",
    [
        *((eval, "1"), (time.sleep, 0), (sys.exit,), (print, ""), (getattr, 1, "real"), (torch.load, "x")),
        (collections.deque, range(10**18), 0),  # never ends, in C
        (LocalLauncher,),
    ],
    ids=lambda what: what[0].__name__,
)
def test_anything_else_is_not_plain(what: tuple[Callable[..., Any], ...]) -> None:
    """A pickle that calls something else is refused before it has called it."""
    with pytest.raises(unpickling.NotPlain):
        plain_of(Calls(*what))


@pytest.mark.parametrize("name", ["CodeType", "FunctionType"])
def test_what_our_modules_import_is_not_plain(name: str) -> None:
    """A class that a module of Concord's has imported is none of its own: with these two a pickle builds code."""
    with pytest.raises(unpickling.NotPlain):
        unpickling.plain(b"\x80\x04charness.worlds.shipping\n" + name.encode() + b"\n.", [])


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_any_plain_pickle(data: st.DataObject) -> None:
    """A pickle of which some bytes are others is read, refused, or an error; it never calls what is not data."""
    body, _ = wire.pickled([1, "two", {"nine": 4.0}, (5, b"six"), Calls(os.umask, 0o123)])
    before = os.umask(0o22)
    changed = bytearray(body)
    for _ in range(data.draw(st.integers(0, 4))):
        at = data.draw(st.integers(0, len(changed) - 1))
        changed[at : at + 1] = data.draw(st.binary(max_size=3))
    assume(b"r" not in changed)  # puts something at any index of the memo, and Python makes room for all below it
    with contextlib.suppress(Exception):
        unpickling.plain(bytes(changed), [])
    assert os.umask(before) == 0o22


def test_header_alone_takes_nothing() -> None:
    """A frame that is announced and does not come is said to have begun, and is nothing else."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        reader = wire.FrameReader(ours)
        theirs.sendall(b"cncd" + struct.pack("!IQ", 0, 1000) + b"12")
        assert (reader.read(), reader.begun) == (None, "18 bytes of an answer of 1,000 bytes")
        theirs.sendall(b"x" * 998)
        assert (reader.read(), reader.begun) == ((b"12" + b"x" * 998, []), "")
