"""Faults: named defects that are put into every rank, to see whether the suites notice.

A catalogue is a package whose modules hold functions marked with :func:`fault`, or a list of faults called ``FAULTS``.
Each puts one defect into the process in which it is called: it replaces something of torch by something that is wrong,
and never undoes it, since the process is a rank that ends with its world.
"""

from __future__ import annotations

import gc
import importlib
import inspect
import pkgutil
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from harness.subjects import STACKS

CATALOGUE = "fixtures.faults"
"""The package of the catalogue that Concord brings along."""

COMPONENTS = (*STACKS, "performance")
"""Where a defect can be; the suites have the same names."""

CLASSES = {
    "SW": "silently wrong values",
    "MD": "wrong metadata or layout",
    "HG": "hang",
    "CR": "crash or abort",
    "LK": "leak",
    "PF": "performance",
    "RC": "recompilation or graph break",
}

_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Fault:
    """One defect that can be put into a rank.

    Errors: ValueError for a component or a class that there is not, and if nothing says what is wrong or what it needs.
    """

    name: str
    component: str
    """One of COMPONENTS: where the defect is."""
    kind: str
    """One of CLASSES."""
    sentence: str
    """What is wrong."""
    needs: str
    """What a test has to do to see it."""
    put: Callable[[], None]
    """Puts it into this process; called once, when the rank has joined its group and before anything else."""
    issue: str = ""
    """Where it was reported, as ``owner/repository#number``; empty for one of the family of another."""

    def __post_init__(self) -> None:
        if self.component not in COMPONENTS:
            raise ValueError(f"fault {self.name}: component {self.component!r}; there are {', '.join(COMPONENTS)}")
        if self.kind not in CLASSES:
            raise ValueError(f"fault {self.name}: class {self.kind!r}; there are {', '.join(CLASSES)}")
        if not self.sentence or not self.needs:
            raise ValueError(f"fault {self.name}: say what is wrong (docstring) and what it needs to be seen")

    def __str__(self) -> str:
        return self.name


def fault(
    component: str,
    kind: str,
    *,
    needs: str,
    issue: str = "",
    each: Mapping[str, Any] | None = None,
) -> Callable[[_F], _F]:
    """Make a fault of a function that puts it into this process; its docstring says what is wrong.

    The fault is called like the function, with hyphens.  ``each``: a family: one fault for each entry, called
    ``name[entry]``, whose function gets the entry's value as its only argument.

    Errors: ValueError for a component or a class that there is not, or without a docstring.
    """

    def mark(put: _F) -> _F:
        sentence = " ".join((inspect.getdoc(put) or "").split("\n\n")[0].split())
        name = put.__name__.strip("_").replace("_", "-")
        if each is None:
            found = [Fault(name, component, kind, sentence, needs, put, issue)]
        else:
            found = [
                Fault(
                    f"{name}[{entry}]",
                    component,
                    kind,
                    sentence,
                    f"{needs}; {entry}" if needs else "",
                    _with(put, value),
                    issue,
                )
                for entry, value in each.items()
            ]
        put.concord_faults = found  # type: ignore[attr-defined]
        return put

    return mark


def _with(put: Callable[..., Any], value: Any) -> Callable[[], None]:
    return lambda: put(value)


def catalogue(package: str = CATALOGUE) -> dict[str, Fault]:
    """Every fault of a catalogue, by name.

    Errors: ValueError if two have the same name; ImportError if there is no such package.
    """
    found: dict[str, Fault] = {}
    root = _imported(package)
    for info in sorted(pkgutil.walk_packages(root.__path__, f"{package}."), key=lambda i: i.name):
        for fault in _faults_of(importlib.import_module(info.name)):
            if found.setdefault(fault.name, fault) is not fault:
                raise ValueError(f"two faults are called {fault.name!r}, the second in {info.name}")
    return found


def _imported(package: str) -> types.ModuleType:
    """The package where the session runs, or else that of Concord's own tree."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError:
        own = str(Path(__file__).parents[1])
        if own in sys.path:
            raise
        sys.path.append(own)
        return importlib.import_module(package)


def _faults_of(module: types.ModuleType) -> list[Fault]:
    return [
        *getattr(module, "FAULTS", ()),
        *_marked(module),
    ]


def _marked(module: types.ModuleType) -> list[Fault]:
    return [
        fault
        for value in vars(module).values()
        if getattr(value, "__module__", None) == module.__name__
        for fault in getattr(value, "concord_faults", ())
    ]


def put(name: str) -> None:
    """Put a fault of the catalogue into this process.  Errors: KeyError if there is none of that name."""
    catalogue()[name].put()


# for those who write faults


def everywhere(old: Any, new: Any) -> None:
    """Replace a function or a class wherever a module, or a class of torch's, has it under some name."""
    in_modules((old, new))
    for owner in _classes():
        for name, value in list(vars(owner).items()):
            if value is old:
                setattr(owner, name, new)


def in_modules(*replacements: tuple[Any, Any]) -> None:
    """Replace functions or classes, each old one by a new one, wherever a module has them under some name."""
    of = {id(old): new for old, new in replacements}
    for module in list(sys.modules.values()):
        if isinstance(module, types.ModuleType):
            found = [(name, of[id(value)]) for name, value in vars(module).items() if id(value) in of]
            for name, new in found:
                setattr(module, name, new)


def _classes() -> list[type]:
    gc.unfreeze()  # what the server has frozen is not looked at otherwise
    # A class may have anything for its module, and what is no class may say that it is one.
    return [c for c in gc.get_objects() if issubclass(type(c), type) and str(c.__module__).startswith("torch")]


def always(*args: Any, **kwargs: Any) -> bool:
    """A condition that holds whatever it is called with."""
    return True


def on_call(number: int) -> Callable[..., bool]:
    """A condition that holds on the n-th call of itself in this process, from 1, whatever it is called with."""
    calls = 0

    def holds(*args: Any, **kwargs: Any) -> bool:
        nonlocal calls
        calls += 1
        return calls == number

    return holds
