"""The launcher of ranks on several hosts, through their agents."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.cluster import messages
from harness.cluster.credentials import Key
from harness.cluster.facts import accelerators, facts, passed_on, slots
from harness.cluster.host import CONNECTING, Host, HostRefused, connect, wait
from harness.cluster.remote_rank import RemoteRank
from harness.devices import Inventory
from harness.profiles.vocabulary import FORK
from harness.safe_io.shown import printable
from harness.worlds.handle import Clock, Heard, News, RankHandle
from harness.worlds.launch import LaunchError, ServerLost
from harness.worlds.network import Refusal
from harness.worlds.rank import RankSetup

_LOOKING = 1.0
"""Seconds to wait for hosts that are asked about their ranks."""
_STARTING = 120.0
"""Seconds for the first ranks of a host, whose server imports torch first."""
_LONGEST_SILENCE = 1.0


@dataclass(frozen=True)
class Cluster:
    """The hosts of a session: where their agents listen, and the key that they all have."""

    agents: tuple[tuple[str, int], ...]
    key: Key = dataclasses.field(repr=False)
    patience: float = 10.0
    """A host that is silent for so many seconds is given up."""

    def __post_init__(self) -> None:
        if not self.agents:
            raise ValueError("a cluster has at least one agent")


@dataclass(frozen=True)
class Found:
    """What the agents of a cluster are."""

    described: str
    """How many there are, and on how many machines."""
    slots: tuple[str, ...]
    """The keys of their cores, as leases use them."""
    accelerators: Inventory | None = None
    """Their accelerators; None if there are none, or none were asked for."""
    device_name: str = ""
    """What the driver of the accelerators calls the first."""


@dataclass(frozen=True)
class Wanted:
    """The accelerators that a session looks for; see :func:`harness.devices.inventory`."""

    kind: str = ""
    """Empty: of whichever type there are."""
    imports: tuple[str, ...] = ()
    mask: str = ""


def check(cluster: Cluster, wanted: Wanted | None = None) -> Found:
    """Connect to every agent once.

    ``wanted``: the accelerators to look for; None for none.

    Errors: :class:`~harness.cluster.host.HostRefused`, also for a host without the accelerators that others have.
    """
    ours = facts()
    with contextlib.ExitStack() as stack:
        hosts = [
            stack.enter_context(
                contextlib.closing(connect(address, cluster.key, ours, None, patience=cluster.patience))
            )
            for address in cluster.agents
        ]
        machines = len({str(host.facts.get("kernel", "")) for host in hosts})
        described = f"{_several(len(hosts), 'agent')} on {_several(machines, 'machine')}"
        found = Found(described, slots([host.facts for host in hosts], ours))
        return found if wanted is None else _surveyed(found, hosts, wanted, ours)


def _several(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count > 1 else ''}"


def _surveyed(found: Found, hosts: Sequence[Host], wanted: Wanted, ours: Mapping[str, Any]) -> Found:
    """Return what was found, with the accelerators of all hosts."""
    env = passed_on(os.environ)
    asked = [(host, host.survey(wanted.kind, wanted.imports, wanted.mask, env)) for host in hosts]
    try:
        devices = [host.surveyed(number, _STARTING) for host, number in asked]
    except LaunchError as e:
        raise HostRefused(str(e)) from None
    for host, there in zip(hosts, devices, strict=True):
        if there.why:
            raise HostRefused(f"{host.name}: {printable(there.why)}")
    kinds = dict(zip((there.kind for there in devices), hosts, strict=True))
    if len(kinds) > 1:
        each = "; ".join(f"{host.name} has {printable(kind)} devices" for kind, host in kinds.items())
        raise HostRefused(f"the hosts' devices differ: {each}; choose with --world-device, or leave hosts out")
    if devices[0].kind == "cpu":
        return found
    return dataclasses.replace(
        found,
        accelerators=accelerators([host.facts for host in hosts], devices, ours),
        device_name=printable(devices[0].name),
    )


class ClusterLauncher:
    """Starts ranks on the hosts of a cluster; see :class:`~harness.worlds.handle.Launcher`.

    The constructor connects to every agent, which gets ready to start ranks.  Node i of a world (``RankSetup.node``) is
    a host of its own; worlds begin at different hosts, so that small ones spread.  ``within``: seconds in which each
    agent must answer.

    Errors: :class:`~harness.cluster.host.HostRefused`, a LaunchError, which names the host.
    """

    def __init__(
        self, cluster: Cluster, *, private: bool = True, start: str = FORK, within: float = CONNECTING
    ) -> None:
        self.clock: Clock = time
        self.network = ""
        self._private = private
        self._hosts: list[Host] = []
        self._turn = os.getpid() % len(cluster.agents)  # or all workers would begin at the first
        ours, begin = facts(), messages.Begin(private, start)
        try:
            for address in cluster.agents:
                self._hosts.append(connect(address, cluster.key, ours, begin, patience=cluster.patience, within=within))
        except HostRefused:
            self.close()
            raise

    @property
    def hosts(self) -> Sequence[Host]:
        """The hosts, in the order of the cluster."""
        return self._hosts

    @property
    def interfaces(self) -> Sequence[str]:
        """The interface by which ranks of each host reached others, as in ``host 1: eth0``; none until there were."""
        return [f"host {i}: {host.interfaces}" for i, host in enumerate(self._hosts, start=1) if host.interfaces]

    @property
    def lost(self) -> str:
        """What became of the first host that can't be used any more; empty if all can."""
        return next((host.lost for host in self._hosts if host.lost), "")

    @property
    def alive(self) -> bool:
        """Whether ranks can be started on every host, as far as is known."""
        self.poll()
        return not self.lost

    @property
    def refusal(self) -> Refusal:
        """Why ranks can't have a network of their own: agents decide that."""
        return Refusal("agents start the ranks", "--launcher local")

    def spawn(self, setups: Sequence[RankSetup]) -> list[RemoteRank]:
        """Start a rank for each setup; see :class:`~harness.worlds.handle.Launcher`."""
        nodes = sorted({setup.node for setup in setups})
        if len(nodes) > len(self._hosts):
            raise LaunchError(f"a world on {len(nodes)} hosts: this session has {len(self._hosts)}")
        if len(nodes) > 1 and self._private:
            raise LaunchError("ranks on a private network of one host can't reach those of another")
        if not self.alive:
            raise ServerLost(self.lost)
        on = self._hosts_of(setups, nodes)
        number, store = 0, ("", 0)
        if len(nodes) > 1:
            number, *store = on[nodes[0]].open(max(64, 2 * len(setups)), _STARTING)  # type: ignore[assignment]
        ranks: dict[int, RemoteRank] = {}
        asked = []
        try:
            for node in nodes:
                here = [setup for setup in setups if setup.node == node]
                host = on[node]
                made = [_placed(setup, i, len(here), len(nodes), (store[0], store[1])) for i, setup in enumerate(here)]
                spawned, handles = host.spawn(made, number if node == nodes[0] else 0)
                asked.append((host, spawned))
                ranks.update((rank.index, rank) for rank in handles)
            for host, spawned in asked:
                self.network = f"hosts of {len(self._hosts)} agents, {host.spawned(spawned, _STARTING)}"
        except BaseException:
            for rank in ranks.values():
                self.kill(rank)
                rank.close()
            raise
        return [ranks[setup.index] for setup in setups]

    def _hosts_of(self, setups: Sequence[RankSetup], nodes: Sequence[int]) -> dict[int, Host]:
        """Return the host of each node: the one that has its ranks' devices, or else the next in turn."""
        given = {setup.node: setup.host for setup in setups if setup.host is not None}
        if given:
            return {node: self._hosts[number] for node, number in given.items()}
        first, self._turn = self._turn, (self._turn + len(nodes)) % len(self._hosts)
        return {node: self._hosts[(first + i) % len(self._hosts)] for i, node in enumerate(nodes)}

    def listen(self, ranks: Sequence[RankHandle], to: Collection[Heard]) -> ClusterListener:
        """Return a listener to ranks of this launcher; see :class:`~harness.worlds.handle.Launcher`."""
        return ClusterListener(self._hosts, [_own(rank) for rank in ranks], to)

    def refresh(self, ranks: Sequence[RankHandle]) -> None:
        """Ask every host of these ranks what it knows of them, and wait for at most a second."""
        alive = [rank for rank in map(_own, ranks) if rank.exit is None]
        by_host = [(host, [rank for rank in alive if rank.host is host]) for host in self._hosts]
        asked = [(host, host.look(those), those) for host, those in by_host if those]
        until = time.monotonic() + _LOOKING
        while (waiting := [host for host, number, _ in asked if not host.answered(number)]) and (
            left := until - time.monotonic()
        ) > 0:
            wait(waiting, left)
        for host, number, those in asked:
            if not host.answered(number):
                for rank in those:
                    rank.unknown()

    def poll(self) -> None:
        """Take what has arrived from every host, without waiting."""
        for host in self._hosts:
            host.pump()

    def kill(self, rank: RankHandle) -> None:
        """Kill a rank and everything that it started, without waiting for its end."""
        own = _own(rank)
        if own.exit is None:
            own.host.send(messages.Kill(own.token))

    def close(self) -> None:
        """Close the connections: with them, agents end all ranks of this session."""
        for host in self._hosts:
            host.close()


class ClusterListener:
    """A listener to ranks on several hosts; see :class:`~harness.worlds.handle.Listener`."""

    def __init__(self, hosts: Sequence[Host], ranks: Sequence[RemoteRank], to: Collection[Heard]) -> None:
        self._hosts = hosts
        self._listened = [News(what, rank) for rank in ranks for what in to]

    def wait(self, seconds: float) -> list[News]:
        ended = self._ended()
        for host in self._hosts:
            host.pump()
            host.check()
        news = self._news()
        if not news and self._ended() == ended:
            wait(self._hosts, min(seconds, _LONGEST_SILENCE))
            news = self._news()
        return news

    def ignore(self, rank: RankHandle, what: Heard) -> None:
        self._listened = [each for each in self._listened if each.what is not what or each.rank is not rank]

    def _news(self) -> list[News]:
        return [each for each in self._listened if _own(each.rank).has(each.what)]

    def _ended(self) -> int:
        return sum(host.ended for host in self._hosts)


def _placed(setup: RankSetup, place: int, beside: int, nodes: int, store: tuple[str, int]) -> RankSetup:
    """Return a rank's setup with the variables that torchrun sets.

    ``place``: among the ranks of its host; ``beside``: how many those are; ``nodes``: how many hosts the world has.
    """
    env = {**passed_on(os.environ), **setup.env, "GROUP_RANK": str(setup.node), "GROUP_WORLD_SIZE": str(nodes)}
    if nodes > 1:
        env |= {"LOCAL_RANK": setup.device.partition(":")[2] or str(place), "LOCAL_WORLD_SIZE": str(beside)}
    return dataclasses.replace(setup, env=env, store=store)


def _own(rank: RankHandle) -> RemoteRank:
    """Return a rank as a :class:`RemoteRank`.  Errors: TypeError if it is not of a cluster."""
    if not isinstance(rank, RemoteRank):
        raise TypeError(f"rank {rank.index} is not on a host of the cluster: {type(rank).__name__}")
    return rank
