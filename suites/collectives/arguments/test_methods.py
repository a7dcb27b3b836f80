"""Methods of groups, which the functions of torch.distributed call, and operations of reductions as objects."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import Rank, World, requirement, spmd
from harness.oracles.collectives import Case
from harness.profiles.obeyed import in_force
from harness.stacks.collectives import claimed_cases, premul_sum
from suites.collectives.cases import OPS


@requirement(
    "COLL-CALL-08",
    "Methods of a group give what the functions give, for a tensor or a list, by keywords or options, with ranks of "
    "the group.",
    source="torch/csrc/distributed/c10d/init.cpp: ProcessGroup; test_c10d_gloo.py: ProcessGroupGlooTest",
)
@pytest.mark.parametrize("ranks", [(0, 1, 2), (1, 2)], ids=["world", "without-rank-0"])
@pytest.mark.needs(collective="all_to_all")
@pytest.mark.needs(features=["coalescing", "messages"])
@pytest.mark.world(3)
def test_methods(world: World, ranks: tuple[int, ...]) -> None:
    """Call each method in each way, with another root, operation, tag or timeout than the default."""

    any_source = not in_force().claims.lacks_features("collectives", ["any_source"])

    def body(rank: Rank) -> None:
        group: Any = dist.new_group(list(ranks))
        if rank.index not in ranks:
            return
        size, me = len(ranks), ranks.index(rank.index)
        last, limit = size - 1, timedelta(seconds=50)
        ops = dist.ReduceOp

        def t(*numbers: float) -> torch.Tensor:
            return torch.tensor(numbers, device=rank.device)

        def own() -> torch.Tensor:
            return t(me + 2.0)

        def empty(count: int = 1, many: int = 0) -> Any:
            made = [torch.full((count,), -1.0, device=rank.device) for _ in range(many or 1)]
            return made if many else made[0]

        def filled(options: Any, **values: Any) -> Any:
            for name, value in values.items():
                setattr(options, name, value)
            return options

        def check(what: str, out: Any, right: Any, call: Callable[[Any], Any]) -> None:
            work = call(out)
            assert work.wait() in (None, True), what
            found = [tensor.tolist() for tensor in (out if isinstance(out, list) else [out])]
            assert right is None or found == [list(each) for each in right], what

        numbers = [member + 2.0 for member in range(size)]
        product = float(torch.tensor(numbers).prod())
        mine = [10.0 * me + slot for slot in range(size)]
        to_me = [10.0 * sender + me for sender in range(size)]
        here = me == last
        sums: dict[str, Callable[[Any], Any]] = {
            "a tensor": lambda x: group.allreduce(x),
            "a list": lambda x: group.allreduce([x]),
            "by default options": lambda x: group.allreduce([x], dist.AllreduceOptions()),
            "a tensor and a timeout": lambda x: group.allreduce(x, timeout=limit),
        }
        for what, call in sums.items():
            check(f"allreduce, {what}", own(), [[sum(numbers)]], call)
        products: dict[str, Callable[[Any], Any]] = {
            "a tensor": lambda x: group.allreduce(x, op=ops.PRODUCT),
            "a list": lambda x: group.allreduce([x], op=ops.PRODUCT),
            "by position": lambda x: group.allreduce(x, ops.PRODUCT),
            "options": lambda x: group.allreduce([x], filled(dist.AllreduceOptions(), reduceOp=ops.PRODUCT)),
            "opts": lambda x: group.allreduce([x], opts=filled(dist.AllreduceOptions(), reduceOp=ops.PRODUCT)),
        }
        for what, call in products.items():
            check(f"allreduce of a product, {what}", own(), [[product]], call)
        for what, call in {
            "keyword": lambda x: group.broadcast(x, root=last),
            "position": lambda x: group.broadcast(x, last),
            "options": lambda x: group.broadcast([x], filled(dist.BroadcastOptions(), rootRank=last, rootTensor=0)),
        }.items():
            check(f"broadcast, {what}", own(), [[numbers[last]]], call)
        for what, call in {
            "keywords": lambda x: group.reduce(x, root=last, op=ops.PRODUCT),
            "positions": lambda x: group.reduce(x, last, ops.PRODUCT),
            "options": lambda x: group.reduce([x], filled(dist.ReduceOptions(), rootRank=last, reduceOp=ops.PRODUCT)),
        }.items():
            check(f"reduce, {what}", own(), [[product]] if here else None, call)
        for what, call in {
            "a tensor": lambda x: group.allgather(x, own()),
            "lists": lambda x: group.allgather([x], [own()]),
        }.items():
            check(f"allgather, {what}", empty(1, size), [[number] for number in numbers], call)
        for what, call in {
            "keyword": lambda x: group.gather(x if here else [], own(), root=last),
            "options": lambda x: group.gather(
                [x] if here else [], [own()], filled(dist.GatherOptions(), rootRank=last)
            ),
        }.items():
            right = [[number] for number in numbers] if here else [[-1.0]] * size
            check(f"gather, {what}", empty(1, size), right, call)
        parts = [t(number) for number in mine]
        for what, call in {
            "keyword": lambda x: group.scatter(x, parts if here else [], root=last),
            "options": lambda x: group.scatter(
                [x], [parts] if here else [], filled(dist.ScatterOptions(), rootRank=last)
            ),
        }.items():
            check(f"scatter, {what}", empty(), [[10.0 * last + me]], call)
        for what, call in {
            "keyword": lambda x: group.reduce_scatter(x, parts, op=ops.MAX),
            "options": lambda x: group.reduce_scatter(
                [x], [parts], filled(dist.ReduceScatterOptions(), reduceOp=ops.MAX)
            ),
        }.items():
            check(f"reduce_scatter, {what}", empty(), [[max(to_me)]], call)
        check("alltoall", empty(1, size), [[number] for number in to_me], lambda x: group.alltoall(x, parts))
        check("alltoall_base", empty(size), [to_me], lambda x: group.alltoall_base(x, t(*mine), [], []))
        check("allreduce_coalesced", [own(), t(1.0)], [[sum(numbers)], [size]], group.allreduce_coalesced)
        both = [t(*(2.0 * number for number in mine)), t(*mine)]
        check(
            "allgather_into_tensor_coalesced",
            [*empty(size, 1), *empty(2 * size, 1)],
            [numbers, [x for number in numbers for x in (number, 7.0)]],
            lambda x: group.allgather_into_tensor_coalesced(x, [own(), t(me + 2.0, 7.0)]),
        )
        check(
            "reduce_scatter_tensor_coalesced",
            empty(1, 2),
            [[2 * sum(to_me)], [sum(to_me)]],
            lambda x: group.reduce_scatter_tensor_coalesced(x, both),
        )
        assert group.barrier().wait() in (None, True)
        assert group.barrier(timeout=limit).wait() in (None, True)
        into = empty()
        if me == 0:
            works = [group.send([t(tag + 0.5)], last, tag) for tag in (3, 4, 5)]
        else:
            works = [group.recv([empty()], 0, 3), group.recv([into], 0, 4)]
            works += [group.recv_anysource([empty()], 5) if any_source else group.recv([empty()], 0, 5)]
        works = works if me in (0, last) else []
        for work in works:
            work.wait()
        assert into.tolist() == ([4.5] if here else [-1])  # a device has done what was waited for
        assert all(work.is_completed() for work in works)

    world.run(body, timeout=40)


@requirement(
    "COLL-ASYNC-14",
    "Callbacks of a future, each chained to the one before, run in order on the value of a Work that is done.",
    source="torch.distributed.Work.get_future; torch.futures.Future.then; distributed_test.py: test_get_future",
)
@spmd(2)
def test_chained_callbacks(rank: Rank) -> None:
    """Chain three callbacks to collectives of every kind, and a failing one between others; wait for the last only."""
    calls: list[Callable[[], Any]] = [
        lambda: dist.all_reduce(torch.full((2,), rank.index + 1.0, device=rank.device), async_op=True),
        lambda: dist.broadcast(torch.full((2,), 3.0 * rank.index, device=rank.device), 1, async_op=True),
        lambda: dist.group.WORLD.allreduce([torch.full((2,), rank.index + 1.0, device=rank.device)]),  # type: ignore
    ]

    def fail(future: Any) -> Any:
        raise KeyError("in a callback")

    for call in calls:
        seen: list[str] = []

        def add(future: Any, seen: list[str] = seen) -> Any:
            seen.append("add")
            return [tensor + 1 for tensor in future.wait()]

        def double(future: Any, seen: list[str] = seen) -> Any:
            seen.append("double")
            return [2 * tensor for tensor in future.value()]

        work = call()
        future = work.get_future()
        chained = future.then(double).then(add).then(double)
        assert [tensor.tolist() for tensor in chained.wait()] == [[14.0, 14.0]]
        assert seen == ["double", "add", "double"]
        broken = future.then(fail)
        with pytest.raises((KeyError, RuntimeError), match="in a callback"):
            broken.wait()
        assert future.then(add).wait()[0].tolist() == [4.0, 4.0]
        work.wait()
        assert work.get_future().value()[0].tolist() == [3.0, 3.0]


@requirement(
    "COLL-OP-01",
    "A ReduceOp that is copied, pickled or wrapped is an instance of ReduceOp, equals its original alone, and reduces "
    "as it does.",
    source="torch.distributed.ReduceOp; pytorch/pytorch#87191, pytorch/pytorch#90072; test_c10d_common.py: "
    "ReduceOpTest",
)
@pytest.mark.world(2)
def test_operations_as_objects(world: World) -> None:
    """Copy, pickle and wrap each operation, compare all of them, and reduce numbers by those that are claimed."""
    dtypes = {name: torch.float32 if name == "AVG" else torch.int64 for name in OPS}
    reducing = {case.op for case in claimed_cases([Case("all_reduce", op, dtype) for op, dtype in dtypes.items()])}
    world.run(use_operations, dtypes, reducing)


def use_operations(rank: Rank, dtypes: Mapping[str, torch.dtype], reducing: Collection[str]) -> None:
    """Use operations as objects; ``dtypes``: what each is tried with; ``reducing``: those that reduce."""
    originals = {name: getattr(dist.ReduceOp, name) for name in dtypes}

    def forms(op: Any) -> dict[str, Any]:
        wrapped = dist.ReduceOp(op)
        made = {"plain": op, "wrapped": wrapped}
        for what, one in list(made.items()):
            made[f"copied {what}"] = copy.copy(one)
            made[f"deeply copied {what}"] = copy.deepcopy(one)
            made[f"pickled {what}"] = pickle.loads(pickle.dumps(one))
        made["in a container"] = copy.deepcopy({"op": [op]})["op"][0]
        return made

    everything = {name: forms(op) for name, op in originals.items()}
    for name, made in everything.items():
        numbers = [6, 3]
        right = {
            "SUM": 9,
            "PRODUCT": 18,
            "MIN": 3,
            "MAX": 6,
            "AVG": 4.5,
            "BAND": 6 & 3,
            "BOR": 6 | 3,
            "BXOR": 6 ^ 3,
        }[name]
        for what, op in made.items():
            assert isinstance(op, dist.ReduceOp), f"{name}, {what}"
            same = {other for other, another in originals.items() if op == another}
            assert same == {name}, f"{name}, {what}"
            if "wrapped" in what:  # a plain operation does not equal a wrapped one
                same = {other for other, another in originals.items() if op == dist.ReduceOp(another)}
                assert same == {name}, f"{name}, {what}"
            assert op != "SUM", f"{name}, {what}"
            assert op not in (None, name), f"{name}, {what}"
            if name in reducing:
                tensor = torch.tensor([numbers[rank.index]], dtype=dtypes[name], device=rank.device)
                dist.all_reduce(tensor, op)
                assert tensor.item() == right, f"{name}, {what}"
        assert {originals[name]: 1}[originals[name]] == 1
    arrived: list[Any] = [None, None]
    dist.all_gather_object(arrived, {name: made["wrapped"] for name, made in everything.items()})
    for one in arrived:
        assert all(op == originals[name] for name, op in one.items())
    factor = premul_sum(2.0)
    for op in (copy.copy(factor), copy.deepcopy(factor), pickle.loads(pickle.dumps(factor))):
        assert isinstance(op, dist.ReduceOp)
        assert op == factor
        assert op != originals["SUM"]
