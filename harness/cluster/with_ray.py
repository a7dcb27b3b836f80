"""Agents that Ray starts, one on each node of a cluster.

A placement group reserves the nodes for as long as the session lasts, so that sessions on one cluster take turns.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from harness.cluster.engines import EngineError
from harness.safe_io.shown import printable
from harness.worlds.processes import die_with_parent

_STARTING = 120.0
"""Seconds for the agents, once their nodes are free."""
_RESERVING = 3600.0
"""Seconds to wait for nodes that others use."""
_SAYING = 10.0


class Ray:
    """Agents on all nodes of a Ray cluster that have CPUs.

    ``argument``: the cluster's address, as ``ray.init`` takes it; empty: that in ``RAY_ADDRESS``, or a new cluster on
    this machine.

    Errors: :class:`~harness.cluster.engines.EngineError`.
    """

    def __init__(self, argument: str = "") -> None:
        try:
            import ray
        except ImportError as e:
            raise EngineError(f"Ray can't be imported ({e}): pip install 'concord-harness[ray]'") from None
        self._ray = ray
        self._address = argument or os.environ.get("RAY_ADDRESS") or None
        self._group: Any = None
        self._holders: list[Any] = []

    def start(self, key: str) -> Sequence[tuple[str, int]]:
        """Start the agents; see :class:`~harness.cluster.engines.Engine`."""
        from harness.cluster.agent import addresses

        ray = self._ray
        try:
            ray.init(address=self._address, log_to_driver=False, include_dashboard=False if not self._address else None)
        except (ConnectionError, RuntimeError, ValueError) as e:
            raise EngineError(f"no Ray cluster: {_first_line(e)}") from None
        try:
            bundles = self._reserve()
            for number in range(bundles):
                self._holders.append(self._held(number))
            asked = [holder.start.remote(key) for holder in self._holders]
            return [addresses(line)[0] for line in ray.get(asked, timeout=_STARTING)]
        except (ray.exceptions.RayError, ValueError) as e:
            raise EngineError(f"Ray did not start the agents: {_first_line(e)}") from None

    def _reserve(self) -> int:
        """Reserve the CPUs of every node; returns how many nodes.  Says once that it waits."""
        from ray.util.placement_group import placement_group

        cpus = [int(node["Resources"].get("CPU", 0)) for node in self._ray.nodes() if node["Alive"]]
        bundles = [{"CPU": count} for count in cpus if count]
        if not bundles:
            raise EngineError("no node of the Ray cluster has CPUs")
        self._group = placement_group(bundles, strategy="STRICT_SPREAD", name=f"concord {os.getpid()}")
        until = time.monotonic() + _RESERVING
        if not self._group.wait(_SAYING):
            print(f"concord: waiting for the CPUs of {len(bundles)} Ray nodes, which others use", file=sys.stderr)
            if not self._group.wait(until - time.monotonic()):
                raise EngineError(f"the CPUs of {len(bundles)} Ray nodes were not free for {_RESERVING:g} s")
        return len(bundles)

    def _held(self, bundle: int) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        where = PlacementGroupSchedulingStrategy(placement_group=self._group, placement_group_bundle_index=bundle)
        return self._ray.remote(num_cpus=1, scheduling_strategy=where)(_Holder).remote()

    def stop(self) -> None:
        """End the agents; see :class:`~harness.cluster.engines.Engine`."""
        with contextlib.suppress(Exception):  # nodes may have gone
            self._ray.get([holder.stop.remote() for holder in self._holders], timeout=15)
        self._holders.clear()
        self._ray.shutdown()  # with it, the placement group ends


class _Holder:
    """The actor on a node: holds an agent, which the kernel kills if the actor dies."""

    def __init__(self) -> None:
        self._agent: subprocess.Popen[str] | None = None

    def start(self, key: str) -> str:
        """Start the agent; returns its address.  Errors: RuntimeError with what it said."""
        import ray

        ours = os.getpid()
        command = [sys.executable, "-m", "harness.commands.agent", "--key", "-"]
        self._agent = subprocess.Popen(
            [*command, "--listen", ray.util.get_node_ip_address()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None,
            text=True,
            preexec_fn=lambda: die_with_parent(ours),
        )
        assert self._agent.stdin is not None
        assert self._agent.stdout is not None
        self._agent.stdin.write(key)
        self._agent.stdin.close()
        line = self._agent.stdout.readline()
        if not line:
            raise RuntimeError(f"the agent on {ray.util.get_node_ip_address()} ended with {self._agent.wait()}")
        return str(json.loads(line)["agent"])

    def stop(self) -> None:
        """End the agent, and its ranks."""
        if self._agent is not None:
            self._agent.terminate()
            self._agent.wait(12)


def _first_line(error: BaseException) -> str:
    """Return the line of an error that says what is wrong; Ray's begin with where it was raised."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()] or [type(error).__name__]
    last = lines[-1] if lines[0].startswith("\x1b") or "ray::" in lines[0] else lines[0]
    return printable(last)[:300]
