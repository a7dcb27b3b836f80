"""The hosts that a command line names: agents that run already, or those of an engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from harness.cluster import credentials
from harness.cluster.engines import EngineError, engine, started
from harness.cluster.interfaces import addresses
from harness.cluster.launcher import Cluster
from harness.cluster.torchrun import KEY

_AGENTS = "agents"


def cluster_of(asked: str, key_file: str, at_end: Callable[[Callable[[], None]], object]) -> Cluster:
    """Return the hosts that ``--launcher`` and ``--agents-key`` name.  An engine's agents are started.

    ``at_end``: called with what ends them.  Errors: ValueError, which says what to do.
    """
    name, _, argument = asked.partition("=")
    file = key_file or os.environ.get(KEY, "")
    if name == _AGENTS and not file:
        raise ValueError(f"give the key of the agents: --agents-key FILE, or {KEY}")
    key = credentials.read(Path(file)) if file else credentials.made()
    agents: Sequence[tuple[str, int]]
    if name == _AGENTS:
        agents = addresses(argument)
    else:
        try:
            starting = engine(name, argument)
            at_end(starting.stop)
            agents = started(starting, key)
        except EngineError as e:
            raise ValueError(str(e)) from None
    return Cluster(tuple(agents), key)
