"""What a rank says about its own failure: always something, and always plain data."""

from __future__ import annotations

import enum
import json
import pickle
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch

from harness.worlds.evidence import describe_exception, is_collective_frame
from harness.worlds.places import TORCH

KEYS = {
    "type",
    "message",
    "text",
    "context",
    "frames",
    "in_collective",
    "skip",
    "out_of_memory",
    "exit_code",
    "time_ns",
}


class Code(enum.IntEnum):
    BAD = 5


class BrokenStrError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class BrokenEverythingError(Exception):
    def __str__(self) -> NoReturn:
        raise SystemExit(3)

    __repr__ = __str__


class UnpicklableError(Exception):
    def __init__(self) -> None:
        super().__init__(threading.Lock())
        self.lock = threading.Lock()


def caught(fail: Callable[[], Any]) -> BaseException:
    try:
        fail()
    except BaseException as e:
        return e
    raise AssertionError("it did not fail")


def throw(error: BaseException) -> Callable[[], NoReturn]:
    def fail() -> NoReturn:
        raise error

    return fail


def described(fail: Callable[[], Any], **options: Any) -> dict[str, Any]:
    report = describe_exception(caught(fail), **options)
    assert set(report) == KEYS
    assert pickle.loads(pickle.dumps(report)) == report
    json.dumps(report)
    return report


def test_type_and_message() -> None:
    """An exception has the name of its class and its text."""
    report = described(throw(ValueError("boom")))
    assert (report["type"], report["message"]) == ("ValueError", "boom")


def test_qualified_name() -> None:
    """A class that is not built in has its module's name before it."""
    assert described(throw(BrokenStrError()))["type"] == f"{__name__}.BrokenStrError"


def test_frames() -> None:
    """Frames are the user's, outermost first, with line numbers."""
    frames = described(throw(ValueError("boom")))["frames"]
    assert [(file, name) for file, _, name in frames] == [(__file__, "caught"), (__file__, "fail")]


def test_traceback() -> None:
    """The text shows the line that raised, as pytest does."""
    text = described(throw(ValueError("boom")))["text"]
    assert ("raise error" in text, "ValueError: boom" in text) == (True, True)


def test_locals() -> None:
    """Where locals are asked for, they are shown."""

    def fail() -> None:
        answer = 42
        raise ValueError(answer - 42)

    assert "answer     = 42" in described(fail, show_locals=True)["text"]


@pytest.mark.parametrize("style", ["short", "long", "native", "auto", "nonsense"])
def test_styles(style: str) -> None:
    """Each of pytest's styles gives a text, and so does one that is none."""
    assert "boom" in described(throw(ValueError("boom")), style=style)["text"]


def test_context() -> None:
    """What the rank was doing is passed on."""
    assert described(throw(ValueError()), context="reading")["context"] == "reading"


def test_never_raised() -> None:
    """An exception without a traceback can be described as well."""
    report = describe_exception(ValueError("boom"))
    assert (report["message"], report["frames"]) == ("boom", [])


@pytest.mark.parametrize(
    ("code", "expected"),
    [(None, None), (0, 0), (3, 3), (True, 1), ("bye", "bye"), (Code.BAD, 5), ([1], "[1]")],
    ids=repr,
)
def test_exit_code(code: Any, expected: Any) -> None:
    """A SystemExit has its code, as a plain number or text."""
    report = described(throw(SystemExit(code)))
    assert (report["exit_code"], type(report["exit_code"])) == (expected, type(expected))


def test_exit_code_without_text() -> None:
    """A SystemExit whose code has no text still has its traceback."""
    report = described(throw(SystemExit(BrokenStrError())))
    assert (report["exit_code"], report["frames"] != []) == ("a BrokenStrError", True)


def test_other_exceptions_have_no_exit_code() -> None:
    """Only a SystemExit has an exit code."""
    assert described(throw(ValueError(3)))["exit_code"] is None


def test_broken_str() -> None:
    """An exception whose text can't be had says so, and still has its frames."""
    report = described(throw(BrokenStrError()))
    assert (report["message"], len(report["frames"])) == ("(its message could not be read: RuntimeError)", 2)


def test_str_that_exits() -> None:
    """An exception whose text tries to end the process does not."""
    report = described(throw(BrokenEverythingError()))
    assert (report["type"], "SystemExit" in report["message"]) == (f"{__name__}.BrokenEverythingError", True)


def test_broken_repr_of_a_local() -> None:
    """A local variable that can't be shown costs itself only."""

    def fail() -> None:
        broken = BrokenEverythingError()
        raise ValueError("boom", type(broken).__name__)

    assert "boom" in described(fail, show_locals=True)["message"]


def test_unpicklable() -> None:
    """An exception that can't be pickled is described like any other."""
    assert "lock" in described(throw(UnpicklableError()))["message"]


def test_chained() -> None:
    """The cause of an exception is in its text."""

    def fail() -> None:
        try:
            raise KeyError("first")
        except KeyError as e:
            raise ValueError("second") from e

    text = described(fail)["text"]
    assert ("first" in text, "second" in text) == (True, True)


def test_chained_in_a_circle() -> None:
    """Exceptions that are each other's context come to an end."""
    one, other = ValueError("one"), ValueError("other")
    one.__context__, other.__context__ = other, one
    assert "one" in described(throw(one))["text"]


def test_group() -> None:
    """An exception group shows its members."""
    text = described(throw(ExceptionGroup("several", [ValueError("one"), KeyError("two")])))["text"]
    assert ("one" in text, "two" in text) == (True, True)


def test_notes() -> None:
    """A note on an exception is in its text."""
    error = ValueError("boom")
    error.add_note("look here")
    assert "look here" in described(throw(error))["text"]


def test_recursion() -> None:
    """An endless recursion gives a text that has an end."""

    def again() -> None:
        again()

    report = described(again)
    assert (report["type"], len(report["text"]) <= 100_000) == ("RecursionError", True)


def test_deep_recursion_with_locals() -> None:
    """Locals on every one of a thousand frames don't make the text endless."""

    def again(ballast: str) -> None:
        again(ballast + "x")

    assert len(described(lambda: again("x" * 1000), show_locals=True, style="long")["text"]) <= 100_000


def test_huge_message() -> None:
    """A message of a megabyte is cut."""
    report = described(throw(ValueError("x" * 1_000_000)))
    assert (len(report["message"]), len(report["text"])) == (2000, 100_000)


@pytest.mark.parametrize("text", ["\x1b[31m", "\ud800", "\x00", "%s {0}"], ids=ascii)
def test_hostile_message(text: str) -> None:
    """A message is passed on as it is, whatever is in it."""
    assert described(throw(ValueError(text)))["message"] == text


def test_no_memory() -> None:
    """Out of memory, an exception is still named."""

    class HungryError(Exception):
        def __str__(self) -> str:
            raise MemoryError

    report = described(throw(HungryError()))
    assert (report["message"], report["type"].endswith("HungryError")) == ("out of memory", True)


@pytest.mark.parametrize(
    ("fail", "expected"),
    [
        (lambda: pytest.skip("not here"), True),
        (lambda: pytest.fail("bad"), False),
        (throw(ValueError()), False),
        (throw(KeyboardInterrupt()), False),
    ],
    ids=["skip", "fail", "error", "interrupt"],
)
def test_skip(fail: Callable[[], Any], expected: bool) -> None:
    """A skip of pytest's is told apart from failures."""
    assert described(fail)["skip"] == expected


def test_class_called_skipped() -> None:
    """A class that is only called like pytest's is none of pytest's."""
    assert not described(throw(type("Skipped", (Exception,), {})()))["skip"]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (torch.OutOfMemoryError, True),
        (type("OfVendor", (torch.OutOfMemoryError,), {}), True),
        (type("OutOfMemoryError", (RuntimeError,), {}), False),
        (MemoryError, False),
    ],
    ids=["torch", "vendor", "same name", "host"],
)
def test_out_of_memory(kind: type[Exception], expected: bool) -> None:
    """An error of torch's class for a device without memory is marked as one, whatever its message."""
    assert described(throw(kind("out of memory")))["out_of_memory"] == expected


def test_in_collective() -> None:
    """An error that comes out of torch.distributed is marked as one."""
    code = compile("def fail(): raise RuntimeError('closed')", f"{TORCH}distributed/distributed_c10d.py", "exec")
    names: dict[str, Any] = {}
    exec(code, names)
    assert described(names["fail"])["in_collective"]


def test_not_in_collective() -> None:
    """An error of the user's own is not."""
    assert not described(throw(RuntimeError("Connection closed by peer")))["in_collective"]


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        (f"{TORCH}distributed/fsdp/api.py", True),
        (f"{TORCH}autograd/graph.py", True),
        (f"{TORCH}autograd/function.py", False),
        ("/repo/distributed/x.py", False),
        ("", False),
    ],
)
def test_is_collective_frame(file: str, expected: bool) -> None:
    """Collectives are issued or waited for in torch.distributed and in the autograd engine."""
    assert is_collective_frame(file) == expected
