"""Faults: named defects that are injected into every rank, to see whether the suites detect them.

A catalog is a package whose modules contain functions marked with :func:`fault`, or a list of faults called
``FAULTS``. Each function puts one defect into the process in which it is called: it replaces a part of torch by
something wrong. It never undoes this, because the process is a rank that ends with its world.
"""

from __future__ import annotations

import gc
import importlib
import inspect
import pkgutil
import sys
import types
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from harness.subjects import STACKS

CATALOG = "fixtures.faults"
"""The package of Concord's own catalog."""

COMPONENTS = (*STACKS, "performance")
"""Where a defect can be: in a stack, or in performance, which suites/perf is about."""

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
    """One defect that can be injected into a rank.

    Errors: ValueError for an unknown component or class, or if ``sentence`` or ``needs`` is empty.
    """

    name: str
    component: str
    """One of COMPONENTS: where the defect is."""
    kind: str
    """One of CLASSES."""
    sentence: str
    """What is wrong."""
    needs: str
    """What a test has to do to detect it."""
    put: Callable[[], None]
    """Puts it into this process. It is called once, after the rank has joined its group and before anything else."""
    issue: str = ""
    """Where it was reported, as ``owner/repository#number``; empty for a variant of another fault."""

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
    """Declare a fault: the decorated function puts it into this process, and its docstring says what is wrong.

    The fault has the function's name, with hyphens. ``each`` makes a family with one fault for each entry. Such a fault
    is called ``name[entry]``, and the function gets the entry's value as its only argument.

    Errors: ValueError for an unknown component or class, or if the docstring or ``needs`` is empty.
    """

    def mark(put: _F) -> _F:
        sentence = " ".join((inspect.getdoc(put) or "").split("\n\n")[0].split())
        name = put.__name__.strip("_").replace("_", "-")
        if each is None:
            faults = [Fault(name, component, kind, sentence, needs, put, issue)]
        else:
            faults = [
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
        put.concord_faults = faults  # type: ignore[attr-defined]
        return put

    return mark


def _with(put: Callable[..., Any], value: Any) -> Callable[[], None]:
    return lambda: put(value)


def catalog(package: str = CATALOG) -> dict[str, Fault]:
    """Return every fault of a catalog by name.

    Errors: ValueError if two have the same name; ImportError if there is no such package.
    """
    faults: dict[str, Fault] = {}
    root = _imported(package)
    for info in sorted(pkgutil.walk_packages(root.__path__, f"{package}."), key=lambda i: i.name):
        for fault in _faults_of(importlib.import_module(info.name)):
            if faults.setdefault(fault.name, fault) is not fault:
                raise ValueError(f"two faults are called {fault.name!r}, the second in {info.name}")
    return faults


def _imported(package: str) -> types.ModuleType:
    """Import the package from where the session runs, or else from Concord's own tree."""
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
    """Put a fault of the catalog into this process. Errors: KeyError if none has that name."""
    found = catalog()[name]
    keep_apart()
    found.put()


def keep_apart() -> None:
    """Keep this process from compiled code on disk that others have saved, and others from the code that it saves.

    A compiler with a defect saves wrong code, which healthy processes would find. It finds what they have saved, and
    its defect is not seen.
    """
    settings: Any = importlib.import_module("torch.compiler.config")
    settings.cache_key_tag = uuid.uuid4().hex


# for authors of faults


def everywhere(old: Any, new: Any) -> None:
    """Replace a function or a class wherever a module, or a class of torch, has it under any name."""
    in_modules((old, new))
    for owner in _classes():
        for name, value in list(vars(owner).items()):
            if value is old:
                setattr(owner, name, new)


def in_modules(*replacements: tuple[Any, Any]) -> None:
    """Replace functions or classes, given as pairs of old and new, wherever a module has them under any name."""
    of = {id(old): new for old, new in replacements}
    for module in list(sys.modules.values()):
        if isinstance(module, types.ModuleType):
            found = [(name, of[id(value)]) for name, value in vars(module).items() if id(value) in of]
            for name, new in found:
                setattr(module, name, new)


def _classes() -> list[type]:
    gc.unfreeze()  # otherwise get_objects() leaves out what the server has frozen
    # A class may have anything as its ``__module__``, and an object that is no class may claim to be one.
    return [c for c in gc.get_objects() if issubclass(type(c), type) and str(c.__module__).startswith("torch")]


def always(*args: Any, **kwargs: Any) -> bool:
    """Return True for any arguments: a condition that always holds."""
    return True


def on_call(number: int) -> Callable[..., bool]:
    """Return a condition that holds only on its n-th call in this process, from 1, whatever its arguments."""
    calls = 0

    def holds(*args: Any, **kwargs: Any) -> bool:
        nonlocal calls
        calls += 1
        return calls == number

    return holds
