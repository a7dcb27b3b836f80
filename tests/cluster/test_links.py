"""Worlds over hosts with a network between them, and what may happen to a network."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from harness import Pool, Rank, RanksFailed, World, WorldSpec
from harness.cluster import credentials
from harness.cluster.host import HostRefused
from harness.cluster.launcher import Cluster, ClusterLauncher
from suites.collectives.groups import test_hosts as collectives
from tests.cluster.conftest import Agent, gone, pool_of, running
from tests.cluster.hosts import Network, missing

SPREAD = WorldSpec(2, hosts=2, timeout=60)
PATIENCE = 2.0

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "network namespaces")


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    """The controller's host, and two others."""
    with Network(3) as found:
        yield found


@pytest.fixture(scope="module")
def agents(network: Network, key_file: Path) -> Iterator[list[Agent]]:
    """An agent on each of the others."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                running(key_file, "--listen", network.address(host), "--silence", "3", before=network.command(host))
            )
            for host in (1, 2)
        ]


@pytest.fixture
def pool(network: Network, agents: list[Agent], key_file: Path) -> Iterator[Pool]:
    """A pool of worlds on those hosts.  Afterwards, every link is perfect again, and worlds run as before."""
    cluster = Cluster(tuple(agent.address for agent in agents), credentials.read(key_file), PATIENCE)
    with pool_of(cluster, network) as found:
        try:
            yield found
        finally:
            for one, other in ((0, 1), (0, 2), (1, 2)):
                network.link(one, other)
        world = found.acquire(SPREAD)
        assert world.run(summed) == [3.0, 3.0]
        found.release(world)


def summed(rank: Rank) -> float:
    tensor = torch.full((3,), float(rank.index + 1))
    dist.all_reduce(tensor)
    return float(tensor[0])


def while_waiting(world: World, do: Callable[[], object], timeout: float = 30.0) -> tuple[RanksFailed, float]:
    """Have something happen while rank 0 waits for rank 1; returns the failure, and how many seconds it took."""

    def body(rank: Rank) -> None:
        if rank.index == 1:
            time.sleep(60)
        dist.barrier()

    began = [0.0]

    def later() -> None:
        time.sleep(0.5)
        do()
        began[0] = time.monotonic()

    with pytest.raises(RanksFailed) as caught:
        world.run_beside(later, body, timeout=timeout)
    return caught.value, time.monotonic() - began[0]


def test_the_route_decides(pool: Pool) -> None:
    """The rendezvous has the address of rank 0's host, and ranks use the interface towards it."""
    world = pool.acquire(SPREAD)
    names = ("MASTER_ADDR", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    told = world.run(lambda rank: [os.environ[name] for name in names])
    assert told[0] == told[1]
    assert told[0][0] in ("10.77.0.2", "10.77.0.3")
    assert told[0][1:] == ["eth0", "eth0"]
    assert world.run(summed) == [3.0, 3.0]
    pool.release(world)


def sent(rank: Rank, interface: str) -> float:
    """All-reduce 4 MiB; returns how many of these left by an interface."""

    def count() -> int:
        (line,) = [line for line in Path("/proc/net/dev").read_text().splitlines() if f"{interface}:" in line]
        return int(line.partition(":")[2].split()[8])

    dist.barrier()
    before = count()
    dist.all_reduce(torch.ones(1 << 20))
    dist.barrier()
    return (count() - before) / (1 << 20)


@pytest.mark.parametrize("named", [False, True], ids=["the route decides", "the environment decides"])
def test_several_interfaces(network: Network, key_file: Path, monkeypatch: pytest.MonkeyPatch, named: bool) -> None:
    """Of several interfaces, ranks use that of the route to the rendezvous, or the one that the environment names."""
    if named:
        for name in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            monkeypatch.setenv(name, "eth1")
    with network.second(1, 2), contextlib.ExitStack() as stack:
        two = [
            stack.enter_context(running(key_file, "--listen", network.address(host), before=network.command(host)))
            for host in (1, 2)
        ]
        cluster = Cluster(tuple(agent.address for agent in two), credentials.read(key_file))
        with pool_of(cluster, network) as pool:
            world = pool.acquire(SPREAD)
            by = [min(world.run(sent, interface)) for interface in ("eth0", "eth1")]
            pool.release(world)
            assert pool.interfaces == [f"host {host}: {'eth1' if named else 'eth0'}" for host in (1, 2)]
            world = pool.acquire(SPREAD)
            collectives.test_named_interface(world)
            world.kill()
    assert by[named] > 3.5
    assert by[not named] < 0.5


@pytest.mark.parametrize("first", [True, False], ids=["only on the first", "only on the second"])
def test_missing_package(network: Network, key_file: Path, tmp_path: Path, first: bool) -> None:
    """If a host lacks a package that ranks import, its rank is named with its host, and the next world works."""
    (tmp_path / "only_there.py").write_text("")
    paths = [str(tmp_path), ""] if first else ["", str(tmp_path)]
    with contextlib.ExitStack() as stack:
        two = [
            stack.enter_context(
                running(
                    key_file,
                    *("--listen", network.address(host)),
                    before=network.command(host),
                    env={"PYTHONPATH": os.pathsep.join(filter(None, [path, os.environ.get("PYTHONPATH", "")]))},
                )
            )
            for host, path in zip((1, 2), paths, strict=True)
        ]
        cluster = Cluster(tuple(agent.address for agent in two), credentials.read(key_file))
        with pool_of(cluster, network) as pool:
            with pytest.raises(RanksFailed) as caught:
                pool.acquire(WorldSpec(2, hosts=2, timeout=60, imports=("only_there",)))
            (failed,) = [end for end in caught.value.ends if end.kind == "raised"]
            assert "No module named 'only_there'" in failed.what
            assert network.address(2 if first else 1) in failed.place.name
            world = pool.acquire(SPREAD)
            assert world.run(summed) == [3.0, 3.0]
            pool.release(world)


def test_ipv6(network: Network, key_file: Path) -> None:
    """Hosts with addresses of IPv6."""
    with contextlib.ExitStack() as stack:
        six = [
            stack.enter_context(
                running(key_file, "--listen", network.address(host, ipv6=True), before=network.command(host))
            )
            for host in (1, 2)
        ]
        cluster = Cluster(tuple(agent.address for agent in six), credentials.read(key_file))
        with pool_of(cluster, network) as pool:
            world = pool.acquire(SPREAD)
            assert world.run(lambda rank: os.environ["MASTER_ADDR"])[0].startswith("fd77::")
            assert world.run(summed) == [3.0, 3.0]
            for kind in ("IPv4", "IPv6"):
                collectives.test_kinds_of_addresses(world, kind)
            pool.release(world)


@pytest.mark.parametrize(
    "link",
    [{"delay": 0.1}, {"loss": 0.05}, {"rate": 125_000}],
    ids=["200 ms there and back", "5 % lost", "1 Mbit per second"],
)
def test_bad_links_are_no_failure(network: Network, pool: Pool, link: dict[str, float]) -> None:
    """Slow and lossy links take time, and nothing is reported, though data is on its way for seconds."""
    for one, other in ((0, 1), (0, 2), (1, 2)):
        network.link(one, other, **link)
    world = pool.acquire(SPREAD)

    def body(rank: Rank) -> float:
        tensor = torch.full((60_000,), float(rank.index + 1))
        for _ in range(3):
            dist.all_reduce(tensor)
        dist.barrier()
        return float(tensor[0])

    assert world.run(body, timeout=60) == [12.0, 12.0]
    pool.release(world)


@pytest.mark.parametrize(
    "link", [{"delay": 0.1}, {"rate": 125_000}], ids=["200 ms there and back", "1 Mbit per second"]
)
def test_new_groups_on_a_slow_link(network: Network, pool: Pool, link: dict[str, float]) -> None:
    """New groups come up while the link between their hosts is slow, with a host that comes late to each."""
    network.link(1, 2, **link)
    world = pool.acquire(WorldSpec(4, hosts=2, timeout=60))
    collectives.test_new_groups_with_a_late_host(world, 1)
    pool.release(world)


def test_late_host(pool: Pool) -> None:
    """A barrier waits for a host that comes late."""

    def body(rank: Rank) -> float:
        if rank.index == 1:
            time.sleep(6)
        began = time.monotonic()
        dist.barrier()
        return time.monotonic() - began

    world = pool.acquire(SPREAD)
    waited = world.run(body)
    assert waited[0] > 5 > 1 > waited[1]
    pool.release(world)


def test_link_to_a_host_is_cut(network: Network, pool: Pool, agents: list[Agent]) -> None:
    """A host that the controller does not reach any more is named, and its ranks end by themselves."""
    world = pool.acquire(SPREAD)
    world.run(summed)
    hosts = {agent.address[0]: number for number, agent in enumerate(agents, 1)}
    victim = world._processes[1].host.address  # type: ignore[attr-defined]
    pids = world.pids
    failed, took = while_waiting(world, lambda: network.link(0, hosts[victim[0]], cut=True))
    assert took < 10
    assert f"{victim[0]}:{victim[1]}" in failed.headline, failed.headline
    assert "did not answer for 2 s" in failed.headline or "has gone" in failed.headline
    assert all(gone(pid, within=15) for pid in pids)


def test_link_is_cut_one_way(network: Network, pool: Pool, agents: list[Agent]) -> None:
    """So is one whose answers do not arrive."""
    world = pool.acquire(SPREAD)
    world.run(summed)
    hosts = {agent.address[0]: number for number, agent in enumerate(agents, 1)}
    victim = world._processes[1].host.address  # type: ignore[attr-defined]
    pids = world.pids
    failed, took = while_waiting(world, lambda: network.link(hosts[victim[0]], 0, both=False, cut=True))
    assert took < 10
    assert victim[0] in failed.headline
    assert all(gone(pid, within=15) for pid in pids)


def test_link_between_hosts_is_cut(network: Network, pool: Pool) -> None:
    """Ranks that do not reach each other are stopped at the run's timeout, and never before by a false proof."""
    world = pool.acquire(SPREAD)
    world.run(summed)

    def body(rank: Rank) -> None:
        time.sleep(1.5)
        dist.all_reduce(torch.ones(1000))

    def later() -> None:
        time.sleep(0.5)
        network.link(1, 2, cut=True)

    began = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        world.run_beside(later, body, timeout=8)
    assert time.monotonic() - began > 7.5
    assert "all_reduce" in str(caught.value)
    silent = [f"while 10.77.0.{number} acknowledges nothing that it has sent there" for number in (2, 3)]
    assert any(text in str(caught.value) for text in silent), str(caught.value)


def test_agent_behind_a_cut(network: Network, agents: list[Agent], key_file: Path) -> None:
    """An agent that cannot be reached is named before any rank starts."""
    cluster = Cluster(tuple(agent.address for agent in agents), credentials.read(key_file))
    network.link(0, 2, cut=True)
    try:
        with network.inside(0), pytest.raises(HostRefused, match=r"no agent answers at 10\.77\.0\.3"):
            ClusterLauncher(cluster, within=2.0)
    finally:
        network.link(0, 2)
