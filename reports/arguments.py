"""The parser of a run's command line, which shows what was asked for, to be compared with the results.

Options are judged by an allow-list: an option that is not known to leave verdicts unchanged is reported as unjudged.
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
"""Options that leave tests out, by their names in results, with their names here."""

_HARMLESS_VALUES = (
    *("--maxprocesses", "--max-worker-restart", "--dist", "--tb", "--durations"),
    *("--durations-min", "--verbosity", "-r", "--color", "--code-highlight", "--show-capture", "--capture"),
    *("--junitxml", "--junit-xml", "--junit-prefix", "--basetemp", "--log-level", "--log-cli-level", "--log-file"),
    *("--log-file-level", "--timeout", "--timeout-method", "--session-timeout"),
    *("--hypothesis-verbosity", "--rank-network", "--concord-results", "--world-timeout", "--ranks-per-device"),
    *("--perf-rounds", "--perf-visits", "--perf-seconds", "--perf-largest", "--suite"),
    *("--agents-key", "--launcher"),
)
_HARMLESS_FLAGS = (
    *("-v", "--verbose", "-q", "--quiet", "-s", "-l", "--showlocals", "--no-header", "--no-summary", "--full-trace"),
    *("--strict-markers", "--strict-config", "--strict", "--cache-clear", "--ff", "--failed-first", "--nf"),
    *("--new-first", "--hypothesis-show-statistics", "--thorough", "--start-over"),
    *("--force-short-summary", "--spread"),
)
_HARMLESS_SETTINGS = ("log_", "junit_", "console_output_style", "cache_dir", "tmp_path_", "faulthandler_", "timeout")
"""The beginnings of keys for ``-o`` that leave verdicts unchanged."""
_OWN_PLUGINS = {
    *("harness.plugin", "xdist", "xdist.plugin", "timeout", "pytest_timeout", "benchmark", "pytest_benchmark.plugin"),
    *("hypothesispytest", "_hypothesis_pytestplugin", "pytester"),
}
_BENCHMARKING = "--benchmark-"
_TIMER = "--benchmark-timer"
"""An option that imports the module that it names."""
_HIDDEN = "***"
"""The text that replaces a possible secret in results."""
_NOT_SHOWN = "set, not shown"
"""The text in results for a variable whose value might contain a secret."""


@dataclass(frozen=True)
class Asked:
    """The requests of a command line."""

    narrowed: tuple[str, ...] = ()
    """The options of :data:`NARROWING` that were given."""
    faults: tuple[str, ...] = ()
    seed: str = DEFAULT_SEED
    hypothesis_seed: str | None = None
    challenge: bool = False
    """Whether a challenge was given, which decides the seed."""
    profile: str | None = None
    subject: str = "torch"
    world_backend: str = ""
    world_device: str = ""
    workers: str = ""
    """The value of ``-n``; empty if it was not given."""
    stops_early: bool = False
    """Whether the run should end after some number of failures."""
    paths: tuple[str, ...] = ()
    unjudged: tuple[str, ...] = ()
    """Arguments that may change verdicts in an unknown way."""
    malformed: str = ""
    """Why it is not a command line of pytest; empty if it is one."""

    def may_cover(self, stack: str) -> bool:
        """Whether every test of a stack may have been asked for."""
        return not self.paths or any(_covers(path, stack) for path in self.paths)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def _is_benchmarking(argument: str) -> bool:
    """Whether an argument belongs to pytest-benchmark, or is a file of arguments, which is judged separately."""
    return argument.startswith("@") or (argument.startswith(_BENCHMARKING) and not argument.startswith(_TIMER))


def asked(arguments: Sequence[str], environment: Mapping[str, str]) -> Asked:
    """Parse the command line of a run.

    ``environment``: as in results; the arguments in its ``PYTEST_ADDOPTS`` come first.
    """
    added = environment.get("variable PYTEST_ADDOPTS", "")
    hidden = [f"PYTEST_ADDOPTS ({added})"] if added == _NOT_SHOWN else []
    try:
        arguments = [*(() if hidden else shlex.split(added)), *arguments]
        options, others = _parser().parse_known_args([a for a in arguments if not _is_benchmarking(a)])
    except ValueError as e:
        return Asked(malformed=str(e))
    unjudged = [*hidden, *(f"the file of arguments {a}" for a in arguments if a.startswith("@"))]
    unjudged += [f"{a}, of which a part is not shown" for a in arguments if _HIDDEN in a]
    unjudged += [a for a in others if a.startswith("-") and a != "--"]
    unjudged += [f"-p {name}" for name in options.plugins if not _own(name)]
    unjudged += [f"-o {pair}" for pair in options.settings if not pair.startswith(_HARMLESS_SETTINGS)]
    return Asked(
        narrowed=tuple(flag for flag, name in NARROWING.items() if getattr(options, name)),
        faults=tuple(options.fault),
        seed=options.concord_seed,
        hypothesis_seed=options.hypothesis_seed,
        challenge=options.concord_challenge is not None,
        profile=options.profile,
        subject=options.subject,
        world_backend=options.world_backend or "",
        world_device=options.world_device or "",
        workers=options.numprocesses or "",
        stops_early=bool(options.exitfirst or options.maxfail),
        paths=tuple(a for a in others if not a.startswith("-")),
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
    for name in ("--concord-challenge", "--hypothesis-seed", "--profile", "--world-backend", "--world-device"):
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
    """Whether a path may be a folder with all tests of a stack; it is unknown to what a path is relative."""
    parts = PurePosixPath(path).parts
    if "::" in path or path.endswith(".py"):
        return False
    if "suites" in parts:
        below = parts[len(parts) - parts[::-1].index("suites") :]
        return below in ((), (stack,))
    return True
