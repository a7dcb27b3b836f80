"""Where a process runs: on this machine, or on the host of an agent, where another process here stands for it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_ANOTHER_PYTHON = "import os, sys; os.execv(sys.argv[1], sys.argv[1:])"


@dataclass(frozen=True)
class Place:
    """Where a process runs."""

    agent: tuple[str, int] | None = None
    """The address of the agent on its host; None: here."""
    key: str = field(default="", repr=False)
    """The key of the agent's session."""

    def __str__(self) -> str:
        return f"the host of the agent at {self.agent[0]} port {self.agent[1]}" if self.agent else "this machine"


def started_there(
    place: Place,
    arguments: Sequence[str],
    *,
    cwd: Path,
    variables: Mapping[str, str],
    stream: str = "",
    python: Path | None = None,
    **how: Any,
) -> subprocess.Popen[Any]:
    """Start Python on an agent's host; returns the process here that stands for it (:mod:`harness.cluster.errand`).

    ``arguments``: of Python, as for :class:`~harness.cluster.errands.Errand`; ``cwd``: its folder, here and there;
    ``variables``: what it gets besides the agent's environment; ``stream``: the address of the socket here to which its
    stream goes; ``python``: the Python there, if it is not the agent's; ``how``: for :class:`subprocess.Popen`.
    """
    assert place.agent is not None
    host, port = place.agent
    stands = [sys.executable, "-m", "harness.cluster.errand", host, str(port), str(cwd), json.dumps(dict(variables))]
    other = ["-c", _ANOTHER_PYTHON, str(python)] if python is not None else []
    process = subprocess.Popen([*stands, stream, *other, *arguments], cwd=cwd, stdin=subprocess.PIPE, **how)
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended, and says why
        os.write(process.stdin.fileno(), place.key.encode())  # a pipe takes as much at once
    process.stdin.close()
    return process
