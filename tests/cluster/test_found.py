"""What is wrong between ranks of several hosts is found by the suites' tests of hosts."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import Pool, Rank, RanksFailed, World, WorldSpec
from harness.cluster import credentials
from harness.cluster.launcher import Cluster
from suites.collectives.groups import test_hosts as collectives
from suites.replicate_fsdp import test_hosts as replicate_fsdp
from suites.tp_extension import test_hosts as tp_extension
from tests.cluster.conftest import pool_of, running
from tests.collectives.finding import Finding
from tests.collectives.test_found import requirements_of

FOUND = (
    Finding(
        "first element wrong in groups without rank 0", 4, collectives.test_groups_of_hosts, "", {"groups": "within"}
    ),
    Finding("last element wrong in groups with gaps", 4, collectives.test_groups_of_hosts, "", {"groups": "across"}),
    Finding("named dimension of a mesh is the first", 4, collectives.test_mesh_of_hosts, ""),
    Finding("first element wrong in groups without rank 0", 5, collectives.test_unequal_hosts, ""),
    Finding("last element wrong above 4 MiB", 2, collectives.test_large_messages, "", {"how": "broadcast"}),
    Finding("barrier does not block", 4, collectives.test_barrier_with_a_late_host, ""),
    Finding("timeouts halved", 4, collectives.test_timeout_without_a_host, ""),
)


@pytest.fixture(scope="module")
def pool(key_file: Path) -> Iterator[Pool]:
    """A pool of worlds on three hosts, with all that the suites' stacks import."""
    with running(key_file, env={"CONCORD_PRELOAD": ""}) as one, running(key_file) as two, running(key_file) as three:
        cluster = Cluster(tuple(agent.address for agent in (one, two, three)), credentials.read(key_file))
        with pool_of(cluster) as found:
            yield found


@pytest.fixture
def world_of(pool: Pool) -> Iterator[Callable[[int, int], World]]:
    """``world_of(size, hosts)`` is a world, which ends with the test."""
    worlds: list[World] = []

    def make(size: int, hosts: int) -> World:
        worlds.append(pool.acquire(WorldSpec(size, hosts=hosts, timeout=30)))
        return worlds[-1]

    yield make
    for world in worlds:
        world.kill()


WRONG = (AssertionError, RanksFailed, pytest.fail.Exception)


@pytest.mark.parametrize("finding", FOUND, ids=lambda finding: f"{finding.damage}-{finding.test.__name__}")
def test_damaged_collectives(world_of: Callable[[int, int], World], finding: Finding) -> None:
    """A test fails where a collective is damaged, and passes where it is not."""
    with pytest.raises(WRONG):
        finding.run(world_of(finding.size, 2))
    finding.run_undamaged(world_of(finding.size, 2))


@dataclass(frozen=True)
class Changed:
    """A world on whose ranks something is changed before each function."""

    world: World
    change: Callable[[Rank], None]

    @property
    def size(self) -> int:
        return self.world.size

    def run(self, fn: Callable[..., Any], *args: Any, **how: Any) -> list[Any]:
        return self.world.run(changed_first, self.change, fn, args, **how)


def changed_first(rank: Rank, change: Callable[[Rank], None], fn: Callable[..., Any], args: Any) -> Any:
    change(rank)
    return fn(rank, *args)


def counts_alone(rank: Rank) -> None:
    """Each process counts for itself, whatever the store's host."""

    class Alone(dist.TCPStore):  # type: ignore[name-defined,misc]
        count = 0

        def add(self, key: str, amount: int) -> int:
            self.count += amount
            return self.count

    dist.TCPStore = Alone  # type: ignore[attr-defined]


def impatient(rank: Rank) -> None:
    """Groups are created within half a second, or not at all."""
    right = dist.new_group
    dist.new_group = lambda ranks=None: right(ranks, timeout=timedelta(seconds=0.5))


def nothing_across(rank: Rank) -> None:
    """What is reduced between hosts is what was there before."""
    for name in {"all_reduce", "reduce_scatter_tensor", "reduce_scatter_single"} & set(dir(dist)):
        right = getattr(dist, name)

        def lost(first: torch.Tensor, *args: Any, right: Any = right, group: Any = None, **how: Any) -> Any:
            ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
            before = first.clone()
            work = right(first, *args, group=group, **how)
            if {each // 2 for each in ranks} == {0, 1}:
                if work is not None:
                    work.wait()
                first.copy_(before * len(ranks))
            return work

        setattr(dist, name, lost)
        setattr(dist.distributed_c10d, name, lost)


def loads_nothing(rank: Rank) -> None:
    """A checkpoint is loaded, and nothing of it arrives."""
    import torch.distributed.checkpoint as checkpoint

    checkpoint.load = lambda *args, **how: None


def any_interface(rank: Rank) -> None:
    """Groups are created as if no interface were named."""
    right = dist.new_group

    def created(*args: Any, **how: Any) -> Any:
        os.environ.pop("GLOO_SOCKET_IFNAME", None)
        return right(*args, **how)

    dist.new_group = created


def brackets_kept(rank: Rank) -> None:
    """The address in an init_method keeps its brackets, so nobody can look it up."""
    right = dist.init_process_group

    def initialized(*args: Any, init_method: str = "", **how: Any) -> Any:
        if "[" in init_method:
            socket.getaddrinfo(init_method.removeprefix("tcp://").rpartition(":")[0], None)
        return right(*args, init_method=init_method or None, **how)

    dist.init_process_group = initialized


CHANGED = [
    (collectives.test_named_interface, {}, 2, 2, any_interface),
    (collectives.test_kinds_of_addresses, {"kind": "IPv6"}, 2, 2, brackets_kept),
    (collectives.test_store_on_any_host, {}, 3, 3, counts_alone),
    (collectives.test_new_groups_with_a_late_host, {"late": 1}, 4, 2, impatient),
    (replicate_fsdp.test_replicas_of_hosts, {"dimension": "host"}, 4, 2, nothing_across),
    (tp_extension.test_two_dimensions, {"tensor": "within"}, 4, 2, nothing_across),
    (tp_extension.test_hybrid, {"shards": "within"}, 4, 2, nothing_across),
    (tp_extension.test_checkpoint_of_each_host, {"tensor": "within"}, 4, 2, loads_nothing),
    (tp_extension.test_checkpoint_of_all_hosts, {}, 4, 2, loads_nothing),
]


@pytest.mark.parametrize(
    ("test", "arguments", "size", "hosts", "change"), CHANGED, ids=lambda each: getattr(each, "__name__", "")
)
def test_damaged(
    world_of: Callable[[int, int], World],
    test: Callable[..., None],
    arguments: dict[str, str],
    size: int,
    hosts: int,
    change: Callable[[Rank], None],
) -> None:
    """A test fails where something on the ranks is damaged, and passes where it is not."""
    with pytest.raises(WRONG):
        test(Changed(world_of(size, hosts), change), **arguments)
    test(world_of(size, hosts), **arguments)


def test_a_name(world_of: Callable[[int, int], World]) -> None:
    """Hosts of one machine have a name that both look up: localhost."""
    collectives.test_kinds_of_addresses(world_of(2, 2), "name")


def test_every_requirement_is_damaged() -> None:
    """Each requirement of the suites' tests of hosts has a damage above."""
    every = {
        each
        for module in (collectives, replicate_fsdp, tp_extension)
        for value in vars(module).values()
        for each in requirements_of(value)
    }
    tests = [finding.test for finding in FOUND] + [test for test, *_ in CHANGED]
    assert every == set().union(*map(requirements_of, tests))
