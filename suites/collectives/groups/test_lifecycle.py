"""Timeouts, destroying groups and starting again."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fixtures.beginnings import started
from harness import Rank, World, assert_on_ranks, requirement, spmd
from harness.stacks.collectives import assert_right, claimed_cases, set_timeout
from suites.collectives.cases import every_collective
from suites.collectives.groups.test_restarts import assert_usable

SECONDS = 1.0


def late(rank: Rank, what: str) -> float:
    """Wait for a peer that never comes and return the seconds until the error."""
    options = {} if what == "wait" else {"timeout": timedelta(seconds=SECONDS)}
    group = dist.new_group(**options)
    if what == "wait":  # only a call that need not connect the group first is sure to return
        dist.all_reduce(torch.ones(2, device=rank.device), group=group)
    if rank.index == 0:
        return SECONDS
    before = time.monotonic()
    with pytest.raises(RuntimeError, match=r"(?i)timed out"):
        _await(what, group, torch.ones(2, device=rank.device))
    return time.monotonic() - before


def _await(what: str, group: dist.ProcessGroup | None, tensor: torch.Tensor) -> None:
    if what == "wait":
        dist.all_reduce(tensor, group=group, async_op=True).wait(timedelta(seconds=SECONDS))
    elif what == "recv":
        dist.recv(tensor, 0, group=group)
    elif what == "barrier":
        dist.barrier(group)
    elif what == "broadcast":
        dist.broadcast(tensor, 0, group=group)
    else:
        dist.all_reduce(tensor, group=group)
    tensor.cpu()  # on an accelerator only this waits


def _end(work: dist.Work, tensor: torch.Tensor) -> None:
    work.wait()
    tensor.cpu()  # on an accelerator only this waits


@requirement(
    "COLL-TIMEOUT-01",
    "A rank whose peer never joins a collective raises an error after the group's timeout, even at the group's "
    "first collective.",
    source="torch.distributed.new_group: timeout; torch.distributed.Work.wait: timeout",
)
@pytest.mark.parametrize(
    "what",
    [
        "all_reduce",
        "broadcast",
        "barrier",
        pytest.param("recv", marks=pytest.mark.needs(features=["messages"])),
        "wait",
    ],
)
@pytest.mark.world(2, keeps="a collective that timed out")
def test_timeout_is_honoured(world: World, what: str) -> None:
    """The error comes neither before the timeout nor long after it."""
    for seconds in world.run(late, what, watch=False, timeout=30):
        assert 0.9 * SECONDS <= seconds < SECONDS + 5


@requirement(
    "COLL-TIMEOUT-02",
    "A timeout applies to the group it was set for: a subgroup, the default group, or a group whose timeout was "
    "changed.",
    source="torch.distributed.new_group, init_process_group: timeout; pytorch/pytorch#165422",
)
@pytest.mark.parametrize("how", ["subgroup", "changed", "default"])
@pytest.mark.world(3)
def test_timeout_of_a_group(world: World, how: str) -> None:
    """Rank 2 waits for rank 1, which stays away until rank 2 has seen the error."""

    def body(rank: Rank) -> float:
        short = timedelta(seconds=SECONDS)
        if how == "default":
            dist.barrier()
            dist.destroy_process_group()
            store = dist.PrefixStore("short", rank.store)
            dist.init_process_group(rank.backend, store=store, rank=rank.index, world_size=rank.size, timeout=short)
        group = (
            dist.new_group([1, 2], **({"timeout": short} if how == "subgroup" else {})) if how != "default" else None
        )
        if rank.index != 2:
            rank.store.wait(["seen"])
            return SECONDS
        if how == "changed":
            set_timeout(short, group)
        before = time.monotonic()
        try:
            with pytest.raises(RuntimeError, match=r"(?i)timed out"):
                _await("all_reduce", group, torch.ones(2, device=rank.device))
        finally:
            rank.store.set("seen", "")
        return time.monotonic() - before

    for seconds in world.run(body, watch=False, timeout=20):
        assert 0.9 * SECONDS <= seconds < SECONDS + 5


@requirement(
    "COLL-TIMEOUT-03",
    "A rank whose peer has left before their first collective raises an error no later than the group's timeout.",
    source="torch.distributed.new_group: timeout; pytorch/gloo#520",
)
@pytest.mark.parametrize("connecting", ["at-once", "lazily"])
@pytest.mark.world(3)
def test_peer_has_left(world: World, connecting: str) -> None:
    """Rank 2 destroys a dozen groups, so that the direction in which ranks connect varies."""
    seconds = 1.0

    def body(rank: Rank) -> float:
        if connecting == "lazily":
            os.environ["TORCH_GLOO_LAZY_INIT"] = "1"  # connect with the first collective, not with new_group
        groups = [dist.new_group(timeout=timedelta(seconds=seconds)) for _ in range(12)]
        if rank.index == 2:
            for group in groups:
                dist.destroy_process_group(group)
            rank.store.add("left", 1)
            rank.store.wait(["seen-0", "seen-1"])
            return 0.0
        rank.store.wait(["left"])
        took, issued = [], []
        try:
            for group in groups:
                tensor, began = torch.ones(2, device=rank.device), time.monotonic()
                try:
                    issued.append((dist.all_reduce(tensor, group=group, async_op=True), tensor, began))
                except RuntimeError:  # some backends connect in the call itself
                    took.append(time.monotonic() - began)
            for work, tensor, began in issued:
                with pytest.raises(RuntimeError):
                    _end(work, tensor)
                took.append(time.monotonic() - began)
        finally:
            rank.store.add(f"seen-{rank.index}", 1)
        assert len(took) == len(groups)
        return max(took)

    assert max(world.run(body, watch=False, timeout=60)) < seconds + 3


@requirement(
    "COLL-LIFE-01",
    "A destroyed group cannot be used.",
    source="torch.distributed.destroy_process_group; pytorch/pytorch#107298",
)
@spmd(2)
def test_destroyed_group(rank: Rank) -> None:
    """Every rank raises an error in Python."""
    group = dist.new_group()
    dist.all_reduce(torch.ones(1, device=rank.device), group=group)
    dist.barrier()
    dist.destroy_process_group(group)
    with pytest.raises((RuntimeError, ValueError)):
        dist.all_reduce(torch.ones(1, device=rank.device), group=group)


@requirement(
    "COLL-LIFE-01",
    "A destroyed group cannot be used.",
    source="torch.distributed.destroy_process_group; pytorch/pytorch#107298",
)
@spmd(2)
def test_destroyed_group_with_a_peer(rank: Rank) -> None:
    """Collectives and messages that name a peer raise an error in Python."""
    group, tensor = dist.new_group(), torch.ones(2, device=rank.device)
    dist.broadcast(tensor, 1, group=group)
    dist.barrier()
    dist.destroy_process_group(group)
    for call in (dist.broadcast, dist.reduce, dist.send, dist.recv):
        with pytest.raises((RuntimeError, ValueError)):
            call(tensor, 1 - rank.index if call in (dist.send, dist.recv) else 0, group=group)


@requirement(
    "COLL-LIFE-02",
    "Without a default group a collective raises an error.",
    source="torch.distributed.destroy_process_group, init_process_group",
)
@requirement(
    "COLL-LIFE-09",
    "After destroy_process_group, init_process_group makes collectives work again.",
    source="torch.distributed.destroy_process_group, init_process_group",
)
@pytest.mark.world(1, 2, 3)
def test_destroy_and_start_again(world: World) -> None:
    """Run five cycles, each with fresh keys in the store."""

    def body(rank: Rank) -> None:
        dist.barrier()
        dist.destroy_process_group()
        for cycle in range(5):
            assert not dist.is_initialized()
            with pytest.raises((RuntimeError, ValueError)):
                dist.all_reduce(torch.ones(1, device=rank.device))
            store = dist.PrefixStore(f"cycle-{cycle}", rank.store)
            dist.init_process_group(rank.backend, store=store, rank=rank.index, world_size=rank.size)
            assert (dist.get_rank(), dist.get_world_size()) == (rank.index, rank.size)
            tensor = torch.tensor([float(rank.index + cycle)], device=rank.device)
            dist.all_reduce(tensor)
            assert tensor.item() == sum(i + cycle for i in range(rank.size))
            dist.barrier()
            if cycle < 4:
                dist.destroy_process_group()

    world.run(body)


@requirement(
    "COLL-LIFE-03",
    "After destroy_process_group, a process can join again with another rank and world size.",
    source="torch.distributed.init_process_group",
)
@spmd(3)
def test_start_again_smaller(rank: Rank) -> None:
    """Ranks 1 and 2 become ranks 1 and 0 of a world of two; then all three return."""
    dist.barrier()
    dist.destroy_process_group()
    if rank.index > 0:
        store = dist.PrefixStore("smaller", rank.store)
        dist.init_process_group(rank.backend, store=store, rank=2 - rank.index, world_size=2)
        tensor = torch.tensor([float(rank.index)], device=rank.device)
        dist.broadcast(tensor, 0)
        assert tensor.item() == 2
        dist.barrier()
        dist.destroy_process_group()
    started(rank, "back", rank.index, rank.size)
    dist.barrier()


@requirement(
    "COLL-LIFE-04",
    "A second init_process_group raises an error.",
    source="torch.distributed.init_process_group",
)
@spmd(1, 2)
def test_started_twice(rank: Rank) -> None:
    """init_process_group raises ValueError, and the existing group stays usable."""
    with pytest.raises(ValueError, match="twice"):
        dist.init_process_group(rank.backend, store=rank.store, rank=rank.index, world_size=rank.size)
    dist.barrier()


@requirement(
    "COLL-LIFE-08",
    "register_backend makes a backend the default backend of the devices it is given, and of no other device.",
    source="torch.distributed.Backend.register_backend: devices, str or list of str; get_default_backend_for_device",
)
@pytest.mark.parametrize("devices", ["fpga", ["fpga"], ["fpga", "ve"]], ids=["text", "list", "two"])
@pytest.mark.world(1, warm=False)
def test_registered_for_devices(world: World, devices: str | list[str]) -> None:
    """Use device types that torch knows without a backend; the backend is never created."""

    def body(rank: Rank) -> tuple[dict[str, str], set[str]]:
        before = set(dist.Backend.default_device_backend_map)
        dist.Backend.register_backend("made_up", lambda *arguments: None, devices=devices)
        others = set(dist.Backend.default_device_backend_map) - before - set(named)
        return {name: _default_of(name) for name in named}, others

    named = [devices] if isinstance(devices, str) else devices
    assert_on_ranks([(dict.fromkeys(named, "made_up"), set())], world.run(body))


@requirement(
    "COLL-LIFE-18",
    "A backend that is registered for a device that has a default backend does not replace it.",
    source="torch.distributed.Backend.register_backend: devices; torch.distributed.get_default_backend_for_device, "
    "init_process_group: backend",
)
@pytest.mark.world(2, warm=False)
def test_registered_beside_another(world: World) -> None:
    """Register a second backend for a new device, the rank's device and such like it; start without a name."""

    def body(rank: Rank) -> None:
        own, defaults = rank.device.type, dist.Backend.default_device_backend_map
        usable = _default_of(own) == dist.get_backend()  # another backend may be unable to connect these ranks

        def refused(*arguments: Any) -> Any:
            raise AssertionError("a backend is made that nobody has named")

        def configuration() -> str:
            if usable:
                dist.barrier()
            dist.destroy_process_group()
            started = len(begun)
            begun.append(started)
            store = dist.PrefixStore(f"registered {started}", rank.store)
            dist.init_process_group(store=store, rank=rank.index, world_size=rank.size)
            for group in (None, dist.new_group()):
                if usable:
                    assert_usable(group, [0, 1], rank.index, rank.device)
            return f"{dist.get_backend_config()} {dist.get_backend()}"

        begun: list[int] = []
        dist.Backend.register_backend("made_up", refused, devices=["ve"])
        assert _default_of("ve") == "made_up"
        before, of_world = dict(defaults), configuration()
        alike = [device for device, default in before.items() if default == before[own]]  # others have a placeholder
        for name, devices in (("other", ["ve"]), ("another", [own]), ("third", alike), ("fourth", ["ve", own])):
            dist.Backend.register_backend(name, refused, devices=devices)
            assert dict(defaults) == before, name
            assert {device: _default_of(device) for device in before} == before, name
            assert dist.Backend.backend_capability[name] == devices
            assert dist.is_backend_available(name)
        with pytest.warns(UserWarning, match="devices"):
            dist.Backend.register_backend("fifth", refused)
        assert dict(defaults) == before
        assert configuration() == of_world

    world.run(body)


def _default_of(device: str) -> str:
    try:
        return dist.get_default_backend_for_device(device)
    except ValueError as e:
        return str(e)


@requirement(
    "COLL-GROUP-32",
    "Ranks that connect only when they must give the same results in every collective and message, whichever is first.",
    source="torch/csrc/distributed/c10d/ProcessGroupGloo.cpp: TORCH_GLOO_LAZY_INIT; test_c10d_gloo.py: "
    "ProcessGroupGlooLazyInitTest",
)
@pytest.mark.needs(features=["messages"])
@pytest.mark.world(3, env={"TORCH_GLOO_LAZY_INIT": "1"})
def test_late_connections(world: World) -> None:
    """Each kind of call is the first in a group of its own, also a receive from any rank, and others follow."""
    for case in claimed_cases(every_collective(group=(1, 2), root=1)):
        assert_right(world, [case])
    assert_right(world, every_collective(root=2, form="async", repeats=2))

    def body(rank: Rank) -> None:
        own = torch.tensor([float(rank.index)], device=rank.device)
        for how in ("recv", "any", "both ways", "barrier", "monitored_barrier", "objects"):
            group = dist.new_group()
            into = torch.full_like(own, -1)
            if how in ("barrier", "monitored_barrier"):
                getattr(dist, how)(group)
            elif how == "objects":
                objects: list[object] = [None] * 3
                dist.all_gather_object(objects, rank.index, group)
                assert objects == [0, 1, 2]
            elif how == "both ways":
                after, before = (rank.index + 1) % 3, (rank.index - 1) % 3
                ops = [dist.P2POp(dist.isend, own, after, group), dist.P2POp(dist.irecv, into, before, group)]
                for work in dist.batch_isend_irecv(ops):
                    work.wait()
                assert into.item() == before
            elif rank.index == 2:
                dist.send(own, 0, group)
            elif rank.index == 0:
                assert dist.recv(into, 2 if how == "recv" else None, group) == 2
                assert into.item() == 2
            assert_usable(group, [0, 1, 2], rank.index, rank.device)

    world.run(body)
