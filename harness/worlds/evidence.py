"""A rank's report of its own failure, as plain data that survives the trip to the controller."""

from __future__ import annotations

import functools
import io
import os
import sys
import time
import traceback
from types import TracebackType
from typing import Any

from harness.worlds import exceptions
from harness.worlds.bounded_calls import TooLongError, within
from harness.worlds.places import DISTRIBUTED, TORCH

_HERE = os.path.dirname(__file__) + os.sep
_AUTOGRAD_ENGINE = os.path.join(TORCH, "autograd", "graph.py")
_MOST_TEXT = 100_000
_MOST_FRAMES = 300
_PATIENCE, _PATIENCE_AGAIN = 5.0, 1.0  # seconds for a report, enough for a busy machine
_SKIPS = {("builtins", "Skipped"), ("_pytest.outcomes", "Skipped"), ("unittest.case", "SkipTest")}
"""pytest gives its own class the module ``builtins``, so that users see a short name."""


def describe_exception(
    error: BaseException, *, context: str = "", style: str = "short", show_locals: bool = False
) -> dict[str, Any]:
    """Describe an exception as a dict of strings and numbers.

    The keys are: ``type``: its qualified name; ``message``: the beginning of its message; ``text``: the traceback as
    pytest shows it, without our own frames; ``frames``: (file, line, function) of the user's part, outermost first,
    without the middle if it is long; ``in_collective``: whether it was raised in torch.distributed or in the autograd
    engine; ``skip``: whether it is a skip; ``out_of_memory``: whether it says that a device has no memory left;
    ``exit_code``: of a SystemExit; ``time_ns``: now, on the monotonic clock; ``context``: as given.

    Takes a few seconds at most and returns a text of bounded length, whatever the exception is and whatever its
    ``__str__`` does.  Works even when there is no memory left, with less in the report.
    """
    now = time.monotonic_ns()
    name = name_of(type(error))
    report: dict[str, Any] = {
        "type": name,
        "message": "",
        "text": "",
        "context": context,
        "frames": [],
        "in_collective": False,
        "skip": (type(error).__module__, type(error).__qualname__) in _SKIPS,
        "out_of_memory": _is_out_of_memory(error),
        "exit_code": None,
        "time_ns": now,
    }
    try:
        tb = _without_our_frames(error.__traceback__)
        frames = exceptions.frames_of(tb)
        report["frames"] = exceptions.both_ends(frames, _MOST_FRAMES)
        report["in_collective"] = bool(frames) and is_collective_frame(frames[-1][0])
        report |= within(_PATIENCE, functools.partial(_told, error, tb, style, show_locals))
    except TooLongError as e:  # __str__ and __repr__ are the user's code, which may never return
        report["message"], report["text"] = _told_shortly(error, tb, e)
    except MemoryError:
        error.__traceback__ = None  # frees what the frames hold
        report["text"] = report["message"] = "out of memory"
    except BaseException as e:  # the user's code may also raise anything
        report["text"] = f"{name} (its traceback could not be formatted: {name_of(type(e))})"
    return report


def name_of(kind: type) -> str:
    """Return the qualified name of a class, whatever its metaclass says.  Builtins are named without their module."""
    module, name = _MODULE.__get__(kind), _QUALNAME.__get__(kind)
    return str(name) if module == "builtins" or not isinstance(module, str) else f"{module}.{name}"


_MODULE, _QUALNAME = type.__dict__["__module__"], type.__dict__["__qualname__"]


def _is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception is torch's own for a device without memory; False in a process without torch."""
    kind = getattr(sys.modules.get("torch"), "OutOfMemoryError", None)
    return kind is not None and issubclass(type(error), kind)


def _told(error: BaseException, tb: TracebackType | None, style: str, show_locals: bool) -> dict[str, Any]:
    """Return the parts of a report that need the exception's own code."""
    told: dict[str, Any] = {"exit_code": _exit_code(error.code)} if isinstance(error, SystemExit) else {}
    told["message"] = exceptions.text_of(error)
    try:
        text = (
            _formatted(error, tb, style, show_locals) if exceptions.is_short(error) else exceptions.shortly(error, tb)
        )
    except MemoryError:
        raise
    except BaseException as e:  # a __repr__ may even call sys.exit
        text = f"{exceptions.shortly(error, tb)}\n({name_of(type(e))} while its traceback was formatted)"
    told["text"] = text[-_MOST_TEXT:]
    return told


def _told_shortly(error: BaseException, tb: TracebackType | None, late: TooLongError) -> tuple[str, str]:
    """Return message and text of an exception that could not be described in time."""
    try:
        return within(_PATIENCE_AGAIN, lambda: (exceptions.text_of(error), exceptions.shortly(error, tb)[-_MOST_TEXT:]))
    except BaseException:
        file, line, function = late.frames[-1] if late.frames else ("?", 0, "?")
        unread = f"(its message could not be read: {late}, in {function} at {file}:{line})"
        return unread, exceptions.shortly(error, tb, messages=False)[-_MOST_TEXT:]


def is_collective_frame(file: str) -> bool:
    """Return whether a frame of this file issues or waits for a collective."""
    return file.startswith(DISTRIBUTED) or file == _AUTOGRAD_ENGINE


def _exit_code(code: object) -> int | str | None:
    if code is None or isinstance(code, int):
        return None if code is None else int(code)  # the controller may be unable to import a subclass, such as an enum
    try:
        return str(code)[:2000]
    except Exception:
        return f"a {name_of(type(code)).rpartition('.')[2]}"


def _without_our_frames(tb: TracebackType | None) -> TracebackType | None:
    kept = tb
    while kept is not None and kept.tb_frame.f_code.co_filename.startswith(_HERE):
        kept = kept.tb_next
    return kept or tb


def _formatted(error: BaseException, tb: TracebackType | None, style: str, show_locals: bool) -> str:
    try:
        from _pytest._code import ExceptionInfo
        from _pytest._io import TerminalWriter
    except ImportError:
        return "".join(traceback.format_exception(type(error), error, tb))
    error = error.with_traceback(tb)
    try:
        shown = ExceptionInfo.from_exception(error).getrepr(
            showlocals=show_locals,
            style=style,  # type: ignore[arg-type]
            funcargs=False,
            truncate_locals=True,
        )
        out = io.StringIO()
        shown.toterminal(TerminalWriter(out))
        return out.getvalue().strip("\n")  # str(shown) would lose the first line's indentation
    except Exception:
        return "".join(traceback.format_exception(type(error), error, tb))


def explain_assertions(verbosity: int) -> None:
    """Give rewritten ``assert`` statements in this process the explanations that pytest gives in its own process."""
    try:
        from _pytest.assertion import util
    except ImportError:
        return
    util._reprcompare = functools.partial(_explain, verbosity)


def _explain(verbosity: int, op: str, left: object, right: object) -> str | None:
    try:
        from _pytest.assertion import pytest_assertrepr_compare

        lines = pytest_assertrepr_compare(_plain_config(verbosity), op, left, right)
    except Exception:
        return None
    if not lines:
        return None
    return "\n~".join(line.replace("\n", "\\n") for line in lines).replace("%", "%%")


@functools.cache
def _plain_config(verbosity: int) -> Any:
    """Return a separate pytest configuration.  Only failed assertions need it, so the first one creates it."""
    from _pytest.config import _prepareconfig

    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    arguments = ["-c", os.devnull, "--rootdir", os.sep, "-p", "no:cacheprovider", *["-v"] * verbosity]
    return _prepareconfig(arguments)
