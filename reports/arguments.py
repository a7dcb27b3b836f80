"""What a run was asked for, read off its command line: to be held against what its results say of it.

Options are an allow-list: one that is not known to leave verdicts alone is named as one that nobody has judged.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, NoReturn

from harness.results import DEFAULT_SEED

NARROWING = {
    "-k": "keyword",
    "-m": "markexpr",
    "--deselect": "deselect",
    "--ignore": "ignore",
    "--ignore-glob": "ignore_glob",
    "--lf": "lf",
    "--stepwise": "stepwise",
}
"""Options that leave tests out, as results name them, and what they are called here."""

_HARMLESS_VALUES = (
    *("--maxprocesses", "--max-worker-restart", "--dist", "--tb", "--durations"),
    *("--durations-min", "--verbosity", "-r", "--color", "--code-highlight", "--show-capture", "--capture"),
    *("--junitxml", "--junit-xml", "--junit-prefix", "--basetemp", "--log-level", "--log-cli-level", "--log-file"),
    *("--log-file-level", "--timeout", "--timeout-method", "--session-timeout"),
    *("--hypothesis-verbosity", "--rank-network", "--concord-results", "--world-timeout", "--ranks-per-device"),
    *("--perf-rounds", "--perf-visits", "--perf-seconds", "--perf-largest", "--suite"),
)
_HARMLESS_FLAGS = (
    *("-v", "--verbose", "-q", "--quiet", "-s", "-l", "--showlocals", "--no-header", "--no-summary", "--full-trace"),
    *("--strict-markers", "--strict-config", "--strict", "--cache-clear", "--ff", "--failed-first", "--nf"),
    *("--new-first", "--hypothesis-show-statistics", "--thorough", "--start-over"),
    "--force-short-summary",
)
_HARMLESS_SETTINGS = ("log_", "junit_", "console_output_style", "cache_dir", "tmp_path_", "faulthandler_", "timeout")
"""How keys of ``-o`` begin that leave verdicts alone."""
_OWN_PLUGINS = {
    *("harness.plugin", "xdist", "xdist.plugin", "timeout", "pytest_timeout", "benchmark", "pytest_benchmark.plugin"),
    *("hypothesispytest", "_hypothesis_pytestplugin", "pytester"),
}
_BENCHMARKING = "--benchmark-"
_TIMER = "--benchmark-timer"
"""Imports what it names."""
_HIDDEN = "***"
"""What results have in the place of what might be a secret."""
_NOT_SHOWN = "set, not shown"
"""What results say of a variable whose value might have a secret in it."""


@dataclass(frozen=True)
class Asked:
    """What a command line asks for."""

    narrowed: tuple[str, ...] = ()
    """Which of :data:`NARROWING` were given."""
    faults: tuple[str, ...] = ()
    seed: str = DEFAULT_SEED
    hypothesis_seed: str | None = None
    profile: str | None = None
    subject: str = "torch"
    world_backend: str = ""
    world_device: str = ""
    workers: str = ""
    """What ``-n`` was given; empty: nothing."""
    stops_early: bool = False
    """Whether it was to end after some failures."""
    paths: tuple[str, ...] = ()
    unjudged: tuple[str, ...] = ()
    """Arguments that may change what a run comes to, in a way that nobody here can follow."""
    malformed: str = ""
    """Why it is no command line of pytest; empty: it is one."""

    def may_cover(self, stack: str) -> bool:
        """Whether every test of a stack may have been asked for."""
        return not self.paths or any(_covers(path, stack) for path in self.paths)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def _is_benchmarking(argument: str) -> bool:
    """Whether this is left to pytest-benchmark or, as a file of arguments, judged apart."""
    return argument.startswith("@") or (argument.startswith(_BENCHMARKING) and not argument.startswith(_TIMER))


def asked(arguments: Sequence[str], environment: Mapping[str, str]) -> Asked:
    """What a run was asked for.  ``environment``: as results have it, where ``PYTEST_ADDOPTS`` adds to arguments."""
    added = environment.get("variable PYTEST_ADDOPTS", "")
    hidden = [f"PYTEST_ADDOPTS ({added})"] if added == _NOT_SHOWN else []
    try:
        arguments = [*(() if hidden else shlex.split(added)), *arguments]
        said, rest = _parser().parse_known_args([a for a in arguments if not _is_benchmarking(a)])
    except ValueError as e:
        return Asked(malformed=str(e))
    unjudged = [*hidden, *(f"the file of arguments {a}" for a in arguments if a.startswith("@"))]
    unjudged += [f"{a}, of which a part is not shown" for a in arguments if _HIDDEN in a]
    unjudged += [a for a in rest if a.startswith("-") and a != "--"]
    unjudged += [f"-p {name}" for name in said.plugins if not _own(name)]
    unjudged += [f"-o {pair}" for pair in said.settings if not pair.startswith(_HARMLESS_SETTINGS)]
    return Asked(
        narrowed=tuple(flag for flag, name in NARROWING.items() if getattr(said, name)),
        faults=tuple(said.fault),
        seed=said.concord_seed,
        hypothesis_seed=said.hypothesis_seed,
        profile=said.profile,
        subject=said.subject,
        world_backend=said.world_backend or "",
        world_device=said.world_device or "",
        workers=said.numprocesses or "",
        stops_early=bool(said.exitfirst or said.maxfail),
        paths=tuple(a for a in rest if not a.startswith("-")),
        unjudged=tuple(unjudged),
    )


def _parser() -> _Parser:
    parser = _Parser(add_help=False, allow_abbrev=False)
    add: Any = parser.add_argument
    add("-k", dest="keyword", default="")
    add("-m", dest="markexpr", default="")
    for name in ("--deselect", "--ignore", "--ignore-glob", "--fault"):
        add(name, action="append", default=[])
    add("--lf", "--last-failed", dest="lf", action="store_true")
    add("--stepwise", "--sw", "--stepwise-skip", "--sw-skip", dest="stepwise", action="store_true")
    add("--concord-seed", default=DEFAULT_SEED)
    for name in ("--hypothesis-seed", "--profile", "--world-backend", "--world-device"):
        add(name)
    add("--subject", default="torch")
    add("-p", dest="plugins", action="append", default=[])
    add("-o", "--override-ini", dest="settings", action="append", default=[])
    add("-n", "--numprocesses", dest="numprocesses")
    add("--maxfail")
    add("-x", "--exitfirst", dest="exitfirst", action="store_true")
    for name in _HARMLESS_VALUES:
        add(name, action="append")
    for name in _HARMLESS_FLAGS:
        add(name, action="count")
    return parser


def _own(plugin: str) -> bool:
    if plugin.startswith("no:"):
        return not plugin[3:].startswith(("concord", "harness"))
    return plugin in _OWN_PLUGINS


def _covers(path: str, stack: str) -> bool:
    """Whether a path that was given may be a folder that has all tests of a stack; nobody knows where it begins."""
    parts = PurePosixPath(path).parts
    if "::" in path or path.endswith(".py"):
        return False
    if "suites" in parts:
        below = parts[len(parts) - parts[::-1].index("suites") :]
        return below in ((), (stack,))
    return True
