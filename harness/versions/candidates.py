"""Candidates of a bisection: environments that exist, and those that a command makes."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.versions.environments import Environment, EnvironmentProblem, environment
from harness.versions.sessions import Say, streamed

_MADE = "made"
"""The name of the file that says that an environment is complete, and by which command."""


class NotMade(ValueError):
    """The error for a candidate that cannot be tested; it says why. The search skips it."""


@dataclass(frozen=True)
class Given:
    """An environment that exists."""

    environment: Environment

    @property
    def name(self) -> str:
        """The version of its torch, and where it is."""
        return f"{self.environment.torch} ({self.environment.folder})"

    @property
    def identity(self) -> Sequence[str]:
        """Strings that change if the candidate is another one."""
        return (str(self.environment.python), self.environment.torch, self.environment.commit)

    def make(self, say: Say) -> Environment:
        """Return the environment."""
        return self.environment

    def discard(self) -> None:
        """Keep the environment, which is not ours."""


@dataclass(frozen=True)
class Made:
    """An environment that a command makes."""

    name: str
    """Anything that the command understands: a version, a date, a commit."""
    command: str
    """A command of the shell, in which ``{candidate}`` and ``{folder}`` are replaced by quoted words."""
    folder: Path
    """The folder of its environment, which the command creates."""
    root: Path

    @property
    def identity(self) -> Sequence[str]:
        """Strings that change if the candidate is another one."""
        return (self.name, self.command)

    def make(self, say: Say) -> Environment:
        """Make the environment, unless it is made already, and return it. Errors: :class:`NotMade`, OSError."""
        marker = self.folder.with_name(f"{self.folder.name}.{_MADE}")
        if not marker.is_file():
            shutil.rmtree(self.folder, ignore_errors=True)  # what an interrupted command has left
            words = {"candidate": shlex.quote(self.name), "folder": shlex.quote(str(self.folder))}
            command = self.command
            for word, value in words.items():
                command = command.replace(f"{{{word}}}", value)
            log = self.folder.with_name(f"{self.folder.name}.log")
            status = streamed(["/bin/sh", "-c", command], self.root, None, log, say)
            if status:
                raise NotMade(f"the command that makes it exited with {status}; see {log}")
            marker.write_text(f"{command}\n")
        try:
            return environment(self.folder, self.root)
        except EnvironmentProblem as e:
            raise NotMade(str(e)) from None

    def discard(self) -> None:
        """Remove the environment."""
        self.folder.with_name(f"{self.folder.name}.{_MADE}").unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)


Candidate = Given | Made


def ordered(good: Environment, bad: Environment, others: Sequence[Environment]) -> list[Environment]:
    """Return the environments from ``good`` to ``bad``, in the order of their torch versions.

    If ``bad`` is older than ``good``, the order descends. Errors: :class:`EnvironmentProblem` if the two have the same
    torch, or if another is not between them.
    """
    low, high = sorted((good.version, bad.version))
    if low == high:
        raise EnvironmentProblem(f"--good and --bad have the same torch, {good.torch}: {good.folder} and {bad.folder}")
    for each in others:
        if not low < each.version < high:
            raise EnvironmentProblem(f"{each.folder}: torch {each.torch} is not between {good.torch} and {bad.torch}")
    between = sorted(others, key=lambda each: each.version, reverse=bad.version < good.version)
    return [good, *between, bad]


def names(text: str) -> list[str]:
    """Return the candidates of ``--candidates``: the lines of a file without comments, or words.

    Errors: OSError; ValueError if one is given twice or there is none.
    """
    file = Path(text)
    lines = file.read_text().splitlines() if file.is_file() else text.split()
    found = [name for line in lines if (name := line.partition("#")[0].strip())]
    twice = next((name for name in found if found.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"--candidates: {twice} is given twice")
    if not found:
        raise ValueError(f"--candidates {text!r}: it names no candidate")
    return found
