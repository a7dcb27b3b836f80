"""Our own record of collectives: what is noted of a call."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import pytest
import torch

from harness.worlds import recorder
from harness.worlds.places import TORCH
from harness.worlds.recorder import caller, describe


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((torch.zeros(4),), "float32[4]"),
        ((torch.zeros((), dtype=torch.bool),), "bool[]"),
        (([torch.zeros(4), torch.zeros(2)],), "float32[4] x2"),
        (([[torch.zeros(2, 3)], [torch.zeros(4)]],), "float32[2, 3]"),
        ((torch.zeros(2), torch.zeros(3, dtype=torch.int64)), "float32[2] x2"),
        (([], torch.zeros(1)), "float32[1]"),
        (("text", 3, None), ""),
        ((), ""),
        (None, ""),
        (torch.zeros(0, 2), "float32[0, 2]"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_describe(arguments: Any, expected: str) -> None:
    """A call is described by its first tensor, and how many there are beside it."""
    assert describe(arguments) == expected


def test_describe_list_in_itself() -> None:
    """A list that holds itself comes to an end."""
    endless: list[Any] = []
    endless.append(endless)
    assert describe((endless,)) == ""


def test_caller() -> None:
    """The caller is the innermost line outside torch and outside the recorder."""
    names: dict[str, Any] = {"caller": caller}
    exec(compile("def all_reduce(): return caller()", f"{TORCH}distributed/distributed_c10d.py", "exec"), names)
    assert names["all_reduce"]().rsplit(":", 1)[0] == __file__


class FakeGroup:
    group_name = "0"

    def allreduce(self, tensors: Any) -> str:
        return "work"


class FakeBox:
    def __init__(self) -> None:
        self.written: list[tuple[str, ...]] = []

    def entry(self, *texts: str) -> tuple[str, ...]:
        return texts

    def write(self, entry: tuple[str, ...]) -> int:
        self.written.append(entry)
        return time.monotonic_ns()


class FullBox(FakeBox):
    def write(self, entry: tuple[str, ...]) -> int:
        raise ValueError("no room")


def test_recorded_call() -> None:
    """A recorded method notes the call and does what it did before."""
    box = FakeBox()
    method = recorder._recorded(FakeGroup.allreduce, "all_reduce", box)  # type: ignore[arg-type]
    assert method(FakeGroup(), [torch.zeros(3)]) == "work"
    assert [texts[:3] for texts in box.written] == [("all_reduce", "float32[3]", "0")]


def test_record_that_fails() -> None:
    """A record that can't be made is no reason for the collective to fail."""
    method = recorder._recorded(FakeGroup.allreduce, "all_reduce", FullBox())  # type: ignore[arg-type]
    assert method(FakeGroup(), [torch.zeros(3)]) == "work"


def test_keyword_arguments() -> None:
    """Tensors that are given by name are seen as well."""
    box = FakeBox()
    method = recorder._recorded(FakeGroup.allreduce, "all_reduce", box)  # type: ignore[arg-type]
    method(FakeGroup(), tensors=[torch.zeros(3)])
    assert box.written[0][1] == "float32[3]"


def test_calls_that_differ() -> None:
    """Calls from one line are told apart by what they are given; equal ones are noted each time."""
    box = FakeBox()
    method = recorder._recorded(FakeGroup.allreduce, "all_reduce", box)  # type: ignore[arg-type]
    for tensor in (torch.zeros(3), torch.zeros(3), torch.zeros(4), torch.zeros(3, dtype=torch.int8)):
        method(FakeGroup(), [tensor])
    assert [texts[1] for texts in box.written] == ["float32[3]", "float32[3]", "float32[4]", "int8[3]"]


def test_issuing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread sees which collective a rank is in the middle of issuing."""
    entered, leave = threading.Event(), threading.Event()

    class Connecting(FakeGroup):
        def allreduce(self, tensors: Any) -> str:
            entered.set()
            leave.wait(30)
            return "work"

    box, before = FakeBox(), time.monotonic_ns()
    monkeypatch.setattr(Connecting, "allreduce", recorder._recorded(Connecting.allreduce, "all_reduce", box))  # type: ignore[arg-type]
    thread = threading.Thread(target=lambda: Connecting().allreduce([torch.zeros(2, 3)]), name="rank")
    thread.start()
    entered.wait(30)
    frames, frame = [], sys._current_frames()[thread.ident or 0]
    while frame is not None:
        frames.append(recorder.issuing(frame))
        frame = frame.f_back
    leave.set()
    thread.join()
    (found,) = [each for each in frames if each]
    assert before < found.pop("time_ns") < time.monotonic_ns()
    assert found == {"group": "0", "op": "all_reduce", "sizes": [[2, 3]], "dtypes": ["float32"], "p2p": False}
