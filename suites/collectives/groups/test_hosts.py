"""Ranks on several hosts: groups within and across them, unequal hosts, large messages, a host that comes late."""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from harness import Rank, World, assert_on_ranks, assert_same, requirement, unsupported
from harness.results import HostsLack
from harness.stacks.collectives import assert_right
from harness.stacks.routes import Route, by_interface, own_ends, routes, sockets
from suites.collectives.cases import every_collective

SECONDS = 2.0
"""The timeout of a group to which a host does not come."""
SLOW = 10.0
"""Seconds that creating a group may take between hosts, once all of its ranks have come."""
LARGE = 12 << 20
"""The number of elements of a message of 48 MiB, which is more than sockets and links hold."""


def hosts_of(world: World) -> list[list[int]]:
    """Return the ranks of each host."""
    placed = world.run(lambda rank: rank.host)
    return [[rank for rank, host in enumerate(placed) if host == number] for number in range(max(placed) + 1)]


@requirement(
    "COLL-HOST-01",
    "A collective gives the exact result on a group within one host, and on a group with a rank of each host.",
    source="torch.distributed.new_group",
)
@pytest.mark.parametrize("groups", ["within", "across"])
@pytest.mark.world(3, 4, hosts=2)
def test_groups_of_hosts(world: World, groups: str) -> None:
    """Every collective, twice in each group."""
    hosts = hosts_of(world)
    across = [tuple(ranks) for ranks in zip(*hosts, strict=False)]
    for group in map(tuple, hosts) if groups == "within" else across:
        assert_right(world, every_collective(group=group, root=len(group) - 1, root_as="group", repeats=2))


@requirement(
    "COLL-HOST-02",
    "Reducing over the dimensions of a mesh of hosts, one after the other, equals reducing over all ranks.",
    source="torch.distributed.device_mesh.init_device_mesh",
)
@pytest.mark.world(4, hosts=2)
def test_mesh_of_hosts(world: World) -> None:
    """Each dimension has the ranks of one host, or one rank of each; reduced in both orders."""

    def body(rank: Rank) -> list[float]:
        mesh = rank.mesh(2, 2, names=("host", "local"))
        assert mesh.get_local_rank("host") == rank.host
        sums = []
        for names in (("host",), ("local",), ("host", "local"), ("local", "host")):
            tensor = torch.tensor([10.0**rank.index], device=rank.device)
            for name in names:
                dist.all_reduce(tensor, group=mesh.get_group(name))
            sums.append(float(tensor))
        return sums

    across, within = (101.0, 1010.0), (11.0, 1100.0)
    expected = [[across[rank % 2], within[rank // 2], 1111.0, 1111.0] for rank in range(4)]
    assert_on_ranks(expected, world.run(body))


@requirement(
    "COLL-HOST-03",
    "Hosts may have different numbers of ranks: reducing within hosts and then across their first ranks equals "
    "all_reduce.",
    source="torch.distributed.new_subgroups_by_enumeration",
)
@pytest.mark.world(3, 5, hosts=2)
def test_unequal_hosts(world: World) -> None:
    """Reduce to the first rank of each host, all-reduce among these, and broadcast on each host."""
    hosts = hosts_of(world)
    assert len({len(host) for host in hosts}) == 2

    def body(rank: Rank, hosts: list[list[int]]) -> list[torch.Tensor]:
        mine, _ = dist.new_subgroups_by_enumeration(hosts)
        first = [host[0] for host in hosts]
        among = dist.new_group(first)
        tensor = torch.arange(5, dtype=torch.float64, device=rank.device) + rank.index
        alone = tensor.clone()
        dist.reduce(tensor, dst=hosts[rank.host][0], group=mine)
        if rank.index in first:
            dist.all_reduce(tensor, group=among)
        dist.broadcast(tensor, src=hosts[rank.host][0], group=mine)
        dist.all_reduce(alone)
        return [tensor.cpu(), alone.cpu()]

    sums = torch.arange(5, dtype=torch.float64) * world.size + sum(range(world.size))
    for index, (by_hosts, together) in enumerate(world.run(body, hosts)):
        assert_same(sums, by_hosts, f"rank {index}, by hosts")
        assert_same(sums, together, f"rank {index}, all_reduce")


@requirement(
    "COLL-HOST-04",
    "A message that is larger than what sockets hold arrives whole, with one in the other direction at the same time.",
    source="torch.distributed.batch_isend_irecv, broadcast, all_reduce",
)
@pytest.mark.parametrize("how", ["sends", "broadcast", "all_reduce"])
@pytest.mark.world(2, hosts=2)
def test_large_messages(world: World, how: str) -> None:
    """48 MiB of different numbers from each rank."""

    def body(rank: Rank) -> int:
        mine = torch.arange(LARGE, dtype=torch.int32, device=rank.device) * (1 if rank.index == 0 else 3)
        expected = torch.arange(LARGE, dtype=torch.int32, device=rank.device) * (3 if rank.index == 0 else 1)
        peer = 1 - rank.index
        if how == "sends":
            found = torch.zeros_like(mine)
            sending, receiving = dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, found, peer)
            for work in dist.batch_isend_irecv([sending, receiving] if rank.index == 0 else [receiving, sending]):
                work.wait()
        elif how == "broadcast":
            expected, found = (mine.clone() if rank.index == 0 else expected), mine
            dist.broadcast(found, src=0)
        else:
            expected += mine
            found = mine
            dist.all_reduce(found)
        return int((found != expected).sum())

    assert_on_ranks([0, 0], world.run(body))


@requirement(
    "COLL-HOST-05",
    "A barrier blocks the ranks of every host as long as one host has not come.",
    source="torch.distributed.barrier",
)
@pytest.mark.world(4, hosts=2)
def test_barrier_with_a_late_host(world: World) -> None:
    """The second host comes only when the first has been seen to wait."""

    def body(rank: Rank) -> list[bool]:
        store = dist.PrefixStore("late host", rank.store)
        if rank.host == 0:
            work = dist.barrier(async_op=True)
            time.sleep(0.3)
            waited = not work.is_completed()
            store.add("waiting", 1)
            work.wait()
            return [waited, store.check(["coming"])]
        while store.add("waiting", 0) < 2:  # ranks of the first host
            time.sleep(0.01)
        store.set("coming", "1")
        dist.barrier()
        return [True, True]

    assert_on_ranks([[True, True]] * 4, world.run(body))


def summed(tensor: torch.Tensor, group: dist.ProcessGroup) -> float:
    """Reduce a tensor and read it, which on an accelerator is what waits."""
    dist.all_reduce(tensor, group=group)
    return float(tensor.sum())


@requirement(
    "COLL-HOST-06",
    "If a host does not come to a collective, the ranks of the other raise an error after the group's timeout.",
    source="torch.distributed.new_group: timeout",
)
@pytest.mark.world(4, hosts=2)
def test_timeout_without_a_host(world: World) -> None:
    """The second host sleeps; the error comes neither before the timeout nor long after it."""

    def body(rank: Rank) -> float:
        group = dist.new_group(timeout=timedelta(seconds=SECONDS))
        began = time.monotonic()
        if rank.host == 0:
            tensor = torch.ones(3, device=rank.device)
            with pytest.raises(RuntimeError):
                summed(tensor, group)
            return time.monotonic() - began
        while time.monotonic() - began < 2 * SECONDS:
            time.sleep(0.05)
        return SECONDS

    for seconds in world.run(body, watch=False, timeout=30):
        assert 0.9 * SECONDS < seconds < SECONDS + 5


@requirement(
    "COLL-HOST-07",
    "A TCPStore on any host is reached from the others by its address.",
    source="torch.distributed.TCPStore",
)
@pytest.mark.world(3, hosts=3)
def test_store_on_any_host(world: World) -> None:
    """Each host in turn has the store; all of them count in it."""

    def body(rank: Rank) -> list[int]:
        told = dist.PrefixStore("stores", rank.store)
        counted = []
        for host in range(3):
            if rank.host == host:
                with socket.create_connection((rank.store.host, rank.store.port)) as route:
                    address = route.getsockname()[0]
                store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
                told.set(str(host), f"{address} {store.port}")
            else:
                address, port = told.get(str(host)).decode().split()
                store = dist.TCPStore(address, int(port), is_master=False)
            store.add("here", 1)
            dist.barrier()
            counted.append(store.add("here", 0))
            dist.barrier()
        return counted

    assert_on_ranks([[3, 3, 3]] * 3, world.run(body))


@requirement(
    "COLL-HOST-08",
    "A group that one host creates later than the other works on both, and no host waits for longer than it must.",
    source="torch.distributed.new_group",
)
@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.world(4, hosts=2)
def test_new_groups_with_a_late_host(world: World, late: int) -> None:
    """A group of all ranks, and one of a rank of each host; one host comes a second late to each."""

    def body(rank: Rank) -> list[float]:
        sums = []
        for ranks in ([0, 1, 2, 3], [1, 2]):
            dist.barrier()
            began = time.monotonic()
            if rank.host == late:
                time.sleep(1.0)
            group = dist.new_group(ranks)
            if rank.index in ranks:
                sums.append(summed(torch.tensor([10.0**rank.index], device=rank.device), group))
            assert time.monotonic() - began < 1.0 + SLOW
        return sums

    expected = [[1111.0], [1111.0, 110.0], [1111.0, 110.0], [1111.0]]
    assert_on_ranks(expected, world.run(body))


@requirement(
    "COLL-HOST-09",
    "A gloo group connects its ranks by the network interface that GLOO_SOCKET_IFNAME names when it is created.",
    source="torch.distributed, Choosing the network interface to use",
)
@pytest.mark.world(2, hosts=2)
def test_named_interface(world: World) -> None:
    """Name each interface that reaches the other host, one after the other, and look where connections begin."""
    reached = world.run(routes)[0]
    ways = by_interface(reached)
    if len(ways) < 2:
        unsupported(HostsLack("second network interface that reaches the other host"))

    def body(rank: Rank, ways: list[Route]) -> list[tuple[float, set[str]]]:
        found = []
        for way in ways:
            os.environ["GLOO_SOCKET_IFNAME"] = way[rank.index].interface
            before = sockets()
            group = dist.new_group(backend="gloo")
            found.append((summed(torch.tensor([10.0**rank.index]), group), own_ends(before)))
        return found

    for index, found in enumerate(world.run(body, ways)):
        for way, (total, ends) in zip(ways, found, strict=True):
            interface = way[index].interface
            of_it = {each[index].address for each in reached if each[index].interface == interface}
            assert total == 11.0, f"rank {index}, by {interface}"
            assert ends, f"rank {index} has no connection"
            assert ends <= of_it, f"rank {index} is connected at {', '.join(sorted(ends))}, and {interface} was named"


@requirement(
    "COLL-HOST-10",
    "init_method names rank 0's host by an IPv4 address, an IPv6 address in brackets, or a name that the other hosts "
    "can look up.",
    source="torch.distributed.init_process_group: init_method",
)
@pytest.mark.parametrize("kind", ["IPv4", "IPv6", "name"])
@pytest.mark.world(2, hosts=2)
def test_kinds_of_addresses(world: World, kind: str) -> None:
    """Initialize the default group again at each such address or name."""
    ways = world.run(routes)[0]
    if kind == "name":
        where = [
            name for name in world.run(names)[0] if all(world.run(looks_up, name, {one.address for one, _ in ways}))
        ]
        if not where:
            unsupported(HostsLack("name that the other host can look up"))
    else:
        where = list(dict.fromkeys(one.address for one, _ in ways if one.family == kind))
        if not where:
            unsupported(HostsLack("address of this family that the other host reaches"))

    def body(rank: Rank, where: list[str]) -> list[float]:
        dist.barrier()
        dist.destroy_process_group()
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # so that rank 0 hosts the store at the address
        sums = []
        for name in where:
            place = f"tcp://[{name}]" if ":" in name else f"tcp://{name}"
            method = f"{place}:{port_for(rank, name)}"
            dist.init_process_group(rank.backend, init_method=method, rank=rank.index, world_size=2)
            sums.append(summed(torch.tensor([10.0**rank.index], device=rank.device), dist.group.WORLD))
            dist.destroy_process_group()
        dist.init_process_group(
            rank.backend, store=dist.PrefixStore(f"back {kind}", rank.store), rank=rank.index, world_size=2
        )
        return sums

    assert_on_ranks([[11.0] * len(where)] * 2, world.run(body, where))


def names(rank: Rank) -> list[str]:
    """Return what this host is called by itself."""
    return list(dict.fromkeys([socket.gethostname(), socket.getfqdn(), "localhost"]))


def looks_up(rank: Rank, name: str, addresses: set[str]) -> bool:
    """Whether a name stands for some of these addresses, and for no others."""
    try:
        found = {str(each[4][0]) for each in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    return found <= addresses


def port_for(rank: Rank, name: str) -> int:
    """Return a port that was free on rank 0's host just now."""
    store = dist.PrefixStore(f"port for {name}", rank.store)
    if rank.index == 0:
        with socket.socket(socket.AF_INET6 if socket.has_ipv6 else socket.AF_INET) as probe:
            probe.bind(("", 0))
            store.set("port", str(probe.getsockname()[1]))
    return int(store.get("port"))
