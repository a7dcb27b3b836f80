"""What a group is made with: order of its ranks, timeout, backend, description; and what cannot be made."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from harness import Rank, World, requirement
from suites.collectives.groups.test_naming import total

SECONDS = 0.5
SHORT = timedelta(seconds=SECONDS)
TIMEOUT = pytest.mark.needs(torch="torch.distributed.barrier(timeout)")


@requirement(
    "COLL-GROUP-19",
    "With sort_ranks=False, a group has its ranks in the order in which they are given.",
    source="torch.distributed.new_group: sort_ranks",
)
@pytest.mark.needs(torch="torch.distributed.new_group(sort_ranks)")
@pytest.mark.needs(features=["messages", "objects"])
@pytest.mark.world(3)
def test_given_order(world: World) -> None:
    """Ask for ranks both ways, and use them by position: gather, objects, roots and messages."""
    orders = [[2, 1, 0], [1, 2, 0], [0, 2, 1], [2, 0], [0, 1], [1], [0, 1, 2]]

    def body(rank: Rank) -> None:
        for order in orders:
            group = dist.new_group(order, sort_ranks=False)
            ordered = dist.new_group(order, sort_ranks=True)
            if rank.index not in order:
                assert group is ordered is dist.GroupMember.NON_GROUP_MEMBER
                continue
            assert dist.get_process_group_ranks(ordered) == sorted(order)
            assert dist.get_process_group_ranks(group) == order
            place = order.index(rank.index)
            assert (dist.get_rank(group), dist.get_world_size(group)) == (place, len(order)), order
            assert [dist.get_group_rank(group, member) for member in order] == list(range(len(order)))
            assert [dist.get_global_rank(group, i) for i in range(len(order))] == order
            own = torch.tensor([float(rank.index)], device=rank.device)
            gathered = [torch.zeros_like(own) for _ in order]
            dist.all_gather(gathered, own, group=group)
            assert [tensor.item() for tensor in gathered] == order
            objects: list[Any] = [None] * len(order)
            dist.all_gather_object(objects, rank.index, group=group)
            assert objects == order
            for number, member in enumerate(order):
                for named in ({"src": member}, {"group_src": number}):
                    sent = own.clone()
                    dist.broadcast(sent, group=group, **named)
                    assert sent.item() == member, f"{order}, {named}"
            if len(order) > 1 and place == 0:
                dist.send(own, group_dst=len(order) - 1, group=group)
            elif place == len(order) - 1 > 0:
                assert dist.recv(own, group_src=0, group=group) == order[0]
                assert own.item() == order[0]

    world.run(body)


@requirement(
    "COLL-GROUP-20",
    "A group has the backend and the description that it is made with.",
    source="torch.distributed.new_group: backend, group_desc; new_subgroups, new_subgroups_by_enumeration",
)
@requirement(
    "COLL-GROUP-21",
    "A group has a name of its own, which is the same on all members.",
    source="torch.distributed.new_group: ProcessGroup.group_name",
)
@pytest.mark.world(2)
def test_descriptions(world: World) -> None:
    """Make groups in every way, with and without a description and a backend."""

    def body(rank: Rank) -> None:
        made: list[tuple[Any, str | None]] = []
        for options in ({}, {"backend": dist.get_backend()}, {"group_desc": "mine"}, {"group_desc": "other"}):
            desc = options.get("group_desc")
            made.append((dist.new_group(**options), desc))
            made.append((dist.new_group([0, 1], **options), desc))
            made.append((dist.new_group([0, 1], use_local_synchronization=True, **options), desc))
            made.append((dist.new_subgroups(2, **options)[0], desc))
            made.append((dist.new_subgroups_by_enumeration([[1, 0]], **options)[0], desc))
        for group, desc in made:
            assert dist.get_backend(group) == dist.get_backend()
            assert dist.get_process_group_ranks(group) == [0, 1]
            if desc is not None:
                assert group.group_desc == desc
            assert total(rank, group) == 11
        names = [group.group_name for group, _ in made]
        assert len({*names, rank.group.group_name}) == len(names) + 1
        gathered: list[Any] = [None, None]
        dist.all_gather_object(gathered, names)
        assert gathered[0] == gathered[1]

    world.run(body)


MARK = 7


def register_marking(kind: str) -> list[tuple[int, int]]:
    """Register a backend whose sum of anything is a mark; return the rank and the size of each group that it makes."""
    made = []

    class Done(dist.Work):
        def wait(self, timeout: Any = None) -> bool:
            return True

        def is_completed(self) -> bool:
            return True

    class Marking(dist.ProcessGroup):
        called: str

        def getBackendName(self) -> str:  # noqa: N802 - torch asks by this name
            return "marking"

        def setGroupName(self, name: str) -> None:  # noqa: N802
            self.called = name

        def getGroupName(self) -> str:  # noqa: N802
            return self.called

        def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
            for tensor in tensors:
                tensor.fill_(MARK)
            return Done()

    def make(store: dist.Store, index: int, size: int, timeout: timedelta) -> Marking:
        made.append((index, size))
        return Marking(index, size)

    dist.Backend.register_backend("marking", make, devices=[kind])
    return made


@requirement(
    "COLL-GROUP-20",
    "A group has the backend and the description that it is made with.",
    source="torch.distributed.new_group: backend, group_desc; new_subgroups, new_subgroups_by_enumeration",
)
@requirement(
    "COLL-GROUP-29",
    "get_backend returns the backend of the group that it is given, which need not be that of the default group.",
    source="torch.distributed.get_backend: 'the backend of the given process group'; init_process_group, "
    "new_group: 'By default uses the same backend as the global group'",
)
@pytest.mark.world(2, warm=False)
def test_other_backends(world: World) -> None:
    """Register a backend, and make groups of it in every way between others; then make it the default."""

    def body(rank: Rank) -> None:
        kind, own = rank.device.type, dist.get_backend()
        made = register_marking(kind)

        def in_mesh(shape: tuple[int, ...], dim: int | str, **options: Any) -> Any:
            names = ("a", "b")[: len(shape)]
            override = dict.fromkeys([dim] if options else [], options.get("backend"))
            mesh = init_device_mesh(kind, shape, mesh_dim_names=names, backend_override=override)
            for number, name in enumerate(names):
                if dim not in (number, name):
                    assert dist.get_backend(mesh.get_group(number)) == default
            return mesh.get_group(dim)

        def check(group: Any, backend: str) -> None:
            assert dist.get_backend(group) == backend
            assert dist.get_process_group_ranks(group) == [0, 1]
            assert total(rank, group) == (MARK if backend == "marking" else 11)

        ways: dict[str, Callable[..., Any]] = {
            "everyone": lambda **options: dist.new_group(**options),
            "ranks": lambda **options: dist.new_group([1, 0], **options),
            "local": lambda **options: dist.new_group([0, 1], use_local_synchronization=True, **options),
            "subgroups": lambda **options: dist.new_subgroups(2, **options)[0],
            "enumerated": lambda **options: dist.new_subgroups_by_enumeration([[0, 1]], **options)[0],
            "mesh": lambda **options: in_mesh((2,), 0, **options),
            "first dimension": lambda **options: in_mesh((2, 1), "a", **options),
            "last dimension": lambda **options: in_mesh((1, 2), 1, **options),
        }
        for default, other in ((own, "marking"), ("marking", own)):
            if default == "marking":
                dist.barrier()
                dist.destroy_process_group()
                store = dist.PrefixStore("other", rank.store)
                dist.init_process_group("marking", store=store, rank=rank.index, world_size=2)
            groups: list[tuple[Any, str]] = []
            for options in ({"backend": other}, {}, {"backend": other.upper()}, {"backend": default}):
                backend = default if options.get("backend", default) == default else other
                groups += [(way(**options), backend) for way in ways.values()]
            for group, backend in (*groups, (None, default), (dist.group.WORLD, default)):
                check(group, backend)
            assert dist.get_backend() == default
            paired = dist.new_group(backend=f"{kind}:{other}")
            assert dist.get_backend_config(paired) == f"{kind}:{other}"
            assert total(rank, paired) == (MARK if other == "marking" else 11)
        assert set(made) <= {(rank.index, 2), (0, 1)}

    world.run(body)


@requirement(
    "COLL-TIMEOUT-04",
    "A group has the timeout that it is made with, whichever function makes it.",
    source="torch.distributed.new_group, new_subgroups, new_subgroups_by_enumeration: timeout",
)
@pytest.mark.needs(features=["subgroups"])
@pytest.mark.world(2)
def test_timeouts(world: World) -> None:
    """Rank 1 joins no collective until rank 0 has seen an error of each group; other groups wait on."""

    def body(rank: Rank) -> None:
        ways: dict[str, Callable[..., Any]] = {
            "everyone": lambda **options: dist.new_group(**options),
            "ranks": lambda **options: dist.new_group([0, 1], **options),
            "backend": lambda **options: dist.new_group(backend=dist.get_backend(), **options),
            "local": lambda **options: dist.new_group([0, 1], use_local_synchronization=True, **options),
            "subgroups": lambda **options: dist.new_subgroups(2, **options)[0],
            "enumerated": lambda **options: dist.new_subgroups_by_enumeration([[0, 1]], **options)[0],
        }
        short = {name: make(timeout=SHORT) for name, make in ways.items()}
        others = {name: make() for name, make in ways.items()}
        ones = torch.ones(2, device=rank.device)
        for group in (*short.values(), *others.values()):
            dist.all_reduce(ones.clone(), group=group)
        if rank.index == 1:
            rank.store.wait(["seen"])
        else:
            began = time.monotonic()
            works = {name: dist.all_reduce(ones.clone(), group=group, async_op=True) for name, group in short.items()}
            waiting = {
                name: dist.all_reduce(ones.clone(), group=group, async_op=True) for name, group in others.items()
            }
            try:
                for name, work in works.items():
                    with pytest.raises(RuntimeError, match=r"(?i)timed out"):
                        work.wait()
                    assert 0.9 * SECONDS <= time.monotonic() - began < SECONDS + 5, name
                assert [name for name, work in waiting.items() if work.is_completed()] == []
            finally:
                rank.store.set("seen", "")
            for work in waiting.values():
                work.wait()
            return
        for group in others.values():
            dist.all_reduce(ones.clone(), group=group)

    world.run(body, watch=False, timeout=20)


@requirement(
    "COLL-GROUP-22",
    "new_group refuses ranks that are there twice or do not exist, and a timeout that is none, without making a group.",
    source="torch.distributed.new_group: ranks, timeout",
)
@pytest.mark.needs(torch="torch.distributed.barrier(timeout)")  # which came together with these refusals
@pytest.mark.world(3)
def test_refused_ranks(world: World) -> None:
    """Every rank gives a rank twice or a negative one, and then makes a group."""

    def body(rank: Rank) -> None:
        before = dist.get_pg_count()
        for ranks in ([0, 1, 1], [2, 2], [0, 0, 1, 1], [-1, 0], [-1]):
            with pytest.raises((ValueError, RuntimeError)):
                dist.new_group(ranks)
            assert dist.get_pg_count() == before, f"{ranks}: a group is left"
        group = dist.new_group([1, 2])
        assert rank.index == 0 or total(rank, group) == 110

    world.run(body)


@requirement(
    "COLL-GROUP-22",
    "new_group refuses ranks that are there twice or do not exist, and a timeout that is none, without making a group.",
    source="torch.distributed.new_group: ranks, timeout",
)
@requirement(
    "COLL-GROUP-23",
    "new_subgroups refuses a size that does not divide the group, and new_subgroups_by_enumeration overlapping parts.",
    source="torch.distributed.new_subgroups, new_subgroups_by_enumeration",
)
@pytest.mark.world(3)
def test_refused_groups(world: World) -> None:
    """Every rank is refused, and then makes groups whose names agree."""

    def body(rank: Rank) -> None:
        refused: dict[str, Callable[[], Any]] = {
            "above": lambda: dist.new_group([0, 3]),
            "too many": lambda: dist.new_group([0, 1, 2, 3]),
            "seconds": lambda: dist.new_group([0, 1], timeout=10),  # type: ignore[arg-type]
            "no divisor": lambda: dist.new_subgroups(2),
            "zero": lambda: dist.new_subgroups(0),
            "negative": lambda: dist.new_subgroups(-1),
            "too large": lambda: dist.new_subgroups(6),
            **({} if torch.accelerator.is_available() else {"no size": dist.new_subgroups}),
            "nothing": lambda: dist.new_subgroups_by_enumeration([]),
            "part above": lambda: dist.new_subgroups_by_enumeration([[0, 3], [1]]),
            "negative part": lambda: dist.new_subgroups_by_enumeration([[-1, 0], [1]]),
        }
        before = dist.get_pg_count()
        for name, call in refused.items():
            with pytest.raises((ValueError, TypeError, RuntimeError)):
                call()
            assert dist.get_pg_count() == before, f"{name}: a group is left"
        with pytest.raises((ValueError, RuntimeError)):
            dist.new_subgroups_by_enumeration([[0, 1], [1, 2]])
        mine, groups = dist.new_subgroups_by_enumeration([[0, 2]])
        assert len(groups) == 1
        assert mine is (None if rank.index == 1 else groups[0])
        group = dist.new_group([1, 2])
        if rank.index > 0:
            assert total(rank, group) == 110
        assert total(rank, None) == 111

    world.run(body)


@requirement(
    "COLL-BARRIER-07",
    "A barrier of a subgroup waits for its members only, whatever its options.",
    source="torch.distributed.barrier: timeout, async_op; torch.distributed.monitored_barrier: timeout, wait_all_ranks",
)
@pytest.mark.needs(features=["subgroups"])
@pytest.mark.parametrize("timeout", [False, pytest.param(True, marks=TIMEOUT)], ids=["plain", "timeout"])
@pytest.mark.world(3)
def test_barriers_with_options(world: World, timeout: bool) -> None:
    """Rank 0 stays away until the others have passed each barrier; then all three pass it."""

    def body(rank: Rank) -> None:
        seconds = timedelta(seconds=10)
        options: dict[str, Any] = {"timeout": seconds} if timeout else {}
        group = dist.new_group([1, 2])
        kinds: list[Callable[[Any], Any]] = [
            lambda of: dist.barrier(of, **options),
            lambda of: dist.barrier(group=of, async_op=True, **options).wait(),
            lambda of: dist.barrier(of, async_op=True, **options).wait(seconds),
            lambda of: dist.barrier(of, async_op=False, **options),
        ]
        for number, barrier in enumerate(kinds):
            if rank.index > 0:
                barrier(group)
                rank.store.set(f"passed {number} {rank.index}", "")
            rank.store.wait([f"passed {number} {i}" for i in (1, 2)])
            assert barrier(None) in (None, True)

    world.run(body)


@requirement(
    "COLL-BARRIER-08",
    "A barrier with a timeout fails after that timeout if a rank is missing, and does not change the group's.",
    source="torch.distributed.barrier: timeout",
)
@TIMEOUT
@pytest.mark.needs(features=["subgroups", "timeouts"])
@pytest.mark.world(2)
def test_timeout_of_a_barrier(world: World) -> None:
    """Rank 1 comes too late for one barrier, and late, but not too late, for a collective and other barriers."""

    def body(rank: Rank) -> None:
        patient, hasty, broken = dist.new_group(), dist.new_group(timeout=SHORT), dist.new_group()
        others: list[Any] = [dist.new_group(), dist.new_group(), None]
        ones = torch.ones(1, device=rank.device)
        for group in (patient, hasty, broken, *others):
            dist.barrier(group, timeout=SHORT if group not in (hasty, broken) else None)
        dist.barrier(others[1], async_op=True, timeout=SHORT).wait()
        dist.barrier()
        if rank.index == 1:
            time.sleep(SECONDS + 0.2)
        # all that rank 1 is late for begins at once, so that it has to be late only once
        late = [dist.barrier(group, async_op=True) for group in others]
        late.append(dist.barrier(hasty, async_op=True, timeout=timedelta(seconds=20)))
        late.append(dist.all_reduce(ones, group=patient, async_op=True))
        for work in late:
            work.wait()
        assert ones.tolist() == [2]
        if rank.index == 1:
            rank.store.wait(["seen"])
            return
        began = time.monotonic()
        try:
            with pytest.raises(RuntimeError):
                dist.barrier(broken, timeout=SHORT)
            assert 0.9 * SECONDS <= time.monotonic() - began < SECONDS + 5
        finally:
            rank.store.set("seen", "")

    world.run(body, watch=False, timeout=20)


@requirement(
    "COLL-GROUP-27",
    "A group has the listed ranks as its only members, and one of no ranks has none or is refused.",
    source="torch.distributed.new_group, new_subgroups_by_enumeration: ranks",
)
@pytest.mark.world(3)
def test_members(world: World) -> None:
    """List one rank, some or all, in several kinds of sequences, which stay as they are; then list no rank."""
    given: list[Any] = [[1], [2, 0], (2, 1), range(2), [0, 1, 2], None]

    def body(rank: Rank) -> None:
        def check(group: Any, members: list[int]) -> None:
            if rank.index in members:
                assert dist.get_process_group_ranks(group) == members
                assert total(rank, group) == sum(10**member for member in members)
            else:
                assert group is dist.GroupMember.NON_GROUP_MEMBER, members
                assert (dist.get_rank(group), dist.get_world_size(group)) == (-1, -1), members

        for ranks in given:
            before = None if ranks is None else list(ranks)
            group = dist.new_group(ranks)
            check(group, [0, 1, 2] if ranks is None else sorted(ranks))
            assert ranks is None or list(ranks) == before
        parts: list[list[int]] = [[2, 0], [1]]
        mine, groups = dist.new_subgroups_by_enumeration(parts)
        assert parts == [[2, 0], [1]]
        for ranks, group in zip(parts, groups, strict=True):
            check(group, sorted(ranks))
            assert (mine is group) == (rank.index in ranks)
        for none in ([], ()):
            try:
                group = dist.new_group(none)  # type: ignore[arg-type]
            except (TypeError, ValueError, RuntimeError, AssertionError):
                continue
            check(group, [])
        check(dist.new_group(), [0, 1, 2])

    world.run(body)


@requirement(
    "COLL-GROUP-28",
    "Groups that only their members make change nothing for the groups that all ranks make.",
    source="torch.distributed.new_group: use_local_synchronization; torch.distributed.split_group: 'all ranks in the "
    "parent group enter this API call'",
)
@pytest.mark.parametrize("counts", ["equal", "unequal"])
@pytest.mark.world(3)
def test_local_groups_between_others(world: World, counts: str) -> None:
    """Ranks 1 and 2 make groups of their own before each group of all ranks, in equal or in unequal numbers."""
    local = [[1, 2], [1, 2]] if counts == "equal" else [[1, 2], [0, 1], [0, 1, 2], [1], [1, 2]]

    def body(rank: Rank) -> None:
        ways: list[Callable[[], Any]] = [
            lambda: dist.new_group(),
            lambda: dist.new_group([2, 0, 1]),
            lambda: dist.new_subgroups(3)[0],
            lambda: dist.new_subgroups_by_enumeration([[0, 1, 2]])[0],
            lambda: rank.mesh(3).get_group(),
        ]
        for make in ways:
            groups = []
            for ranks in local:
                group: Any = dist.new_group(ranks, use_local_synchronization=True)
                if rank.index not in ranks:
                    assert group is None or group is dist.GroupMember.NON_GROUP_MEMBER
                    continue
                assert dist.get_process_group_ranks(group) == ranks
                groups.append((ranks, group))
            groups.append(([0, 1, 2], make()))
            for ranks, group in groups:
                assert total(rank, group) == sum(10**member for member in ranks)

    world.run(body)


DESTROYED = {
    "again": [("make", [1, 2]), ("destroy", 0)] * 4,
    "the-older-one": [("make", [1, 2]), ("make", [1, 2]), ("destroy", 0), ("make", [1, 2]), ("make", [1, 2])],
    "others": [
        *[("make", [1, 2]), ("make", [0]), ("destroy", 0), ("destroy", 0), ("make", [2, 1, 0]), ("destroy", 0)],
        *[("make", [0, 1]), ("make", [2])],
    ],
}
"""Groups that are made, as many by each rank, and the places of those that are destroyed in the list of all."""


@requirement(
    "COLL-GROUP-8100",
    "A group can be made after groups of the same ranks were destroyed, whether all ranks or only members make it.",
    source="torch.distributed.new_group: use_local_synchronization; torch.distributed.destroy_process_group: group",
)
@pytest.mark.parametrize("local", [False, True], ids=["all-ranks", "members"])
@pytest.mark.parametrize("order", DESTROYED)
@pytest.mark.world(3)
def test_made_after_destroyed(world: World, local: bool, order: str) -> None:
    """Make groups and destroy them in turn, and use each that there is after every change."""

    def body(rank: Rank) -> None:
        groups: list[tuple[list[int], Any]] = []
        for what, given in DESTROYED[order]:
            if what == "destroy":
                ranks, group = groups.pop(given)
                if rank.index == ranks[-1]:
                    time.sleep(0.1)  # this test is about late ranks, too
                if rank.index in ranks:
                    dist.destroy_process_group(group)
            elif not local or rank.index in given:
                groups.append((given, dist.new_group(given, use_local_synchronization=local)))
            else:
                groups.append((given, None))
            names = [group.group_name for ranks, group in groups if rank.index in ranks]
            assert len({*names}) == len(names)
            for ranks, group in groups:
                if rank.index in ranks:
                    assert total(rank, group) == sum(10**member for member in ranks), f"{order}: {ranks}"

    world.run(body)


@requirement(
    "COLL-GROUP-28",
    "Groups that only their members make change nothing for the groups that all ranks make.",
    source="torch.distributed.new_group: use_local_synchronization; torch.distributed.split_group: 'all ranks in the "
    "parent group enter this API call'",
)
@pytest.mark.parametrize("parent", ["all", "two"])
@pytest.mark.world(3)
def test_groups_after_a_split(world: World, parent: str) -> None:
    """Split the default group or one of ranks 1 and 2; a backend may refuse it on every rank that is to do it."""

    def body(rank: Rank) -> str | None:
        group = rank.subgroup([1, 2]) if parent == "two" else None
        ends = None
        if parent == "all" or group is not None:
            try:
                part = dist.split_group(group, [[0], [1]])
            except (RuntimeError, ValueError) as e:
                ends = type(e).__name__
            else:
                ends = "split"
                mine = rank.index - (parent == "two")
                assert mine > 1 or dist.get_process_group_ranks(part) == [rank.index]
        for later in (dist.new_group(), dist.new_group([2, 0, 1]), rank.mesh(3).get_group()):
            assert total(rank, later) == 111
        return ends

    ends = world.run(body)
    assert len({end for end in ends if end}) == 1, ends


@requirement(
    "COLL-GROUP-04",
    "With use_local_synchronization=True, only the members of a group need to call new_group.",
    source="torch.distributed.new_group: use_local_synchronization",
)
@requirement(
    "COLL-GROUP-30",
    "With TORCH_DIST_INIT_BARRIER=1, no rank has a new group before every rank that must ask for it has asked.",
    source="torch/distributed/distributed_c10d.py: TORCH_DIST_INIT_BARRIER, new_group, init_process_group",
)
@pytest.mark.parametrize("groups", ["local", "of all"])
@pytest.mark.world(3)
def test_barriers_of_beginnings(world: World, groups: str) -> None:
    """Rank 2 asks for each group late, also as one of its members, and rank 0 never asks for local ones of others."""

    def body(rank: Rank) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TORCH_DIST_INIT_BARRIER", "1")
            seconds = timedelta(seconds=5)
            dist.barrier()
            dist.destroy_process_group()
            store = dist.PrefixStore("beginning", rank.store)

            def late(name: str) -> None:
                if rank.index == 2:
                    time.sleep(0.02)  # enough to see a rank that does not wait
                    rank.store.set(f"asking for {name}", "")

            def everyone_asked(name: str) -> None:
                assert rank.store.check([f"asking for {name}"]), name

            late("the world")
            dist.init_process_group(rank.backend, store=store, rank=rank.index, world_size=3, timeout=seconds)
            everyone_asked("the world")
            if groups == "local":
                for number, ranks in enumerate([[1, 2], [1, 2], [1] if rank.index == 1 else [2]]):
                    if rank.index == 0:
                        rank.store.wait([f"local {number} of {i}" for i in (1, 2)])
                        continue
                    late(f"local {number}")
                    group = dist.new_group(ranks, use_local_synchronization=True, timeout=seconds)
                    if 2 in ranks:
                        everyone_asked(f"local {number}")
                    assert total(rank, group) == sum(10**i for i in ranks)
                    rank.store.set(f"local {number} of {rank.index}", "")
                return
            for ranks in ([0, 1], [1, 2], [0], [0, 1, 2]):
                late(f"{ranks}")
                group = dist.new_group(ranks, timeout=seconds)
                everyone_asked(f"{ranks}")
                assert rank.index not in ranks or total(rank, group) == sum(10**i for i in ranks)
            late("parts")
            mine, _ = dist.new_subgroups_by_enumeration([[2, 0], [1]], timeout=seconds)
            everyone_asked("parts")
            assert total(rank, mine) == (10 if rank.index == 1 else 101)

    world.run(body)
