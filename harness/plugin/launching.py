"""Where the ranks of a run start: on this host, or on the hosts of agents (``--launcher``)."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from harness.cluster.torchrun import KEY, LAUNCHER

if TYPE_CHECKING:
    from harness.cluster.launcher import Cluster
    from harness.worlds.handle import Launcher

LOCAL, AGENTS = "local", "agents"


def add_options(group: pytest.OptionGroup) -> None:
    """Register the options."""
    group.addoption(
        "--launcher",
        metavar="NAME",
        help="Where ranks start. local: on this host; agents=HOST:PORT,HOST:PORT...: on the hosts of these agents "
        f"(concord agent). Default: the environment variable {LAUNCHER}, or local.",
    )
    group.addoption(
        "--agents-key",
        metavar="FILE",
        help=f"The session's key, with which agents were started. Default: the environment variable {KEY}.",
    )
    group.addoption("--spread", action="store_true", help="Spread the ranks of every world over all hosts of agents.")


class Launching:
    """The launcher of a run. Errors of the constructor: UsageError, for options that can't work."""

    def __init__(self, config: pytest.Config) -> None:
        self._cluster = _cluster(config)
        self._spread = bool(config.getoption("spread"))
        if self._spread and self._cluster is None:
            raise pytest.UsageError("--spread: there is one host; give --launcher agents=HOST:PORT,HOST:PORT")
        if self._cluster is not None and config.getoption("rank_pdb") is not None:
            raise pytest.UsageError("--rank-pdb: a debugger on another host can't use this terminal")
        if self._cluster is not None and not hasattr(config, "workerinput") and not config.option.collectonly:
            _try_out(self._cluster)

    @property
    def remote(self) -> bool:
        """Whether ranks start by agents."""
        return self._cluster is not None

    @property
    def launcher(self) -> Callable[..., Launcher]:
        """The class or function that makes launchers, for a pool."""
        if self._cluster is None:
            from harness.worlds.local import LocalLauncher

            return LocalLauncher
        from harness.cluster.launcher import ClusterLauncher

        return functools.partial(ClusterLauncher, self._cluster)

    def hosts(self, size: int) -> int:
        """Return over how many hosts a world of that size is spread."""
        return min(size, len(self._cluster.agents)) if self._cluster is not None and self._spread else 1


def _cluster(config: pytest.Config) -> Cluster | None:
    """Return the hosts that the options name; None for this host alone."""
    asked = config.getoption("launcher") or os.environ.get(LAUNCHER) or LOCAL
    name, _, where = asked.partition("=")
    if name == LOCAL:
        return None
    if name != AGENTS:
        raise pytest.UsageError(f"--launcher {asked}: {LOCAL} or {AGENTS}=HOST:PORT,...")
    from harness.cluster import credentials
    from harness.cluster.agent import addresses
    from harness.cluster.launcher import Cluster

    file = config.getoption("agents_key") or os.environ.get(KEY, "")
    if not file:
        raise pytest.UsageError(f"--launcher {asked}: give the key of the agents: --agents-key FILE, or {KEY}")
    try:
        return Cluster(tuple(addresses(where)), credentials.read(Path(file)))
    except ValueError as e:  # of addresses, or a KeyProblem
        raise pytest.UsageError(f"--launcher {asked}: {e}") from None


def _try_out(cluster: Cluster) -> None:
    """Reject agents whose ranks can't be used before any test runs."""
    from harness.cluster.host import HostRefused
    from harness.cluster.launcher import check

    try:
        check(cluster)
    except HostRefused as e:
        raise pytest.UsageError(f"--launcher: {e}") from None
