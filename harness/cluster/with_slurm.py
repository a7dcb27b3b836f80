"""Agents that SLURM starts, one on each node of an allocation, as a job step."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence

from harness.cluster.credentials import Key
from harness.cluster.engines import EngineError
from harness.cluster.interfaces import addresses
from harness.cluster.starter import Starter, StarterEnded

_QUEUED = 86400.0
"""Seconds for an allocation."""
_STARTING = 120.0
"""Seconds for the start of its agents."""
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
        self._step: Starter | None = None

    def start(self, key: Key) -> Sequence[tuple[str, int]]:
        """Start the agents; see :class:`~harness.cluster.engines.Engine`."""
        env = {name: value for name, value in os.environ.items() if name not in ("SLURM_NTASKS", "SLURM_NPROCS")}
        self._step = Starter(self._command, key, env)
        found: dict[int, tuple[str, int]] = {}
        count = 0
        try:
            for line in self._step.lines(_QUEUED):
                told = _LABELLED.fullmatch(line)
                if told is None:
                    continue
                if told[2].isdigit():  # the nodes are ours
                    count = int(told[2])
                    self._step.expect(_STARTING)
                elif told[2].startswith("{"):
                    found[int(told[1])] = addresses(json.loads(told[2])["agent"])[0]
                if count and len(found) == count:
                    break
        except StarterEnded as e:
            raise EngineError(str(e)) from None
        return [found[node] for node in sorted(found)]

    def stop(self) -> None:
        """End the agents: srun passes the signal on to them.  See :class:`~harness.cluster.engines.Engine`."""
        if self._step is not None:
            self._step.stop()
