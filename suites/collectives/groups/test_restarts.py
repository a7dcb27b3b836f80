"""Groups that are created and destroyed: other sizes, ranks out of step, leaks, splitting and shrinking."""

from __future__ import annotations

import os
import random
import socket
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fixtures.beginnings import started
from harness import Rank, World, assert_on_ranks, requirement, spmd
from harness.stacks.collectives import claimed_cases, functional, run_cases
from suites.collectives.cases import every_collective


def assert_usable(group: dist.ProcessGroup | None, ranks: list[int], me: int, device: torch.device) -> None:
    """Assert that a group sums the tensors of exactly these ranks, which the digits of the sum show."""
    tensor = torch.tensor([10**me], device=device)
    dist.all_reduce(tensor, group=group)
    assert tensor.item() == sum(10**i for i in ranks)


@requirement(
    "COLL-LIFE-05",
    "The default group can be destroyed and initialized again with any world size, even by ranks that are out of step.",
    source="torch.distributed.destroy_process_group, init_process_group; pytorch/pytorch#119196",
)
@spmd(3, timeout=120)  # on an accelerator, each group may take seconds to connect
def test_start_again_out_of_step(rank: Rank) -> None:
    """Run twenty cycles of 3, 2, 1 and 3 ranks; each rank joins up to 4 ms late and leaves when it is done."""
    dist.barrier()
    dist.destroy_process_group()
    delay = random.Random(rank.index)
    for cycle in range(20):
        size = (3, 2, 1, 3)[cycle % 4]
        me = (rank.index + cycle) % rank.size
        if me < size:
            time.sleep(delay.random() / 250)  # this test is about late ranks
            started(rank, f"skewed-{cycle}", me, size)
            assert (dist.get_rank(), dist.get_world_size()) == (me, size)
            assert_usable(None, list(range(size)), me, rank.device)
            dist.destroy_process_group()
    started(rank, "back", rank.index, rank.size)
    dist.barrier()


@requirement(
    "COLL-LIFE-3659",
    "destroy_process_group of the default group destroys all groups of its world, as without a group, and another "
    "world can begin.",
    source="torch.distributed.destroy_process_group: group, 'if group.WORLD is given, all process groups'",
)
@pytest.mark.parametrize("given", [True, False], ids=["given", "none"])
@spmd(2, timeout=120)
def test_default_group_is_given(rank: Rank, given: bool) -> None:
    """Destroy three worlds in turn, in which there was another group, with the default group as the argument or not."""
    for cycle in range(3):
        dist.barrier()
        other = dist.new_group([0, 1])
        dist.destroy_process_group(dist.group.WORLD if given else None)
        assert not dist.is_initialized()
        with pytest.raises((ValueError, RuntimeError, AssertionError, KeyError)):
            dist.get_process_group_ranks(other)
        started(rank, f"given-{cycle}", rank.index, 2)
        assert_usable(None, [0, 1], rank.index, rank.device)


@requirement(
    "COLL-LIFE-07",
    "The default group can be destroyed and initialized again with fresh keys, on the same store, or at the same "
    "address.",
    source="torch.distributed.init_process_group: store, init_method; pytorch/pytorch#119196, pytorch/pytorch#55967",
)
@pytest.mark.parametrize("place", ["fresh-keys", "same-store", "same-address"])
@pytest.mark.world(2)
def test_start_again_in_the_same_place(world: World, place: str) -> None:
    """Run six cycles; rank 0, which hosts the store, leaves late, and the ranks take turns to join late."""

    def where(rank: Rank, cycle: int) -> dict[str, Any]:
        if place == "same-address":
            return {"init_method": f"tcp://127.0.0.1:{free_port(rank)}"}
        return {"store": dist.PrefixStore(f"keys-{cycle}" if place == "fresh-keys" else "keys", rank.store)}

    def body(rank: Rank) -> None:
        soon = timedelta(seconds=3)
        dist.barrier()
        dist.destroy_process_group()
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # so that rank 0 hosts the store at the address
        for cycle in range(6):
            if rank.index == cycle % 2:
                time.sleep(0.1)  # this test is about late ranks
            dist.init_process_group(rank.backend, rank=rank.index, world_size=2, timeout=soon, **where(rank, cycle))
            assert_usable(None, [0, 1], rank.index, rank.device)
            if rank.index == 0:
                time.sleep(0.1)
            dist.destroy_process_group()
        started(rank, "back", rank.index, rank.size)

    world.run(body)


@requirement(
    "COLL-LIFE-17",
    "The groups of a world that was made anew have the ranks that they are made with, whatever earlier worlds had.",
    source="torch.distributed.destroy_process_group, new_group, get_global_rank, get_group_rank",
)
@pytest.mark.needs(features=["functional", "messages"])
@spmd(3, timeout=120)
def test_groups_of_a_new_world(rank: Rank) -> None:
    """In each of three worlds make groups of other ranks in the same order, and use their members by number."""
    worlds = [[(0, 1), (1, 2), (2,)], [(1, 2), (0, 2), (0, 1)], [(0, 2), (0, 1, 2), (1, 2)]]
    for cycle, parts in enumerate(worlds):
        dist.barrier()
        dist.destroy_process_group()
        me = (rank.index + cycle) % rank.size
        started(rank, f"anew-{cycle}", me, rank.size)
        assert dist.get_process_group_ranks(None) == [0, 1, 2]
        made: list[tuple[tuple[int, ...], Any]] = []
        if me in parts[0]:
            made.append((parts[0], dist.new_group(list(parts[0]), use_local_synchronization=True)))
        made += [(part, dist.new_group(list(part))) for part in parts]
        mesh = DeviceMesh(rank.device.type, [list(parts[0])])
        made += [(parts[0], mesh.get_group(1))] if me in parts[0] else []
        for part, group in made:
            if me not in part:
                assert group is dist.GroupMember.NON_GROUP_MEMBER
                continue
            size = len(part)
            assert (dist.get_rank(group), dist.get_world_size(group)) == (part.index(me), size)
            assert dist.get_process_group_ranks(group) == list(part)
            assert [dist.get_global_rank(group, i) for i in range(size)] == list(part)
            assert [dist.get_group_rank(group, i) for i in part] == list(range(size))
            assert_usable(group, list(part), me, rank.device)
            for number, member in enumerate(part):
                for named in ({"src": member}, {"group_src": number}):
                    own = torch.tensor([float(me)], device=rank.device)
                    dist.broadcast(own, group=group, **named)
                    assert own.item() == member, (part, named)
                    objects = [me]
                    dist.broadcast_object_list(objects, group=group, **named)
                    assert objects == [member], (part, named)
            for by in (group, group.group_name):
                own = torch.tensor([10**me], device=rank.device)
                summed = functional.wait_tensor(functional.all_reduce(own, "sum", by))
                assert summed.item() == sum(10**i for i in part)
            if size > 1 and me == part[0]:
                dist.send(torch.tensor([float(me)], device=rank.device), group_dst=size - 1, group=group)
            elif size > 1 and me == part[-1]:
                own = torch.zeros(1, device=rank.device)
                assert dist.recv(own, group_src=0, group=group) == part[0]
                assert own.item() == part[0]


@requirement(
    "COLL-LIFE-19",
    "Without a group, a call is for the world that was started last.",
    source="torch.distributed.destroy_process_group, init_process_group; 'If None, the default process group will be "
    "used'",
)
@pytest.mark.needs(features=["messages"])
@pytest.mark.world(2)
def test_calls_in_a_new_world(world: World) -> None:
    """In the first world and in two later ones, call every collective, send messages and objects of every form."""
    cases = claimed_cases([replace(case, root=root) for root in (0, 1) for case in every_collective()])

    def body(rank: Rank) -> None:
        me, peer = rank.index, 1 - rank.index

        def sent(kind: str, tensor: torch.Tensor, to: int) -> None:
            if kind == "objects":
                dist.send_object_list([tensor], to)
            elif kind == "in flight":
                work: Any = dist.isend(tensor, to)
                work.wait()
            else:
                dist.send(tensor, to)

        def received(kind: str, tensor: torch.Tensor, of: int) -> torch.Tensor:
            objects: list[Any] = [None]
            if kind == "objects":
                assert dist.recv_object_list(objects, of) == of
                return objects[0]  # type: ignore[no-any-return]
            if kind == "in flight":
                work: Any = dist.irecv(tensor, of)
                work.wait()
            else:
                assert dist.recv(tensor, of) == of
            return tensor

        for cycle in range(3):
            if cycle:
                dist.barrier()
                dist.destroy_process_group()
                started(rank, f"world-{cycle}", me, 2)
            assert run_cases(rank, cases) == [], cycle
            for root in (0, 1):
                objects: list[Any] = [(cycle, me), None]
                dist.broadcast_object_list(objects, root)
                assert objects == [(cycle, root), None]
                dist.scatter_object_list(objects, [cycle, "second"] if me == root else None, root)
                assert objects[0] == [cycle, "second"][me]
                dist.gather_object(me, objects if me == root else None, root)
                assert me != root or objects == [0, 1]
            dist.all_gather_object(objects, (me, cycle))
            assert objects == [(0, cycle), (1, cycle)]
            own, other = (torch.tensor([x], device=rank.device) for x in (float(me), -1.0))
            for sender in (0, 1):
                for kind in ("plain", "in flight", "objects"):
                    if me == sender:
                        sent(kind, own, peer)
                    else:
                        assert received(kind, other.fill_(-1), peer).item() == sender, f"{kind}, world {cycle}"
            other.fill_(-1)
            batch = [dist.P2POp(dist.isend, own, peer), dist.P2POp(dist.irecv, other, peer)]
            for work in dist.batch_isend_irecv(batch):
                work.wait()
            assert other.item() == peer

    world.run(body)


def free_port(rank: Rank) -> int:
    """Return a port that was free when rank 0 looked for one, always the same."""
    if rank.index == 0 and not rank.store.check(["port"]):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            rank.store.set("port", str(probe.getsockname()[1]))
    return int(rank.store.get("port"))


def held() -> dict[str, int]:
    """Count the threads and file descriptors of this process."""
    return {kind: len(os.listdir(f"/proc/self/{kind}")) for kind in ("task", "fd")}


@requirement(
    "COLL-LIFE-06",
    "destroy_process_group releases the group's threads and file descriptors.",
    source="torch.distributed.destroy_process_group; pytorch/pytorch#107298, pytorch/pytorch#111392",
)
@pytest.mark.parametrize("what", ["default", "subgroup"])
@pytest.mark.world(2)
def test_nothing_is_kept(world: World, what: str) -> None:
    """Ten cycles end with as many threads and files as two; ending threads get a second."""

    def body(rank: Rank) -> None:
        if what == "default":
            dist.barrier()
            dist.destroy_process_group()
        before: dict[str, int] = {}
        for cycle in range(10):
            if what == "default":
                started(rank, f"kept-{cycle}", rank.index, rank.size)
                assert_usable(None, [0, 1], rank.index, rank.device)
                dist.barrier()
                dist.destroy_process_group()
            else:
                group = dist.new_group()
                assert_usable(group, [0, 1], rank.index, rank.device)
                dist.barrier(group)
                dist.destroy_process_group(group)
            before = held() if cycle == 1 else before
        end = time.monotonic() + 1
        while any(held()[kind] > before[kind] for kind in before) and time.monotonic() < end:
            time.sleep(0.01)  # until the kernel has released them
        after = held()
        assert {kind: after[kind] - before[kind] for kind in before if after[kind] > before[kind]} == {}
        if what == "default":
            started(rank, "back", rank.index, rank.size)

    world.run(body)


@requirement(
    "COLL-GROUP-08",
    "split_group returns to each rank the group of its part, or raises the same kind of error on every rank.",
    source="torch.distributed.split_group",
)
@requirement(
    "COLL-GROUP-15",
    "The default group stays usable after split_group.",
    source="torch.distributed.split_group",
)
@pytest.mark.world(3)
def test_split(world: World) -> None:
    """Ranks 0 and 2 form one part, rank 1 the other; on an accelerator the default group is bound to a device."""

    def body(rank: Rank) -> str:
        if rank.device.type != "cpu":
            dist.barrier()
            dist.destroy_process_group()
            store = dist.PrefixStore("bound", rank.store)
            dist.init_process_group(
                rank.backend, store=store, rank=rank.index, world_size=rank.size, device_id=rank.device
            )
            dist.all_reduce(torch.ones(1, device=rank.device))
        end = "right"
        with pytest.raises(ValueError, match="split_ranks"):
            dist.split_group()
        try:
            group = dist.split_group(split_ranks=[[0, 2], [1]], timeout=timedelta(seconds=30), group_desc="mine")
        except (RuntimeError, ValueError) as e:
            end = type(e).__name__
        else:
            part = [1] if rank.index == 1 else [0, 2]
            assert dist.get_process_group_ranks(group) == part
            assert group.group_desc == "mine"
            tensor = torch.tensor([10**rank.index], device=rank.device)
            dist.all_reduce(tensor, group=group)
            assert tensor.item() == sum(10**i for i in part)
        dist.barrier()
        return end

    assert len(set(world.run(body))) == 1


@requirement(
    "COLL-GROUP-09",
    "shrink_group gives the remaining ranks a new default group, or raises TypeError where the backend does not "
    "support it.",
    source="torch.distributed.shrink_group",
)
@pytest.mark.needs(torch="torch.distributed.shrink_group")
@pytest.mark.world(3)
def test_shrink(world: World) -> None:
    """The last rank is left out of a group and of the world and does not call; after errors the world is unchanged."""

    def body(rank: Rank) -> str:
        dist.all_reduce(torch.ones(1, device=rank.device))
        everyone = dist.new_group()
        if rank.index == 2:
            return "left out"
        with pytest.raises(ValueError, match="shrink_flags"):
            dist.shrink_group([2], shrink_flags=2)
        try:
            assert dist.shrink_group([2], everyone, shrink_flags=dist.distributed_c10d.SHRINK_ABORT).size() == 2
        except TypeError:
            assert dist.get_world_size(everyone) == 3
        try:
            group = dist.shrink_group([2])
        except TypeError:
            assert dist.get_world_size() == 3
            return "refused"
        assert (group.rank(), dist.get_world_size()) == (rank.index, 2)
        tensor = torch.tensor([10**rank.index], device=rank.device)
        dist.all_reduce(tensor)
        assert tensor.item() == 11
        return "shrunk"

    assert_on_ranks(["refused", "refused", "left out"], world.run(body), or_all=["shrunk", "shrunk", "left out"])
