"""An environment with a PyTorch of its own: a virtual environment's folder, or a Python."""

from __future__ import annotations

import json
import os
import subprocess
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

import harness

_LONGEST = 120.0
_SETTINGS = "pyproject.toml"
_LEAST_PYTHON = (3, 11)
_OF_SESSIONS = ("PYTHONHOME", "VIRTUAL_ENV", "PYTEST_CURRENT_TEST", "CONCORD_HISTORY")
"""Variables of the calling process that an environment does not get: they belong to this Python, or are secret."""

_QUESTIONS = r"""
import importlib.metadata, importlib.util, json, os, sys
facts = {"python": list(sys.version_info[:3]), "torch": "", "commit": "", "packages": {}}
for name in sys.argv[1:]:
    try:
        facts["packages"][name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
spec = importlib.util.find_spec("torch")
if spec is not None and spec.origin:
    told = {}
    try:
        with open(os.path.join(os.path.dirname(spec.origin), "version.py")) as file:
            exec(file.read(), told)
    except OSError:
        told = {"__version__": facts["packages"].get("torch", "")}
    facts["torch"] = str(told.get("__version__") or "")
    facts["commit"] = str(told.get("git_version") or "")
print("\n" + json.dumps(facts))
"""
"""A script that needs only the standard library. It does not import torch, which takes seconds."""


class EnvironmentProblem(ValueError):
    """The error for an environment in which the suites cannot run; it says which one and why."""


@dataclass(frozen=True)
class Environment:
    """A Python that has a PyTorch, and everything that the suites need besides."""

    python: Path
    torch: str
    """The version of its torch, such as ``2.13.0+cpu``."""
    commit: str
    """The commit from which its torch was built, if torch says so."""
    python_version: str

    @property
    def folder(self) -> Path:
        """The folder of the virtual environment; for any other Python, the Python itself."""
        above = self.python.parent.parent
        return above if (above / "pyvenv.cfg").is_file() else self.python

    @property
    def version(self) -> Version:
        """The version of its torch, which orders environments."""
        return Version(self.torch)


def checkout(folder: Path) -> Path:
    """Return the checkout whose harness and suites run in every environment.

    Errors: ValueError if the folder has none, or if its harness is another one than this.
    """
    root = folder.absolute()
    if not (root / "suites").is_dir():
        raise ValueError(f"{root} has no folder suites; run this where they are")
    here, there = Path(harness.__file__).parent, root / "harness"
    if not there.is_dir() or there.resolve() != here.resolve():
        raise ValueError(
            f"the harness that runs is {here}, and not {there}; run {root}'s own: python -m pip install -e ."
        )
    return root


def variables(python: Path, root: Path, inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment variables with which an environment's Python imports the harness of ``root``.

    ``PYTHONPATH`` precedes installed packages, so a Concord that is installed there is not imported.
    """
    kept = {name: value for name, value in inherited.items() if name not in _OF_SESSIONS}
    above = python.parent.parent
    if (above / "pyvenv.cfg").is_file():
        kept["VIRTUAL_ENV"] = str(above)
    for name, first in (("PYTHONPATH", root), ("PATH", python.parent)):
        others = [part for part in kept.get(name, "").split(os.pathsep) if part and part != str(first)]
        kept[name] = os.pathsep.join([str(first), *others])
    return kept


def environment(path: Path, root: Path) -> Environment:
    """Ask an environment for its torch, and check that it has what the suites of ``root`` need.

    ``path``: the folder of a virtual environment, or a Python. Errors: :class:`EnvironmentProblem`.
    """
    python = _python_of(path)
    needed = _needed(root)
    facts = _facts(python, root, path, [each.name for each in needed])
    version = ".".join(map(str, facts["python"]))
    if tuple(facts["python"]) < _LEAST_PYTHON:
        raise EnvironmentProblem(
            f"{path}: Python {version}; Concord needs {'.'.join(map(str, _LEAST_PYTHON))} or later"
        )
    torch = facts["torch"]
    if not torch:
        raise EnvironmentProblem(f"{path}: it has no torch")
    try:
        Version(torch)
    except InvalidVersion:
        raise EnvironmentProblem(f"{path}: torch's version is {torch!r}, which has no place in an order") from None
    lacking = [str(each) for each in needed if not _has(each, {**facts["packages"], "torch": torch})]
    if lacking:
        raise EnvironmentProblem(f"{path}: it lacks {', '.join(lacking)}, which the suites need (torch {torch})")
    return Environment(python, torch, facts["commit"], version)


def _python_of(path: Path) -> Path:
    """Return the Python of an environment, with links as they are: a virtual environment is known by its link."""
    path = path.expanduser().absolute()
    if not path.exists():
        raise EnvironmentProblem(f"{path}: there is no such environment")
    if path.is_dir():
        if not (path / "bin" / "python").exists():
            raise EnvironmentProblem(f"{path}: it has no bin/python; give a virtual environment's folder, or a Python")
        path = path / "bin" / "python"
    if not os.access(path, os.X_OK):
        raise EnvironmentProblem(f"{path}: it can't be executed; give a virtual environment's folder, or a Python")
    return path


def _facts(python: Path, root: Path, path: Path, packages: list[str]) -> Any:
    command = [str(python), "-c", _QUESTIONS, *packages]
    try:
        done = subprocess.run(
            command,
            cwd=root,
            env=variables(python, root),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LONGEST,
            check=False,
        )
    except OSError as e:
        raise EnvironmentProblem(f"{path}: {e.strerror}") from None
    except subprocess.TimeoutExpired:
        raise EnvironmentProblem(f"{path}: its Python did not answer within {_LONGEST:g} s") from None
    if done.returncode == 0:
        try:
            return json.loads(done.stdout.rstrip().rpartition("\n")[2])
        except ValueError:
            pass
    last = (done.stderr or done.stdout).strip().rpartition("\n")[2]
    raise EnvironmentProblem(f"{path}: it is no Python that works (exit status {done.returncode}: {last})")


def _needed(root: Path) -> list[Requirement]:
    """Return what the checkout says that it needs; nothing if it has no settings."""
    try:
        settings = tomllib.loads((root / _SETTINGS).read_text())
        return [Requirement(text) for text in settings.get("project", {}).get("dependencies", [])]
    except FileNotFoundError:
        return []
    except (tomllib.TOMLDecodeError, InvalidRequirement) as e:
        raise EnvironmentProblem(f"{root / _SETTINGS}: {e}") from None


def _has(needed: Requirement, packages: Mapping[str, str]) -> bool:
    version = packages.get(needed.name)
    return version is not None and needed.specifier.contains(version, prereleases=True)
