"""A pytest session in an environment. Its results are kept, and a session that was cut off is continued."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.cluster.elsewhere import Place, started_there
from harness.cluster.errands import HOST_LOST, REFUSED
from harness.provenance import suite_hash
from harness.redaction import Redactor, recorded
from harness.results import ResultsError, TestResult, read
from harness.safe_io.writing import append_or_nothing, new_folder, own_folder, write_whole
from harness.versions.environments import Environment, variables

Say = Callable[[str], object]

RESULTS = "results.jsonl"
RUN = "run"
"""The beginning of the names of the folders that have a session's results."""
_FINISHED = (0, 1)
"""Exit statuses of a pytest session that ran what it collected: all passed, or some failed."""
_SUFFIXES = (".py", ".json", ".toml")
_OF_PYTHON = ("PYTHONPATH", "PATH", "VIRTUAL_ENV")
"""Variables with which an environment finds its modules, on another host, too."""
HERE = Place()
_LAST = 60.0  # seconds that an interrupted session has to write its results


class HostGone(Exception):
    """The error for a session whose host has gone, or can't be used; it says which."""


@dataclass(frozen=True)
class Session:
    """The results of some tests in one environment."""

    environment: Environment
    folder: Path
    status: int | None = None
    """The exit status of pytest; None if it never ended."""
    tests: dict[str, TestResult] = field(default_factory=dict)
    """The result of each test, by node id."""
    results: tuple[Path, ...] = ()
    problem: str = ""
    """Why the session is not whole; empty if it is."""

    @property
    def whole(self) -> bool:
        """Whether every test that was chosen has run."""
        return not self.problem


def digest(root: Path, arguments: Sequence[str]) -> str:
    """Return what identifies the tests of a session: their text and the harness's, the arguments, the settings.

    It covers the suite (:func:`harness.provenance.suite_hash`), ``fixtures``, the files and folders that arguments
    name, and the environment variables that results record.
    """
    named = (root / argument.partition("::")[0].rpartition("=")[2] for argument in arguments)
    files = {path for place in (root / "fixtures", *named) for path in _files(place)}
    texts = {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(files)}
    settings = {name: shown for name, value in sorted(os.environ.items()) if (shown := recorded(name, value))}
    described = json.dumps([suite_hash(root), list(arguments), texts, settings])
    return hashlib.sha256(described.encode(errors="replace")).hexdigest()


def _files(place: Path) -> Iterator[Path]:
    if place.is_file():
        yield place
    elif place.is_dir():
        yield from (path for path in place.rglob("*") if path.suffix in _SUFFIXES and path.is_file())


def kept_in(above: Path, environment: Environment, identity: str) -> Path:
    """Return the folder of the session that has this identity (:func:`digest`) in this environment."""
    described = json.dumps([identity, str(environment.python), environment.torch, environment.commit])
    short = hashlib.sha256(described.encode(errors="replace")).hexdigest()[:12]
    return above / f"{environment.torch.replace('/', '_')}-{short}"


def look(environment: Environment, folder: Path, suite: str) -> Session:
    """Return the session that a folder has, whole or not.

    ``suite``: the suite hash that its results must have; another harness or suite would give other results.
    """
    tests: dict[str, TestResult] = {}
    results = tuple(sorted(folder.glob(f"{RUN}*/*/{RESULTS}"), key=lambda path: path.stat().st_mtime_ns))
    status: int | None = None
    problem = "there are no results"
    for path in results:
        try:
            run = read(path)
        except ResultsError as e:
            problem = str(e)
            continue
        if run.header.suite_hash != suite:
            problem = f"{path}: the suite of these results is another; it changed, or another Concord ran"
            continue
        tests |= {name: test for name, test in run.tests.items() if test.verdict != "not-run" or name not in tests}
        status, problem = run.exit_status, ""
        if not run.complete:
            problem = "it was cut off"
        elif run.exit_status not in _FINISHED:
            problem = "it ended early"
    if not problem and not tests:
        problem = "no test was chosen"
    return Session(environment, folder, status, tests, results, problem)


def run(
    environment: Environment, root: Path, arguments: Sequence[str], folder: Path, say: Say, place: Place = HERE
) -> Session:
    """Run the tests that have no result in the folder yet, and return the session with all of them.

    ``say``: takes each line of pytest's output, without credentials. ``log.txt`` in the folder has them, too;
    ``place``: where it runs. Another host must have the same tree and environment in the same folders, and see what is
    written there. Errors: OSError; KeyboardInterrupt, after pytest has written what it has; :class:`HostGone`.
    """
    suite = suite_hash(root)
    before = look(environment, folder, suite)
    if before.whole:
        return before
    own_folder(folder)
    into = new_folder(folder / RUN)
    options = ["-m", "pytest", *arguments, *_without_done(before, folder)]
    options += ["--concord-results", str(into), "-o", f"cache_dir={folder / 'cache'}"]
    log = folder / "log.txt"
    env = variables(environment.python, root)
    status = streamed([str(environment.python), *options], root, env, log, say, place)
    if place.agent and status in (HOST_LOST, REFUSED):
        raise HostGone(f"{place} has gone or can't be used, see {log}")
    after = look(environment, folder, suite)
    if after.whole:
        return after
    return dataclasses.replace(
        after, status=status, problem=f"{after.problem} (pytest exited with {status}, see {log})"
    )


def _without_done(before: Session, folder: Path) -> list[str]:
    """Return the argument with which pytest leaves out the tests that have a result already.

    pytest deselects by the beginnings of node ids, so a test whose id is the beginning of another's runs again.
    """
    missing = [name for name, test in before.tests.items() if test.verdict == "not-run"]
    done = [name for name, test in before.tests.items() if test.verdict != "not-run"]
    apart = [name for name in done if not any(other.startswith(name) for other in missing) and "\n" not in name]
    if not missing or not apart:
        return []
    file = folder / "done.txt"
    write_whole(file, "".join(f"--deselect={name}\n" for name in apart))
    return [f"@{file}"]


def _begun(
    command: Sequence[str], root: Path, env: dict[str, str] | None, place: Place, how: dict[str, Any]
) -> subprocess.Popen[str]:
    if place.agent is None:
        return subprocess.Popen(command, cwd=root, env=env, stdin=subprocess.DEVNULL, **how)
    settings = {name: value for name, value in (env or {}).items() if name in _OF_PYTHON or recorded(name, value)}
    return started_there(place, command[1:], cwd=root, variables=settings, python=Path(command[0]), **how)


def streamed(
    command: Sequence[str], root: Path, env: dict[str, str] | None, log: Path, say: Say, place: Place = HERE
) -> int:
    """Run a command, pass its output on line by line and append it to a log, without credentials.

    ``place``: where; on another host, the command must begin with a Python. Returns its exit status. Errors: OSError.
    """
    without = Redactor({**os.environ, **(env or {})}, sys.argv[1:])
    log.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
        with _begun(command, root, env, place, how) as process:
            assert process.stdout is not None
            try:
                for text in map(without, process.stdout):
                    say(text)
                    append_or_nothing(descriptor, text.encode(errors="replace"))
            except KeyboardInterrupt:  # the terminal has interrupted the session, too
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_LAST)
                raise
        return process.returncode
    finally:
        os.close(descriptor)
