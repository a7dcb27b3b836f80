"""Agents that torchrun starts, one on each node: they find each other in its store, and node 0 runs the session.

So a session over several hosts is started like any distributed job, by Kubernetes or SLURM as by hand.  The store tells
addresses only.  It authenticates nobody, so the key comes from a file.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, MutableMapping, Sequence
from datetime import timedelta
from typing import Any

from harness.cluster import interfaces

LAUNCHER = "CONCORD_LAUNCHER"
"""The environment variable with the default of pytest's ``--launcher``."""
KEY = "CONCORD_AGENTS_KEY"
"""The environment variable with the file of the session's key, if ``--agents-key`` does not give it."""

_NEEDED = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
_OF_TORCHRUN = (*_NEEDED, "LOCAL_RANK", "LOCAL_WORLD_SIZE", "ROLE_NAME", "OMP_NUM_THREADS")
_BEGINNINGS = ("GROUP_", "ROLE_", "TORCHELASTIC_", "TORCH_NCCL_ASYNC_ERROR")
_TOGETHER = timedelta(minutes=5)
"""How long the nodes wait for each other."""


class NoTorchrun(RuntimeError):
    """The error for an agent that torchrun did not start, or whose store is not there; it says what to do."""


class Node:
    """This node of a torchrun job.

    Takes torchrun's variables out of ``environment``, because ranks and the session are not torchrun's.

    Errors: :class:`NoTorchrun`.
    """

    def __init__(self, environment: MutableMapping[str, str] = os.environ) -> None:
        missing = [name for name in _NEEDED if not environment.get(name)]
        if missing:
            raise NoTorchrun(
                f"{missing[0]} is not set: start it by torchrun --nproc-per-node=1 -m harness.commands.agent"
            )
        self.rank, self.size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        self._master = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        per_node = environment.get("LOCAL_WORLD_SIZE", "1")
        if per_node != "1":
            raise NoTorchrun(f"torchrun starts {per_node} agents on this node: give it --nproc-per-node=1")
        for name in list(environment):
            if name in _OF_TORCHRUN or name.startswith(_BEGINNINGS):
                del environment[name]
        self._session: subprocess.Popen[bytes] | None = None
        self._store: Any = None

    @property
    def address(self) -> str:
        """The address of this host on the way to node 0.  Errors: OSError."""
        return interfaces.towards(interfaces.looked_up(self._master[0]))

    def meet(self, address: str) -> list[str]:
        """Tell the others where this node's agent listens, and return the addresses of all, in the order of nodes.

        Errors: :class:`NoTorchrun` if torchrun's store is not there, or if a node does not come.
        """
        import torch.distributed as dist

        try:
            store = dist.TCPStore(*self._master, self.size, is_master=False, timeout=_TOGETHER)  # type: ignore[attr-defined]
            self._store = dist.PrefixStore("concord", store)  # type: ignore[attr-defined]
            self._store.set(f"agent {self.rank}", address)
            return [self._store.get(f"agent {node}").decode() for node in range(self.size)]
        except RuntimeError as e:
            raise NoTorchrun(f"not all of {self.size} nodes came: {str(e).splitlines()[0]}") from None

    def begin(self, command: Sequence[str], agents: Sequence[str], key: str) -> Callable[[], bool]:
        """Start the session on node 0; returns the function that says whether it has ended."""
        if self.rank == 0:
            env = {**os.environ, LAUNCHER: f"agents={','.join(agents)}", KEY: key}
            self._session = subprocess.Popen(list(command), env=env)
            return lambda: self._session is not None and self._session.poll() is not None
        return lambda: bool(self._store.check(["ended"]))

    def end(self) -> int:
        """Tell the other nodes that the session has ended; returns its exit code, or 0 on other nodes."""
        if self._session is None:
            return 0
        if self._session.poll() is None:  # the agent was told to end before
            self._session.terminate()
        code = self._session.wait()
        self._store.set("ended", str(code))
        return code if code >= 0 else 128 - code
