"""Record which lines of some files the ranks of a test reach, and in which order.

A rank writes each step from line to line immediately and only once, so that nothing is lost if the rank is killed.
Line 0 means outside of the function.
"""

from __future__ import annotations

import dis
import inspect
import io
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

Steps = dict[str, set[tuple[int, int]]]
"""Steps by file, each from a line to a line."""

_Tracer = Callable[[FrameType, str, Any], Any]


_RETURNS = [dis.opmap[name] for name in ("RETURN_VALUE", "RETURN_CONST", "YIELD_VALUE") if name in dis.opmap]
"""Opcodes with which a function returns or yields, as opposed to an exception that leaves it."""


def argument(folder: Path, files: Sequence[str]) -> str:
    """Return the argument for :func:`start`.  Ranks write their files into ``folder``, which must exist."""
    return json.dumps([str(folder), list(files)])


def start(argument: str) -> None:
    """Start to record which lines of the files this process reaches.  ``argument``: from :func:`argument`."""
    folder, files = json.loads(argument)
    numbers = {file: i for i, file in enumerate(files)}
    fd = os.open(f"{folder}/{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    seen: set[tuple[int, int, int]] = set()

    def local(file: int, first: int) -> _Tracer:
        before = 0

        def step(frame: FrameType, event: str, arg: Any) -> _Tracer:
            nonlocal before
            if event == "line" or (event == "return" and frame.f_code.co_code[frame.f_lasti] in _RETURNS):
                line = frame.f_lineno if event == "line" else 0
                taken = file, before or -first, line or -first
                if taken not in seen:
                    seen.add(taken)
                    os.write(fd, b"%d %d %d\n" % taken)
                before = line
            return step

        return step

    def called(frame: FrameType, event: str, arg: Any) -> _Tracer | None:
        code = frame.f_code
        file = numbers.get(code.co_filename)
        return None if file is None else local(file, code.co_firstlineno)

    threading.settrace(called)
    sys.settrace(called)


def collect(folder: Path, files: Sequence[str]) -> Steps:
    """Read the files that ranks have written into a folder, and remove them."""
    steps: Steps = {}
    for path in folder.iterdir():
        for line in path.read_bytes().split(b"\n")[:-1]:
            file, before, after = map(int, line.split())
            steps.setdefault(files[file], set()).add((before, after))
        path.unlink()
    return steps


def _imported(path: Path) -> Iterator[tuple[int, int]]:
    """Yield steps to the lines outside of functions, because the module was imported before recording started."""
    pending = [compile(path.read_text(), str(path), "exec", dont_inherit=True)]
    while pending:
        code = pending.pop()
        if code.co_name == "<module>" or not code.co_flags & inspect.CO_NEWLOCALS:
            yield from ((-1, line) for _, _, line in code.co_lines() if line)
            pending += [c for c in code.co_consts if isinstance(c, CodeType)]


def report(steps: Mapping[str, Iterable[tuple[int, int]]], html: Path | None = None) -> str:
    """Return a table of the lines and branches that were reached; with ``html``, also write pages to that folder.

    ``steps``: all files of the report; a file that was not reached has no steps.
    """
    from coverage import Coverage, CoverageData

    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/data"
        data = CoverageData(basename=path)
        data.add_arcs({file: [*arcs, *_imported(Path(file))] for file, arcs in steps.items()})
        data.write()
        coverage = Coverage(data_file=path, branch=True, config_file=False, include=list(steps))
        coverage.load()
        text = io.StringIO()
        coverage.report(file=text, show_missing=True, ignore_errors=True)
        if html:
            coverage.html_report(directory=str(html))
    root = str(Path(os.path.commonpath([*steps, os.devnull]) or "/"))
    return text.getvalue().replace(f"{root}/", "") if len(root) > 1 else text.getvalue()
