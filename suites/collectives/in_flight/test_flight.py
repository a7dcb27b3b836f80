"""Work in flight: many works, works beside other calls, their completion, and their futures."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import permutations, product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fixtures.tensors import moved
from harness import Rank, World, assert_same, requirement, spmd
from harness.oracles.collectives import COLLECTIVES, IN_PLACE, Case, inputs, outputs
from harness.stacks.collectives import claimed_cases, functional, issue
from suites.collectives.cases import every_collective


@requirement(
    "COLL-ASYNC-06",
    "A hundred asynchronous collectives may be in flight, all of one kind or of every kind in turn.",
    source="torch.distributed.Work.wait",
)
@pytest.mark.parametrize("collective", ["all_reduce", "broadcast", "in turn"])
@pytest.mark.world(2, 3)
def test_a_hundred(world: World, collective: str) -> None:
    """The works are waited for in reverse order."""
    turn = [case.collective for case in claimed_cases(every_collective())] if collective == "in turn" else [collective]

    def body(rank: Rank) -> None:
        flying = []
        for call in range(100):
            case = Case(turn[call % len(turn)], form="async", root=1)
            given = moved(inputs(case, rank.size, rank.index, call), rank.device)
            right = outputs(case, rank.size, rank.index, call)
            in_place = case.collective in ("all_reduce", "reduce", "broadcast")
            results = given if in_place else [torch.full_like(out, -1, device=rank.device) for out in right]
            flying.append((issue(case, given, results, None), right, results, f"{case}, call {call}"))
        for work, _, _, _ in reversed(flying):
            work.wait()
        for _, right, results, label in flying:
            for expected, out in zip(right, results, strict=False):  # reduce has a result only on its root
                assert_same(expected, out, label)

    world.run(body)


@requirement(
    "COLL-ASYNC-07",
    "Work is not completed as long as a rank that it needs is missing.",
    source="torch.distributed.Work.is_completed",
)
@pytest.mark.parametrize(
    "collective",
    [
        "all_reduce",
        "all_gather",
        "reduce_scatter_tensor",
        "barrier",
        pytest.param("irecv", marks=pytest.mark.needs(features=["messages"])),
    ],
)
@pytest.mark.world(2)
def test_not_completed_alone(world: World, collective: str) -> None:
    """Rank 0 asks is_completed() before it lets rank 1 join."""

    def begin(rank: Rank) -> Any:
        tensor = torch.arange(4.0, device=rank.device) + rank.index
        if collective == "all_reduce":
            return dist.all_reduce(tensor, async_op=True)
        if collective == "all_gather":
            return dist.all_gather([torch.zeros_like(tensor) for _ in range(2)], tensor, async_op=True)
        if collective == "reduce_scatter_tensor":
            return dist.reduce_scatter_tensor(torch.zeros(2, device=rank.device), tensor, async_op=True)
        if collective == "barrier":
            return dist.barrier(async_op=True)
        return dist.irecv(tensor, 1) if rank.index == 0 else dist.isend(tensor, 0)

    def body(rank: Rank) -> None:
        if rank.index == 1:
            rank.store.wait(["asked"])
        work = begin(rank)
        if rank.index == 0:
            completed = work.is_completed()
            rank.store.set("asked", "")
            assert not completed
        work.wait()

    world.run(body)


@requirement(
    "COLL-ASYNC-5300",
    "A collective with async_op=True returns while other ranks have not called it yet.",
    source="torch.distributed: 'Asynchronous operation - when async_op is set to True'",
)
@pytest.mark.world(2)
def test_begun_alone(world: World) -> None:
    """Rank 0 issues every collective before rank 1 issues any; the first barrier connects the ranks."""
    turn = list(dict.fromkeys(case.collective for case in claimed_cases(every_collective())))

    def body(rank: Rank) -> None:
        dist.barrier()
        if rank.index == 1:
            rank.store.wait(["begun"])
        flying = []
        for call, collective in enumerate(turn):
            case = Case(collective, form="async", root=1)
            given = moved(inputs(case, rank.size, rank.index, call), rank.device)
            right = outputs(case, rank.size, rank.index, call)
            results = (
                given if collective in IN_PLACE else [torch.full_like(out, -1, device=rank.device) for out in right]
            )
            flying.append((issue(case, given, results, None), right, results, str(case)))
        last = dist.barrier(async_op=True)
        if rank.index == 0:
            rank.store.set("begun", "")
        for work, right, results, label in flying:
            work.wait()
            for expected, out in zip(right, results, strict=False):  # reduce has a result only on its root
                assert_same(expected, out, label)
        last.wait()

    world.run(body, timeout=20)


@requirement(
    "COLL-ASYNC-08",
    "The future of a Work holds the tensors of its result.",
    source="torch.distributed.Work.get_future",
)
@pytest.mark.parametrize("collective", ["all_reduce", "broadcast", "all_gather"])
@pytest.mark.world(1, 2, 3)
def test_future(world: World, collective: str) -> None:
    """Read the future with wait() and in a callback.

    On accelerators, the results of a list may be the rows of one tensor: pytorch/pytorch#68478.
    """

    def body(rank: Rank) -> None:
        rows = rank.device.type != "cpu"
        for call in range(2):
            case = Case(collective, form="async")
            given = moved(inputs(case, rank.size, rank.index, call), rank.device)
            right = outputs(case, rank.size, rank.index, call)
            results = (
                given if collective != "all_gather" else [torch.full_like(out, -1, device=rank.device) for out in right]
            )
            work = issue(case, given, results, None)
            future = work.get_future()
            shape = right[0].shape
            doubled = future.then(lambda done, shape=shape: [2 * out for out in _flat(done.value(), shape, rows)])
            values = _flat(future.wait(), shape, rows)
            work.wait()
            for expected, out, value, twice in zip(right, results, values, doubled.wait(), strict=True):
                assert_same(expected, value, f"future, call {call}")
                assert_same(expected, out, f"output, call {call}")
                assert_same(expected * 2, twice, f"callback, call {call}")

    world.run(body)


def _flat(value: Any, shape: torch.Size, rows: bool) -> list[torch.Tensor]:
    """Return the tensors in a future's value, which is a tensor, a list of tensors, or a list of lists.

    ``rows``: divide a tensor of one more dimension than the results, which are of that shape, into its rows.
    """
    if isinstance(value, torch.Tensor):
        return list(value) if rows and value.shape[1:] == shape else [value]
    return [tensor for inner in value for tensor in _flat(inner, shape, rows)]


@requirement(
    "COLL-ASYNC-09",
    "A collective is correct while other work on the group has not been waited for.",
    source="torch.distributed: asynchronous collective operations; intel/torch-xpu-ops#2178",
)
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.world(2, 3)
def test_beside_other_work(world: World, collective: str) -> None:
    """Start a large all_reduce, run the collective, then wait for the all_reduce."""

    def body(rank: Rank) -> None:
        large = Case("all_reduce", shape=(1 << 16,))
        for call in range(3):
            (total,) = moved(inputs(large, rank.size, rank.index, call), rank.device)
            pending = dist.all_reduce(total, async_op=True)
            case = Case(collective, form="async", shape=(33,))
            given = moved(inputs(case, rank.size, rank.index, call), rank.device)
            right = outputs(case, rank.size, rank.index, call)
            in_place = collective in ("all_reduce", "reduce", "broadcast")
            results = given if in_place else [torch.full_like(out, -1, device=rank.device) for out in right]
            _synchronously(collective, given, results)
            for expected, out in zip(right, results, strict=False):
                assert_same(expected, out, f"{case}, call {call}")
            pending.wait()
            assert_same(outputs(large, rank.size, rank.index, call)[0], total, "the work that was in flight")

    world.run(body)


def _synchronously(collective: str, given: list[torch.Tensor], found: list[torch.Tensor]) -> None:
    """Call a collective on the default group; rank 0 is the root."""
    function, root = getattr(dist, collective), dist.get_rank() == 0
    if collective in ("all_reduce", "reduce", "broadcast"):
        function(given[0], **({} if collective == "all_reduce" else {"dst" if collective == "reduce" else "src": 0}))
    elif collective == "all_gather":
        function(found, given[0])
    elif collective == "gather":
        function(given[0], found if root else None, 0)
    elif collective == "scatter":
        function(found[0], given if root else None, 0)
    elif collective == "reduce_scatter":
        function(found[0], given)
    elif collective == "all_to_all":
        function(found, given)
    else:
        function(found[0], given[0])


@requirement(
    "COLL-ASYNC-10",
    "Messages arrive while other work on the group has not been waited for.",
    source="torch.distributed: asynchronous collective operations",
)
@spmd(2, 3)
def test_messages_beside_other_work(rank: Rank) -> None:
    """Start a large all_reduce, then send a message from the first rank to the last."""
    for call in range(3):
        total = torch.full((1 << 16,), float(rank.index + call), device=rank.device)
        pending = dist.all_reduce(total, async_op=True)
        sent = torch.arange(7.0, device=rank.device) + 10 * call
        if rank.index == 0:
            dist.send(sent, rank.size - 1)
        elif rank.index == rank.size - 1:
            received = torch.full((7,), -1.0, device=rank.device)
            dist.recv(received, 0)
            assert_same(sent, received, f"message {call}")
        pending.wait()
        assert total.eq(sum(i + call for i in range(rank.size))).all()


@requirement(
    "COLL-THREAD-01",
    "A second thread may call collectives on its own group while the main thread calls collectives on another group.",
    source="torch.distributed.new_group: for use beside the default group",
)
@spmd(2, 3)
def test_from_another_thread(rank: Rank) -> None:
    """Run fifty all_reduces and broadcasts in each of two threads."""

    def work(group: Any, offset: int) -> None:
        for call in range(50):
            tensor = torch.tensor([10**rank.index * (call + offset)], device=rank.device)
            dist.all_reduce(tensor, group=group)
            totals[offset].append(tensor.item())
            tensor = torch.tensor([rank.index + call + offset], device=rank.device)
            dist.broadcast(tensor, call % rank.size, group=group)
            sources[offset].append(tensor.item())

    def on_own_stream(group: Any, offset: int) -> None:
        # On one stream, the calls of both groups would wait for each other, in a different order on each rank.
        with contextlib.nullcontext() if rank.device.type == "cpu" else torch.Stream(rank.device):
            work(group, offset)

    totals: dict[int, list[float]] = {1: [], 2: []}
    sources: dict[int, list[float]] = {1: [], 2: []}
    own = dist.new_group()
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(on_own_stream, own, 1)
        work(None, 2)
        other.result()
    everyone = sum(10**i for i in range(rank.size))
    for offset in (1, 2):
        assert totals[offset] == [everyone * (call + offset) for call in range(50)]
        assert sources[offset] == [call % rank.size + call + offset for call in range(50)]


@requirement(
    "COLL-REPEAT-01",
    "A collective is correct no matter how often it has been called on a group.",
    source="torch.distributed: its collectives",
)
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.world(2)
def test_again_and_again(world: World, collective: str) -> None:
    """Call five hundred times with one element per rank that encodes sender, receiver and call."""

    def body(rank: Rank) -> None:
        me, wrong = rank.index, []
        case = Case(collective, form="async")
        for call in range(500):
            mine = [torch.tensor([4.0 * call + 2 * me + slot], device=rank.device) for slot in range(2)]
            to_me = [4.0 * call + 2 * sender + me for sender in range(2)]
            first = [4.0 * call + 2 * sender for sender in range(2)]
            given, expected = {
                "all_reduce": (mine[:1], [sum(first)]),
                "reduce": (mine[:1], [sum(first)][me:]),
                "broadcast": (mine[:1], first[:1]),
                "all_gather": (mine[:1], first),
                "all_gather_into_tensor": (mine[:1], first),
                "gather": (mine[:1], first if me == 0 else []),
                "scatter": (mine if me == 0 else [], to_me[:1]),
                "reduce_scatter": (mine, [sum(to_me)]),
                "reduce_scatter_tensor": ([torch.cat(mine)], [sum(to_me)]),
                "all_to_all": (mine, to_me),
                "all_to_all_single": ([torch.cat(mine)], to_me),
            }[collective]
            results = given if collective in IN_PLACE else [torch.zeros(1, device=rank.device) for _ in expected]
            if collective in ("all_gather_into_tensor", "all_to_all_single"):
                results = [torch.zeros(2, device=rank.device)]
            issue(case, given, results, None).wait()
            values = [value for tensor in results for value in tensor.tolist()][: len(expected)]
            wrong += [(call, expected, values)] * (values != expected)
        assert wrong[:3] == []

    world.run(body)


@requirement(
    "COLL-OBJECT-08",
    "Object collectives are correct while other work on the group has not been waited for.",
    source="torch.distributed.all_gather_object; intel/torch-xpu-ops#2178",
)
@spmd(2, 3)
def test_objects_beside_other_work(rank: Rank) -> None:
    """Start a large all_reduce, then gather objects from all ranks and broadcast those of one."""
    for call in range(3):
        total = torch.full((1 << 16,), float(rank.index + call), device=rank.device)
        pending = dist.all_reduce(total, async_op=True)
        gathered: list[Any] = [None] * rank.size
        dist.all_gather_object(gathered, ("object", rank.index, call))
        assert gathered == [("object", i, call) for i in range(rank.size)]
        several = [("from", rank.index, call), "x" * call] if rank.index == 0 else [None, None]
        dist.broadcast_object_list(several, 0)
        assert several == [("from", 0, call), "x" * call]
        pending.wait()
        assert total.eq(sum(i + call for i in range(rank.size))).all()


@requirement(
    "COLL-PROFILE-01",
    "A profile shows a collective under the name of the innermost record_comm block around its call.",
    source="torch.distributed.record_comm: 'all c10d collectives issued within this context will use name as their "
    "profiling title'",
)
@pytest.mark.needs(torch="torch.distributed.record_comm")
@pytest.mark.needs(features=["functional", "messages"])
@pytest.mark.world(2)
def test_recorded_names(world: World) -> None:
    """Name every collective, or none; nest blocks, also of one name, leave one by an error, and one without calls."""
    cases = claimed_cases(every_collective())

    def body(rank: Rank) -> None:
        one = torch.ones(1, device=rank.device)

        def named(call: Callable[[], Any]) -> list[str]:
            """Return those of the test's names that are in a profile of a call."""
            with torch.autograd.profiler.profile(use_kineto=False) as profile:
                call()
            return [event.name for event in profile.function_events if event.name in names]

        def issued(case: Case) -> None:
            given = moved(inputs(case, rank.size, rank.index, 0), rank.device)
            right = outputs(case, rank.size, rank.index, 0)
            results = given if case.collective in IN_PLACE else [torch.zeros_like(o, device=rank.device) for o in right]
            issue(case, given, results, None).wait()

        def within(name: str, call: Callable[[], Any]) -> None:
            with dist.record_comm(name):
                call()

        def add() -> None:
            dist.all_reduce(one)

        def failing() -> None:
            add()
            raise KeyError

        def nested() -> None:
            add()
            with dist.record_comm("outer"):
                add()
                within("inner", add)
                add()
                with dist.record_comm("middle"):
                    within("inner", add)
                    within("outer", add)
                    add()
                add()
                with pytest.raises(KeyError):
                    within("failed", failing)
                add()
                within("empty", lambda: None)
                add()
            add()

        calls: dict[str, Callable[[], Any]] = {f"my {case.collective}": partial(issued, case) for case in cases}
        peer = 1 - rank.index
        calls["my barrier"] = dist.barrier
        calls["my message"] = lambda: dist.send(one, peer) if rank.index else dist.recv(one, peer)
        calls["my functional"] = lambda: functional.wait_tensor(functional.all_reduce(one, "sum", rank.group))
        names = {*calls, "outer", "inner", "middle", "failed", "empty"}
        for what, call in calls.items():
            assert set(named(partial(within, what, call))) == {what}  # of some backends it is several operations
            assert named(call) == [], what
        order = ["outer", "inner", "outer", "inner", "outer", "middle", "outer", "failed", "outer", "outer"]
        assert named(nested) == order

    world.run(body)


@requirement(
    "COLL-PROFILE-9406",
    "A record_comm block in one thread names the collectives of that thread, until it ends, and those of no other.",
    source="torch.distributed.record_comm: 'all c10d collectives issued within this context'; contextlib",
)
@pytest.mark.needs(torch="torch.distributed.record_comm")
@spmd(2)
def test_recorded_names_of_threads(rank: Rank) -> None:
    """A thread and the main one enter and leave their blocks in both orders, and add after each step."""
    one = torch.ones(1, device=rank.device)

    def named() -> list[str]:
        """Return those of the test's names that are in a profile of a sum."""
        with torch.autograd.profiler.profile(use_kineto=False) as profile:
            dist.all_reduce(one)
        return [event.name for event in profile.function_events if event.name in run]

    with ThreadPoolExecutor(1) as thread:
        run: dict[str, Callable[[Callable[[], Any]], Any]] = {
            "main": lambda call: call(),
            "thread": lambda call: thread.submit(call).result(),
        }
        orders = list(permutations(run))
        for begins, ends in product(orders, orders):
            blocks = {name: dist.record_comm(name) for name in run}
            entered: list[str] = []
            for name in begins:
                run[name](blocks[name].__enter__)
                entered.append(name)
                assert [run[each](named) for each in run] == [[each] * (each in entered) for each in run], (name, ends)
            for name in ends:
                run[name](partial(blocks[name].__exit__, None, None, None))
                entered.remove(name)
                assert [run[each](named) for each in run] == [[each] * (each in entered) for each in run], (name, ends)
