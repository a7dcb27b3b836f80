"""The entry points of installed packages in the groups ``concord.*`` (docs/plugins.md).

A broken entry point becomes a :class:`Broken`, which callers show as one sentence. It does not affect the others.
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
"""``NAME = module``: the module that registers the backend NAME. Ranks of worlds of that backend import it."""
DEVICES = "concord.devices"
"""``TYPE = module``: the module that registers the type of device. Any process that uses such devices imports it."""
PROFILES = "concord.profiles"
"""``NAME = package``: the package that contains ``NAME.toml``. It is not imported."""
DEFECTS = "concord.defects"
"""``OWNER = package``: the package that contains ``defects/OWNER.toml``. It is not imported."""
SUITES = "concord.suites"
"""``NAME = package``: the package whose folder contains tests. pytest collects it; Concord does not import it."""
REQUIREMENTS = "concord.requirements"
"""``NAME = module:attribute``: a list of :class:`harness.requirements.Requirement`, loaded when a session starts."""
LAUNCHERS = "concord.launchers"
"""``NAME = module:attribute``: what starts agents on hosts (:mod:`harness.cluster.engines`)."""
STACKS = "concord.stacks"
"""``NAME = module:attribute``: a stack for programs (:mod:`harness.stacks.registry`)."""
SUBJECTS = "concord.subjects"
"""``NAME.STACK = module:function``: a subject's implementation of a stack (:mod:`harness.subjects`)."""

GROUPS = (BACKENDS, DEFECTS, DEVICES, LAUNCHERS, PROFILES, REQUIREMENTS, STACKS, SUBJECTS, SUITES)

_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_ATTRIBUTE = re.compile(rf"{_MODULE.pattern}:{_MODULE.pattern}")

_OTHERS = ("hypothesis", "torch.backends")
"""Groups of entry points whose modules Hypothesis and torch import when they are imported themselves."""
_imported: dict[str, str] = {}


@dataclass(frozen=True)
class Point:
    """An entry point and its package."""

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
    """An entry point of a package can't be used; the message is one line."""


def points(group: str) -> tuple[dict[str, Point], list[Broken]]:
    """Return the entry points of a group by name, and the broken ones. Of two with one name, the second is broken."""
    there = _points(group, tuple(sys.path))
    return dict(there[0]), list(there[1])


@functools.lru_cache(maxsize=32)
def _points(group: str, path: tuple[str, ...]) -> tuple[dict[str, Point], list[Broken]]:
    """Return :func:`points` from a cache, because every test calls it. ``path``: where to look for packages."""
    by_name: dict[str, Point] = {}
    broken: list[Broken] = []
    wants = _ATTRIBUTE if group in (LAUNCHERS, REQUIREMENTS, STACKS, SUBJECTS) else _MODULE
    for entry in importlib.metadata.entry_points(group=group):
        point = Point(group, entry.name, entry.value, _package(entry))
        if not wants.fullmatch(point.value):
            kind = "module:attribute" if wants is _ATTRIBUTE else "the name of a module"
            broken.append(Broken(point, f"{point.value!r} is not {kind}"))
        elif (first := by_name.setdefault(point.name, point)) != point:
            broken.append(Broken(point, f"{first.package} has one of that name already"))
    return by_name, broken


def _package(entry: importlib.metadata.EntryPoint) -> str:
    dist = entry.dist
    return f"{dist.name} {dist.version}" if dist is not None else "no package"


def modules_for(group: str, name: str) -> tuple[str, ...]:
    """Return the module that a package names for a backend or a type of device; () if no package names one."""
    point = points(group)[0].get(name)
    return (point.value,) if point else ()


def imported() -> dict[str, str]:
    """Return the file of each module that this process has imported because a package or a profile names it.

    Modules that failed, or removed themselves from ``sys.modules``, are included.
    """
    files = dict(_imported)
    everything = importlib.metadata.entry_points()
    for group in _OTHERS:
        for entry in everything.select(group=group):
            for name in _with_parents(entry.value.partition(":")[0].strip()):
                file = getattr(sys.modules.get(name), "__file__", None)
                if isinstance(file, str):
                    files.setdefault(name, file)
    return files


def import_named(module: str) -> ModuleType:
    """Import a module that a package or a profile names. Errors: whatever it raises."""
    try:
        _note(module, _find(module))
    except (Exception, SystemExit):
        pass  # the import below reports it
    return importlib.import_module(module)


def _find(module: str) -> ModuleSpec | None:
    """Find a module, and note the packages around it, which this imports. Errors: whatever they raise."""
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
    """Return the attribute that an entry point names. Errors: :class:`PluginError`, whatever its module raises."""
    module, _, name = point.value.partition(":")
    try:
        attribute: Any = import_named(module)
        for part in name.split("."):
            attribute = getattr(attribute, part)
    except (Exception, SystemExit) as e:
        raise PluginError(f"{point}: {said(e)}") from e
    return attribute


def folder_of(point: Point) -> Path:
    """Return the folder of the package that an entry point names. Only packages around it are imported.

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
    """Return the file of a package's profile. Errors: :class:`PluginError` if there is none."""
    path = folder_of(point) / f"{point.name}.toml"
    if not path.is_file():
        raise PluginError(f"{point}: there is no {path.name} in the package {point.value}")
    return path


def defects_file(point: Point) -> Path:
    """Return the file of a package's defects. Errors: :class:`PluginError` if there is none."""
    path = folder_of(point) / "defects" / f"{point.name}.toml"
    if not path.is_file():
        raise PluginError(f"{point}: there is no defects/{path.name} in the package {point.value}")
    return path


def requirements() -> tuple[Mapping[str, list[Any]], list[str]]:
    """Return the requirements of packages by entry point, and one line for each broken entry point."""
    from harness.requirements import Requirement

    by_name: dict[str, list[Any]] = {}
    there, broken = points(REQUIREMENTS)
    wrong = [str(each) for each in broken]
    for name, point in there.items():
        try:
            listed = load(point)
            if not isinstance(listed, list | tuple) or not all(isinstance(each, Requirement) for each in listed):
                raise PluginError(f"{point}: not a list of harness.requirements.Requirement")
            by_name[name] = list(listed)
        except PluginError as e:
            wrong.append(str(e))
    return by_name, wrong


def said(error: BaseException) -> str:
    """Format an exception on one line."""
    first = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
