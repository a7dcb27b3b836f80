"""Agents that Ray starts, one on each node of a cluster.

Ray is used by a process of its own: it ends a process that can't reach the cluster, and that must not be pytest's.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Sequence

from harness.cluster.credentials import Key
from harness.cluster.engines import EngineError
from harness.cluster.interfaces import addresses
from harness.cluster.starter import Starter, StarterEnded

_QUEUED = 86400.0
"""Seconds for the agents; the nodes may be in use."""


class Ray:
    """Agents on all nodes of a Ray cluster that have CPUs.

    ``argument``: the cluster's address, as ``ray.init`` takes it; empty: that in ``RAY_ADDRESS``, or the one that
    runs on this machine, or a new one.

    Errors: :class:`~harness.cluster.engines.EngineError`.
    """

    def __init__(self, argument: str = "") -> None:
        if importlib.util.find_spec("ray") is None:
            raise EngineError("Ray is not installed: pip install 'concord-harness[ray]'")
        self._address = argument or os.environ.get("RAY_ADDRESS", "")
        self._driver: Starter | None = None

    def start(self, key: Key) -> Sequence[tuple[str, int]]:
        """Start the agents; see :class:`~harness.cluster.engines.Engine`."""
        command = [sys.executable, "-m", "harness.cluster.ray_driver", self._address]
        env = {"RAY_USAGE_STATS_ENABLED": "0", **os.environ}
        self._driver = Starter(command, Key(json.dumps(key) + "\n"), env, kept=True)
        try:
            for line in self._driver.lines(_QUEUED):
                told = json.loads(line) if line.startswith("{") else {}
                if "waiting" in told:
                    print(f"concord: {told['waiting']}", file=sys.stderr)
                if "wrong" in told:
                    raise EngineError(str(told["wrong"]))
                if "agents" in told:
                    return [addresses(each)[0] for each in told["agents"]]
        except StarterEnded as e:
            raise EngineError(f"Ray did not start the agents: {e}") from None
        raise AssertionError("lines of a starter end with an error")

    def stop(self) -> None:
        """End the agents; see :class:`~harness.cluster.engines.Engine`."""
        if self._driver is not None:
            self._driver.stop()
