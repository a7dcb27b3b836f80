"""The process that holds agents on the nodes of a Ray cluster: ``python -m harness.cluster.ray_driver [ADDRESS]``.

Reads the session's key from standard input, a line of JSON.  Prints lines of JSON: ``waiting``, ``wrong`` or
``agents``.  Ends at the end of standard input or at SIGTERM, and all agents with it.

A placement group reserves the nodes for as long as it runs, so that sessions on one cluster take turns.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from typing import Any

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from harness.cluster.credentials import Key
from harness.cluster.starter import Starter, StarterEnded
from harness.safe_io.shown import printable

_STARTING = 120.0
"""Seconds for the agents, once their nodes are free."""
_SAYING = 10.0


class Holder:
    """The actor on a node: holds an agent, which the kernel tells to end if the actor dies."""

    def __init__(self) -> None:
        self._agent: Starter | None = None

    def start(self, key: str) -> str:
        """Start the agent; returns its address.  Errors: RuntimeError if it does not start."""
        here = ray.util.get_node_ip_address()
        command = [sys.executable, "-m", "harness.commands.agent", "--key", "-", "--listen", here]
        self._agent = Starter(command, Key(key), os.environ)
        try:
            return str(json.loads(next(self._agent.lines(_STARTING)))["agent"])
        except StarterEnded as e:
            raise RuntimeError(f"the agent on {here}: {e}") from None

    def stop(self) -> None:
        """End the agent, and its ranks."""
        if self._agent is not None:
            self._agent.stop()


def main(address: str) -> None:
    """Hold the agents until standard input ends."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    key = json.loads(sys.stdin.readline())
    holders: list[Any] = []
    try:
        if address:
            ray.init(address=address, log_to_driver=False)
        else:
            ray.init(log_to_driver=False, include_dashboard=False)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # Ray has one of its own
        group = _reserved()
        for number in range(group.bundle_count):
            where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
            holders.append(ray.remote(num_cpus=1, scheduling_strategy=where)(Holder).remote())
        _say(agents=ray.get([holder.start.remote(key) for holder in holders], timeout=_STARTING))
        sys.stdin.read()
    except (ray.exceptions.RayError, ConnectionError, RuntimeError, ValueError) as e:
        _say(wrong=f"Ray did not start the agents: {_line(e)}")
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with contextlib.suppress(Exception):  # nodes may have gone
            ray.get([holder.stop.remote() for holder in holders], timeout=13)
        ray.shutdown()  # with it, the placement group ends


def _reserved() -> Any:
    """Reserve the CPUs of every node, however long that takes.  Errors: ValueError if none has any."""
    cpus = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    bundles = [{"CPU": count} for count in cpus if count]
    if not bundles:
        raise ValueError("no node of the cluster has CPUs")
    group = placement_group(bundles, strategy="STRICT_SPREAD", name=f"concord {os.getpid()}")
    if not group.wait(_SAYING):
        _say(waiting=f"waiting for the CPUs of {len(bundles)} Ray nodes, which others use")
        while not group.wait(60):
            pass
    return group


def _say(**told: object) -> None:
    print(json.dumps(told), flush=True)


def _line(error: BaseException) -> str:
    """Return the line of an error that says what is wrong, which in Ray's errors is the last."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return printable(lines[-1])[:300]


if __name__ == "__main__":
    main(sys.argv[1])
