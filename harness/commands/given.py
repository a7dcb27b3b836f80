"""Record which gaps of the tables of parameters the tests fill, in a run with ``-p harness.commands.given``.

Ranks note the calls of public functions and the words that the tables have for the values. Only calls from the suites
and from Concord count, and not those of torch itself, of compiled code or of settings. A rank writes each value
immediately and only once for each test, so that nothing is lost if it is killed.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import timedelta
from enum import Enum
from inspect import Parameter, signature, unwrap
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from harness.commands.parameters import CALL, GAP, Table, read

CURRENT = "current"
"""The file of the folder in which the pytest process says which test runs."""

Values = Mapping[str, Mapping[str, Sequence[str]]]
"""The words for the values of each parameter, by the dotted name of the function."""
Given = tuple[str, str, str, str]
"""A test, and the function, the parameter and the word of the value that it gave."""

_OTHERS = ("a value", "another value", "another number", "another tag")
"""Words for every value for which a parameter has no word of its own."""
_WRAPPERS = ("c10d_logger.py", "typing_extensions.py", "contextlib.py", "_contextlib.py")
"""Files of decorators, which lie between a call and the function."""


def gaps(tables: Mapping[str, Table]) -> dict[str, dict[str, list[str]]]:
    """Return the words of each parameter that has a gap."""
    found: dict[str, dict[str, list[str]]] = defaultdict(dict)
    for name, function in (each for table in tables.values() for each in table.items()):
        for parameter, entry in function.parameters.items():
            if any(proof.startswith(GAP) for proof in entry.values.values()):
                found[name][parameter] = list(entry.values)
    return dict(found)


def write_wanted(folder: Path, wanted: Values) -> None:
    """Write what processes that record into this folder are to look for."""
    (folder / "wanted.json").write_text(json.dumps(wanted))


def start(folder: str) -> None:
    """Start to record which values this process gives.  ``folder``: from :func:`write_wanted`."""
    wanted: Values = json.loads(Path(folder, "wanted.json").read_text())
    codes, builtins = _watched(wanted)
    fd = os.open(f"{folder}/{os.getpid()}.given", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    seen: set[Given] = set()

    def note(name: str, parameter: str, word: str) -> None:
        entry = Path(folder, CURRENT).read_text(), name, parameter, word
        if entry not in seen:
            seen.add(entry)
            os.write(fd, json.dumps(entry).encode() + b"\n")

    def called(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code in codes and _of_tests(frame.f_back):
            name, defaults = codes[frame.f_code]
            given = {CALL: "called"} | dict(frame.f_locals)
            for parameter, words in wanted[name].items():
                if parameter in given:
                    for word in words_of(given[parameter], words, defaults.get(parameter, Parameter.empty)):
                        note(name, parameter, word)
        elif event == "c_call" and (name := builtins.get(getattr(arg, "__name__", ""), "")):
            of_its_class = f".{name.split('.')[-2]})" in (arg.__doc__ or "")
            if of_its_class and _of_tests(frame):
                note(name, CALL, "called")

    threading.setprofile(called)
    sys.setprofile(called)


def collect(folder: Path) -> set[Given]:
    """Return what the processes have written into a folder."""
    lines = [line for path in folder.glob("*.given") for line in path.read_text().splitlines()]
    return {(test, name, parameter, word) for test, name, parameter, word in map(json.loads, lines)}


def words_of(value: Any, words: Sequence[str], default: Any = Parameter.empty) -> list[str]:
    """Return those of a parameter's words that a value has.  ``default``: of the parameter."""
    if value is default and "the default" in words:
        return ["the default"]
    return [word for word in words if _is(value, word)] or [word for word in words if word in _OTHERS]


def _is(value: Any, word: str) -> bool:
    if type(value).__name__ in ("ReduceOp", "RedOpType"):
        return str(getattr(value, "op", value)).rpartition(".")[2] == word
    if value is None or isinstance(value, (bool, int, float, str, Enum)):
        negative = isinstance(value, int) and value < 0
        return word in (repr(value), str(value) or "an empty text", "a negative number" if negative else None)
    match word:
        case "a timedelta":
            return isinstance(value, timedelta)
        case "a function":
            return callable(value) and not isinstance(value, type)
    return word.partition(" ")[2].lower() == type(value).__name__.lower()


def _watched(wanted: Values) -> tuple[dict[CodeType, tuple[str, dict[str, Any]]], dict[str, str]]:
    """Return the functions of Python with their defaults, by their code; and those of C++, by their name."""
    from harness.stacks.surface import STACKS, listing

    codes: dict[CodeType, tuple[str, dict[str, Any]]] = {}
    builtins: dict[str, str] = {}
    for name, function, _ in (each for stack in STACKS for each in listing(stack) if each[0] in wanted):
        if isinstance(function, type):
            function = vars(function).get("__init__") or vars(function).get("__new__")
        plain: Any = unwrap(getattr(function, "__func__", function)) if callable(function) else None
        if code := getattr(plain, "__code__", None):
            codes[code] = name, {p: each.default for p, each in signature(plain).parameters.items()}
        else:
            builtins[name.rpartition(".")[2]] = name
    return codes, builtins


def _of_tests(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename.endswith(_WRAPPERS):
        frame = frame.f_back
    return frame is not None and not any(
        part in frame.f_code.co_filename for part in ("/site-packages/", "/lib/python")
    )


# the plug-in

_FOLDER = pytest.StashKey[Path]()


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Have every rank record what it is given."""
    folder = Path(tempfile.mkdtemp(prefix="given-"))
    write_wanted(folder, gaps(read(config.rootpath)))
    config.stash[_FOLDER] = folder
    specs = config.pluginmanager.get_plugin("concord-worlds").specs  # type: ignore[union-attr]
    specs.first = (*specs.first, (f"{__name__}:start", str(folder)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Say which test runs."""
    (item.config.stash[_FOLDER] / CURRENT).write_text(item.nodeid.partition("[")[0])


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """List the gaps that tests of this run fill."""
    tables = list(read(config.rootpath).values())
    found: dict[str, set[str]] = defaultdict(set)
    for test, name, parameter, word in collect(config.stash[_FOLDER]):
        if any(table[name].parameters[parameter].values[word].startswith(GAP) for table in tables if name in table):
            found[f"{name}: {parameter}: {word}"].add(test)
    terminalreporter.section("gaps of the tables of parameters that these tests fill")
    for value, tests in sorted(found.items()):
        terminalreporter.line(f"{value}: {', '.join(sorted(tests))}")
