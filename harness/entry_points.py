"""What installed packages bring along: entry points of the groups ``concord.*`` (docs/plugins.md).

A broken one is a sentence (:class:`Broken`), for whoever shows it; it takes nothing away from the others.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import itertools
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

BACKENDS = "concord.backends"
"""``NAME = module``: the module that registers the backend NAME; ranks of worlds of that backend import it."""
DEVICES = "concord.devices"
"""``TYPE = module``: the module that registers the type of device; imported by whoever counts or uses such devices."""
PROFILES = "concord.profiles"
"""``NAME = package``: the package in which ``NAME.toml`` lies; it is not imported."""
SUITES = "concord.suites"
"""``NAME = package``: the package whose folder has tests; pytest collects it, nobody imports it."""
REQUIREMENTS = "concord.requirements"
"""``NAME = module:attribute``: a list of :class:`harness.requirements.Requirement`; loaded when a session starts."""
STACKS = "concord.stacks"
"""``NAME = module:attribute``: a stack for programs (:mod:`harness.stacks.registry`)."""
SUBJECTS = "concord.subjects"
"""``NAME.STACK = module:function`` (:mod:`harness.subjects`)."""

GROUPS = (BACKENDS, DEVICES, PROFILES, REQUIREMENTS, STACKS, SUBJECTS, SUITES)

_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_ATTRIBUTE = re.compile(rf"{_MODULE.pattern}:{_MODULE.pattern}")

_OTHERS = ("hypothesis", "torch.backends")
"""Groups whose modules Hypothesis and torch import when they are imported themselves."""
_imported: dict[str, str] = {}


@dataclass(frozen=True)
class Point:
    """An entry point, with its package."""

    group: str
    name: str
    value: str
    package: str
    """Name and version."""

    def __str__(self) -> str:
        return f"entry point {self.name!r} of {self.group} ({self.package})"


@dataclass(frozen=True)
class Broken:
    """An entry point that can't be used."""

    point: Point
    why: str

    def __str__(self) -> str:
        return f"{self.point}: {self.why}"


class PluginError(ValueError):
    """Something that a package should bring along can't be had; one line."""


def points(group: str) -> tuple[dict[str, Point], list[Broken]]:
    """The entry points of a group by name, and those that are none; of two of a name, the second is broken."""
    there = _points(group, tuple(sys.path))
    return dict(there[0]), list(there[1])


@functools.lru_cache(maxsize=32)
def _points(group: str, path: tuple[str, ...]) -> tuple[dict[str, Point], list[Broken]]:
    """Asked for every test; ``path``: where packages are looked for."""
    found: dict[str, Point] = {}
    broken: list[Broken] = []
    wants = _ATTRIBUTE if group in (REQUIREMENTS, STACKS, SUBJECTS) else _MODULE
    for entry in importlib.metadata.entry_points(group=group):
        point = Point(group, entry.name, entry.value, _package(entry))
        if not wants.fullmatch(point.value):
            kind = "module:attribute" if wants is _ATTRIBUTE else "the name of a module"
            broken.append(Broken(point, f"{point.value!r} is not {kind}"))
        elif (first := found.setdefault(point.name, point)) != point:
            broken.append(Broken(point, f"{first.package} has one of that name already"))
    return found, broken


def _package(entry: importlib.metadata.EntryPoint) -> str:
    dist = entry.dist
    return f"{dist.name} {dist.version}" if dist is not None else "no package"


def modules_for(group: str, name: str) -> tuple[str, ...]:
    """The module that a package says registers a backend, or a type of device; () if no package says so."""
    point = points(group)[0].get(name)
    return (point.value,) if point else ()


def imported() -> dict[str, str]:
    """The file of each module that this process has imported because a package or a profile names it.

    A module stays in it that has failed, or has taken itself out of ``sys.modules``.
    """
    found = dict(_imported)
    everything = importlib.metadata.entry_points()
    for group in _OTHERS:
        for entry in everything.select(group=group):
            for name in _with_parents(entry.value.partition(":")[0].strip()):
                file = getattr(sys.modules.get(name), "__file__", None)
                if isinstance(file, str):
                    found.setdefault(name, file)
    return found


def import_named(module: str) -> ModuleType:
    """Import a module that a package or a profile names.  Errors: whatever it raises."""
    try:
        _note(module, _find(module))
    except (Exception, SystemExit):
        pass  # the import says it
    return importlib.import_module(module)


def _find(module: str) -> ModuleSpec | None:
    """Find a module, and note the packages around it, which are imported for that.  Errors: whatever they raise."""
    spec = None
    for name in _with_parents(module):
        spec = importlib.util.find_spec(name)
        if spec is None:
            return None
        if name != module:
            _note(name, spec)
    return spec


def _with_parents(module: str) -> list[str]:
    return list(itertools.accumulate(module.split("."), "{}.{}".format))


def _note(module: str, spec: ModuleSpec | None) -> None:
    if spec is not None and spec.has_location and spec.origin:
        _imported.setdefault(module, spec.origin)


def load(point: Point) -> Any:
    """The attribute that an entry point names.  Errors: :class:`PluginError`, whatever its module raises."""
    module, _, name = point.value.partition(":")
    try:
        found: Any = import_named(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (Exception, SystemExit) as e:
        raise PluginError(f"{point}: {said(e)}") from e
    return found


def folder_of(point: Point) -> Path:
    """The folder of the package that an entry point names, which is not imported, though packages around it are.

    Errors: :class:`PluginError` if there is none.
    """
    try:
        spec = _find(point.value)
    except (Exception, SystemExit) as e:
        raise PluginError(f"{point}: {said(e)}") from e
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    if not places:
        raise PluginError(f"{point}: there is no package {point.value}")
    return Path(places[0])


def profile_file(point: Point) -> Path:
    """The file of a package's profile.  Errors: :class:`PluginError` if there is none."""
    path = folder_of(point) / f"{point.name}.toml"
    if not path.is_file():
        raise PluginError(f"{point}: there is no {path.name} in the package {point.value}")
    return path


def requirements() -> tuple[Mapping[str, list[Any]], list[str]]:
    """The requirements that packages bring along, by entry point; and what is wrong with entry points, a line each."""
    from harness.requirements import Requirement

    found: dict[str, list[Any]] = {}
    there, broken = points(REQUIREMENTS)
    wrong = [str(each) for each in broken]
    for name, point in there.items():
        try:
            listed = load(point)
            if not isinstance(listed, list | tuple) or not all(isinstance(each, Requirement) for each in listed):
                raise PluginError(f"{point}: not a list of harness.requirements.Requirement")
            found[name] = list(listed)
        except PluginError as e:
            wrong.append(str(e))
    return found, wrong


def said(error: BaseException) -> str:
    """An exception on one line."""
    first = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
