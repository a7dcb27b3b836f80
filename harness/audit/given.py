"""Record the values that the tests give the parameters of PyTorch's public functions, by their words in the tables.

A rank writes each value that it sees immediately and only once for each test, so that nothing is lost if it is killed.
Only calls from the suites and from what they import of Concord count, and not those of torch itself.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from datetime import timedelta
from inspect import Parameter, signature, unwrap
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

CALL = "()"
"""The parameter that stands for the call of a function without parameters."""
CURRENT = "current"
"""The file of the folder in which the pytest process says which test runs."""

Values = Mapping[str, Mapping[str, Sequence[str]]]
"""The words for the values of each parameter, by the dotted name of the function."""


def start(folder: str) -> None:
    """Start to record which values this process gives.

    ``folder``: it has the file ``wanted.json`` with :data:`Values`, the file :data:`CURRENT`, and gets one file of each
    process.
    """
    wanted: Values = json.loads(Path(folder, "wanted.json").read_text())
    codes, builtins = _watched(wanted)
    fd = os.open(f"{folder}/{os.getpid()}.given", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    seen: set[tuple[str, str, str, str]] = set()

    def note(name: str, parameter: str, word: str) -> None:
        try:
            with open(f"{folder}/{CURRENT}") as file:
                test = file.read()
        except OSError:
            return
        if (entry := (test, name, parameter, word)) not in seen:
            seen.add(entry)
            os.write(fd, json.dumps(entry).encode() + b"\n")

    def called(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            if (found := codes.get(frame.f_code)) and _of_tests(frame.f_back):
                name, defaults = found
                values = wanted[name]
                given = frame.f_locals
                for parameter, words in values.items():
                    if parameter == CALL:
                        note(name, CALL, "called")
                    elif parameter in given:
                        for word in words_of(given[parameter], words, defaults.get(parameter, Parameter.empty)):
                            note(name, parameter, word)
        elif event == "c_call":
            name = builtins.get(getattr(arg, "__name__", ""), "")
            if name and f".{name.split('.')[-2]})" in (arg.__doc__ or "") and _of_tests(frame):
                note(name, CALL, "called")

    threading.setprofile(called)
    sys.setprofile(called)


def collect(folder: Path) -> set[tuple[str, str, str, str]]:
    """Read what the processes have written: the test, the function, the parameter, and the word of its value."""
    return {tuple(json.loads(line)) for path in folder.glob("*.given") for line in path.read_text().splitlines()}


def words_of(value: Any, words: Sequence[str], default: Any = Parameter.empty) -> list[str]:
    """Return those of a parameter's words that a value has.  ``default``: of the parameter."""
    if default is not Parameter.empty and value is default and "the default" in words:
        return ["the default"]
    exact = [word for word in words if _is(value, word)]
    return exact or [word for word in words if word in ("a value", "another value", "another number", "another tag")]


def _is(value: Any, word: str) -> bool:
    if word == repr(value) or word == value:
        return True
    if type(value).__name__ in ("ReduceOp", "RedOpType"):
        return str(getattr(value, "op", value)).rpartition(".")[2] == word
    match word:
        case "a negative number":
            return isinstance(value, int) and value < 0
        case "an empty text":
            return value == ""
        case "a timedelta":
            return isinstance(value, timedelta)
        case "a function":
            return callable(value) and not isinstance(value, type)
    return word.startswith(("a ", "an ")) and word.partition(" ")[2].lower() == type(value).__name__.lower()


def _watched(wanted: Values) -> tuple[dict[CodeType, tuple[str, dict[str, Any]]], dict[str, str]]:
    """Return the functions of Python with their defaults, by their code; and those of C++, by their name."""
    from harness.stacks.surface import STACKS, listing

    codes: dict[CodeType, tuple[str, dict[str, Any]]] = {}
    builtins: dict[str, str] = {}
    for stack in STACKS:
        for name, function, _ in listing(stack):
            if name not in wanted:
                continue
            if isinstance(function, type):
                function = vars(function).get("__init__") or vars(function).get("__new__")
            plain = unwrap(getattr(function, "__func__", function)) if function is not None else None
            code = getattr(plain, "__code__", None)
            if code is None:
                builtins[name.rpartition(".")[2]] = name
            else:
                codes[code] = name, {p: each.default for p, each in signature(plain).parameters.items()}
    return codes, builtins


_WRAPPERS = ("c10d_logger.py", "typing_extensions.py", "contextlib.py", "_contextlib.py")


def _of_tests(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename.endswith(_WRAPPERS):
        frame = frame.f_back
    return (
        frame is not None
        and "/site-packages/" not in frame.f_code.co_filename
        and "/lib/python" not in frame.f_code.co_filename
    )
