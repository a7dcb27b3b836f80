"""What a rank can say about its own failure, as plain data that survives the trip to the controller."""

from __future__ import annotations

import functools
import io
import os
import time
import traceback
from types import TracebackType
from typing import Any

from harness.worlds.places import DISTRIBUTED, TORCH

_HERE = os.path.dirname(__file__) + os.sep
_AUTOGRAD_ENGINE = os.path.join(TORCH, "autograd", "graph.py")
_MOST_TEXT = 100_000
_SKIPS = {("builtins", "Skipped"), ("_pytest.outcomes", "Skipped"), ("unittest.case", "SkipTest")}
"""pytest gives its own the module ``builtins``, so that users see a short name."""


def describe_exception(
    error: BaseException, *, context: str = "", style: str = "short", show_locals: bool = False
) -> dict[str, Any]:
    """An exception as a dict of strings and numbers.

    ``type``: its qualified name; ``message``: its first lines; ``text``: the traceback as pytest shows it, without
    our own frames; ``frames``: (file, line, function) of the user's part, outermost first; ``in_collective``: whether
    it came out of torch.distributed; ``skip``: whether it is a skip; ``exit_code``: of a SystemExit;
    ``time_ns``: now, on the monotonic clock.  Works, with less to say, when there is no memory left.
    """
    now = time.monotonic_ns()
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    report: dict[str, Any] = {
        "type": name,
        "message": "",
        "text": "",
        "context": context,
        "frames": [],
        "in_collective": False,
        "skip": (kind.__module__, kind.__qualname__) in _SKIPS,
        "exit_code": None,
        "time_ns": now,
    }
    try:
        if isinstance(error, SystemExit):
            report["exit_code"] = _exit_code(error.code)
        tb = _without_our_frames(error.__traceback__)
        frames = [(f.f_code.co_filename, line, f.f_code.co_name) for f, line in traceback.walk_tb(tb)]
        report["frames"] = frames
        report["in_collective"] = bool(frames) and is_collective_frame(frames[-1][0])
        report["message"] = _text_of(error)
        report["text"] = _formatted(error, tb, style, show_locals)[-_MOST_TEXT:]
    except MemoryError:
        error.__traceback__ = None  # frees what the frames hold
        report["text"] = report["message"] = "out of memory"
    except BaseException as e:  # __str__ and __repr__ are the user's code, which may even exit
        report["text"] = f"{name} (its traceback could not be formatted: {type(e).__name__})"
    return report


def is_collective_frame(file: str) -> bool:
    """Whether a frame of this file is where a collective is issued or waited for."""
    return file.startswith(DISTRIBUTED) or file == _AUTOGRAD_ENGINE


def _exit_code(code: object) -> int | str | None:
    if code is None or isinstance(code, int):
        return None if code is None else int(code)  # not an enum that the controller can't import
    try:
        return str(code)[:2000]
    except Exception:
        return f"a {type(code).__qualname__}"


def _text_of(error: BaseException) -> str:
    try:
        return str(error)[:2000]
    except MemoryError:
        raise
    except BaseException as e:
        return f"(its message could not be read: {type(e).__name__})"


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
        return out.getvalue().strip("\n")  # and not str(shown), which loses the first line's indentation
    except Exception:
        return "".join(traceback.format_exception(type(error), error, tb))


def explain_assertions(verbosity: int) -> None:
    """Give rewritten ``assert`` statements in this process the explanations that pytest gives in its own."""
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
    """A pytest configuration of its own: only failed assertions need it, so it is made when the first one does."""
    from _pytest.config import _prepareconfig

    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    arguments = ["-c", os.devnull, "--rootdir", os.sep, "-p", "no:cacheprovider", *["-v"] * verbosity]
    return _prepareconfig(arguments)
