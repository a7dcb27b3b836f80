"""Where the ranks of a run start: on this host, or on the hosts of agents (``--launcher``)."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from harness.cluster.torchrun import KEY, LAUNCHER
from harness.plugin import numprocesses
from harness.plugin.arguments import path_of

if TYPE_CHECKING:
    from harness.cluster.launcher import Cluster, Found, Wanted
    from harness.devices import Inventory
    from harness.plugin.profiles import Profiles
    from harness.worlds.handle import Launcher

LOCAL = "local"
_INPUT = "concord_cluster"
_NO_TESTS = ("collectonly", "help", "markers", "showfixtures", "show_fixtures_per_test", "cacheshow")
"""Options with which pytest runs no test, so that nothing is started."""


def add_options(group: pytest.OptionGroup) -> None:
    """Register the options."""
    group.addoption(
        "--launcher",
        metavar="NAME",
        help="Where ranks start. local: on this host; agents=HOST:PORT,HOST:PORT...: on the hosts of these agents "
        "(concord agent); ray, ray=ADDRESS: on the nodes of a Ray cluster; slurm, slurm='OPTIONS OF SRUN': on those of "
        f"an allocation. Default: the environment variable {LAUNCHER}, or local.",
    )
    group.addoption(
        "--agents-key",
        metavar="FILE",
        help=f"The session's key, with which agents were started. Default: the environment variable {KEY}.",
    )
    group.addoption("--spread", action="store_true", help="Spread the ranks of every world over all hosts of agents.")


class Launching:
    """The launcher of a run, and the agents that an engine starts for it.

    Errors of the constructor: UsageError, for options that can't work.
    """

    def __init__(self, config: pytest.Config, profiles: Profiles) -> None:
        self.agents = ""
        """How many agents there are, and on how many machines; empty if ranks start on this host alone."""
        self._spread = bool(config.getoption("spread"))
        self._cluster: Cluster | None = None
        self._slots: tuple[str, ...] = ()
        self._accelerators: Inventory | None = None
        self._device_name = ""
        asked = config.getoption("launcher") or os.environ.get(LAUNCHER) or LOCAL
        if asked == LOCAL:
            _check_imports(config, profiles)
            if self._spread:
                raise pytest.UsageError("--spread: there is one host; give --launcher agents=HOST:PORT,HOST:PORT")
            return
        if config.getoption("rank_pdb") is not None:
            raise pytest.UsageError("--rank-pdb: a debugger on another host can't use this terminal")
        told = getattr(config, "workerinput", {}).get(_INPUT)
        if told is not None:
            from harness.cluster.credentials import Key
            from harness.cluster.launcher import Cluster

            agents, key, self.agents, slots, accelerators, self._device_name = told
            self._slots = tuple(slots)
            if accelerators:
                from harness.devices import Inventory

                kind, *columns = accelerators
                self._accelerators = Inventory(kind, *map(tuple, columns))
            self._cluster = Cluster(tuple((host, port) for host, port in agents), Key(key))
            profiles.elsewhere = self
        elif _runs_tests(config):
            self._cluster = _cluster(config, asked)
            found = _tried(self._cluster, _wanted(config, profiles))
            self.agents, self._slots = found.described, found.slots
            self._accelerators, self._device_name = found.accelerators, found.device_name
            there = self.inventory(None)
            shares = 1 if there.on_host else numprocesses.worlds_per_device(config)
            numprocesses.across_hosts(config, len(there.devices) * shares)
            profiles.elsewhere = self

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        if self._cluster is not None:
            agents = [list(address) for address in self._cluster.agents]
            there = self._accelerators
            columns = [there.kind, *map(list, (there.devices, there.keys, there.hosts))] if there is not None else []
            node.workerinput[_INPUT] = (
                agents,
                str(self._cluster.key),
                self.agents,
                list(self._slots),
                columns,
                self._device_name,
            )

    def pytest_report_header(self) -> str | None:
        return f"concord: ranks are started by {self.agents}" if self.agents else None

    @property
    def remote(self) -> bool:
        """Whether ranks start by agents."""
        return self._cluster is not None

    def inventory(self, kind: str | None) -> Inventory:
        """Return the devices of a type on all hosts of agents; None: of whichever there is.

        On ``cpu``, the cores of their machines, as slots for worlds.  Errors: NoDeviceError.
        """
        from harness.devices import NoDeviceError, slots_on

        there = self._accelerators
        if there is not None and kind in (None, there.kind):
            return there
        if kind in (None, "cpu"):
            return slots_on(self._slots)
        raise NoDeviceError(
            kind or "", f"the hosts of agents have {there.kind if there is not None else 'cpu'} devices"
        )

    @property
    def accelerators(self) -> dict[str, str]:
        """The name of the first accelerator of agents' hosts, and how many there are; empty if there are none."""
        if self._accelerators is None:
            return {}
        name, count = self._device_name, len(self._accelerators.devices)
        return {"device": name, "accelerator": f"{count} of {name} on {self.most_hosts} hosts"}

    def device_name(self, kind: str) -> str:
        """Return what the driver calls the first accelerator of a type, or the type."""
        there = self._accelerators
        return self._device_name if there is not None and there.kind == kind else kind

    @property
    def launcher(self) -> Callable[..., Launcher]:
        """The class or function that makes launchers, for a pool."""
        if self._cluster is None:
            from harness.worlds.local import LocalLauncher

            return LocalLauncher
        from harness.cluster.launcher import ClusterLauncher

        return functools.partial(ClusterLauncher, self._cluster)

    @property
    def most_hosts(self) -> int:
        """The number of hosts that a world can be spread over."""
        return len(self._cluster.agents) if self._cluster is not None else 1

    def hosts(self, size: int, inventory: Inventory) -> Sequence[int]:
        """Return over how many hosts a world of that size may be spread, unless its test says so; the best first."""
        most = min(size, self.most_hosts)
        if inventory.on_host:
            return (most if self._spread else 1,)
        return range(most, 0, -1) if self._spread else range(1, most + 1)


def _cluster(config: pytest.Config, asked: str) -> Cluster:
    """Return the hosts that the options name, with the agents of an engine, which end with the session."""
    try:
        from harness.cluster.starting import cluster_of

        return cluster_of(asked, config.getoption("agents_key") or "", config.add_cleanup)
    except (ValueError, ImportError) as e:  # what is given can't be used, or cryptography is missing
        raise pytest.UsageError(f"--launcher {asked}: {e}") from None


def _wanted(config: pytest.Config, profiles: Profiles) -> Wanted | None:
    """Return which accelerators this run looks for on the hosts of agents; None for none."""
    from harness.cluster.launcher import Wanted

    profile = profiles.explicit
    kind = config.getoption("world_device") or (profile.device if profile is not None else "")
    if kind == "cpu":
        return None
    if not kind:
        import torch

        if torch.accelerator.current_accelerator() is None:  # it was built for none
            return None
    return Wanted(kind, *profiles.ways_to(kind or None))


def _tried(cluster: Cluster, wanted: Wanted | None) -> Found:
    """Reject agents whose ranks can't be used before any test runs; returns what they are."""
    from harness.cluster.host import HostRefused
    from harness.cluster.launcher import check

    try:
        return check(cluster, wanted)
    except HostRefused as e:
        raise pytest.UsageError(f"--launcher: {e}") from None


def _runs_tests(config: pytest.Config) -> bool:
    return not any(config.getoption(name, False) for name in _NO_TESTS)


def _check_imports(config: pytest.Config, profiles: Profiles) -> None:
    """Reject a profile whose modules this host lacks, since each rank would fail at them.

    A module may also be a file beside the tests, whose folder pytest adds to the path later.
    """
    profile = profiles.explicit
    if profile is None or hasattr(config, "workerinput") or not _runs_tests(config):
        return
    given = [path_of(config, argument) for argument in config.args]
    beside = {config.rootpath, *given, *(path.parent for path in given)}
    for name in dict.fromkeys(module.partition(".")[0] for module in profile.imports):
        found = importlib.util.find_spec(name) or any(
            (folder / f"{name}{end}").exists() for folder in beside for end in ("", ".py")
        )
        if not found:
            raise pytest.UsageError(
                f"profile {profile.name} ({profile.file}): imports: there is no module {name} in this environment: "
                "install its package, or correct the name"
            )
