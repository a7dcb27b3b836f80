"""Agents that SLURM starts, one on each node of an allocation, as a job step."""

from __future__ import annotations

import json
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import IO

from harness.cluster.engines import EngineError
from harness.safe_io.shown import printable
from harness.worlds.processes import die_with_parent

_STARTING = 600.0
"""Seconds for an allocation and the start of its agents."""
_ENDING = 15.0
_ON_A_NODE = (
    'echo "$SLURM_STEP_NUM_TASKS"; exec "$0" -m harness.commands.agent --key - --towards "$SLURM_LAUNCH_NODE_IPADDR"'
)
_LABELLED = re.compile(r"\s*(\d+): ?(.*)")


class Slurm:
    """Agents on the nodes of the allocation in which pytest runs, or of one that srun makes.

    ``argument``: options for srun, such as ``--nodes=2 --partition=gpu``.

    Errors: :class:`~harness.cluster.engines.EngineError`.
    """

    def __init__(self, argument: str = "") -> None:
        found = shutil.which("srun")
        if found is None:
            raise EngineError("there is no srun: start pytest where SLURM's commands are")
        nodes = os.environ.get("SLURM_JOB_NUM_NODES")
        if nodes is None and not argument:
            raise EngineError("start pytest in an allocation (salloc), or say what srun asks for: slurm='--nodes=2'")
        allocated = [f"--nodes={nodes}", "--overlap"] if nodes is not None else []
        self._command = [
            *(found, "--ntasks-per-node=1", "--label", "--unbuffered", "--kill-on-bad-exit=0", *allocated),
            *(*shlex.split(argument), "sh", "-c", _ON_A_NODE, sys.executable),
        ]
        self._step: subprocess.Popen[bytes] | None = None
        self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115

    def start(self, key: str) -> Sequence[tuple[str, int]]:
        """Start the agents; see :class:`~harness.cluster.engines.Engine`."""
        ours = os.getpid()
        env = {name: value for name, value in os.environ.items() if name not in ("SLURM_NTASKS", "SLURM_NPROCS")}
        self._step = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env=env,
            start_new_session=True,  # Ctrl-C is pytest's
            preexec_fn=lambda: die_with_parent(ours, signal.SIGTERM),  # srun passes it on to the agents
        )
        assert self._step.stdin is not None
        try:
            self._step.stdin.write(key.encode())
            self._step.stdin.close()
        except OSError:
            pass  # srun has ended, and says why
        return self._heard(time.monotonic() + _STARTING)

    def _heard(self, until: float) -> list[tuple[str, int]]:
        """Return the addresses that the agents print."""
        from harness.cluster.agent import addresses

        assert self._step is not None
        assert self._step.stdout is not None
        text, count = b"", 0
        found: dict[int, tuple[str, int]] = {}
        while not count or len(found) < count:
            if not select.select([self._step.stdout], [], [], max(0.0, until - time.monotonic()))[0]:
                raise EngineError(f"{len(found)} agents had started after {_STARTING:g} s{self._why()}")
            more = os.read(self._step.stdout.fileno(), 65536)
            if not more:
                self._step.wait(_ENDING)
                raise EngineError(f"srun ended with status {self._step.returncode}{self._why()}")
            *lines, text = (text + more).split(b"\n")
            for line in lines:
                told = _LABELLED.fullmatch(line.decode(errors="replace"))
                if told is None:
                    continue
                if told[2].isdigit():
                    count = int(told[2])
                elif told[2].startswith("{"):
                    found[int(told[1])] = addresses(json.loads(told[2])["agent"])[0]
        return [found[node] for node in sorted(found)]

    def _why(self) -> str:
        """Return the end of what srun and the agents have said."""
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").split("\n")
        said = "; ".join(printable(line)[:300] for line in [line for line in lines if line.strip()][-4:])
        return f": {said}" if said else ""

    def stop(self) -> None:
        """End the agents; see :class:`~harness.cluster.engines.Engine`."""
        if self._step is not None:
            self._step.terminate()
            try:
                self._step.wait(_ENDING)
            except subprocess.TimeoutExpired:
                self._step.kill()
                self._step.wait()
            if self._step.stdout is not None:
                self._step.stdout.close()
        self._said.close()
