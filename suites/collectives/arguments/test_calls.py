"""How collectives are called: what they return, default roots, roots named twice, lists where none belong."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fixtures.tensors import moved
from harness import Rank, World, assert_on_ranks, assert_same, requirement, spmd
from harness.oracles.collectives import COLLECTIVES, IN_PLACE, ROOTED, Case, inputs, outputs
from harness.stacks.collectives import functional, issue

Call = Callable[..., Any]


def prepared(rank: Rank, collective: str) -> tuple[tuple[Any, ...], list[tuple[torch.Tensor, torch.Tensor]]]:
    """Return arguments of a collective, without its options, and each expected result with the tensor for it."""
    case = Case(collective, shape=(3,))
    given = moved(inputs(case, rank.size, rank.index), rank.device)
    right = outputs(case, rank.size, rank.index)
    results = given if collective in IN_PLACE else [torch.full_like(e, -1, device=rank.device) for e in right]
    first, out = (*given, None)[0], (*results, None)[0]
    arguments: dict[str, tuple[Any, ...]] = dict.fromkeys(COLLECTIVES, (out, first)) | {
        **dict.fromkeys(IN_PLACE, (first,)),
        "all_gather": (results, first),
        "gather": (first, results or None),
        "scatter": (out, given or None),
        "reduce_scatter": (out, given),
        "all_to_all": (results, given),
    }
    return arguments[collective], list(zip(right, results, strict=False))  # reduce has a result only on its root


@requirement(
    "COLL-ASYNC-11",
    "Without async_op a collective returns None when its result is there, and with async_op it returns a Work.",
    source="torch.distributed: 'Async work handle, if async_op is set to True. None, if not async_op'",
)
@requirement(
    "COLL-CALL-01",
    "The root of a collective is the rank that is named, or rank 0 of gather or scatter if none is.",
    source="torch.distributed.gather: dst: 'Default is 0', scatter: src",
)
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.world(2)
def test_what_is_returned(world: World, collective: str) -> None:
    """Give async_op or leave it out, by its name; give the root in each way, or leave it out."""

    def body(rank: Rank) -> None:
        function: Call = getattr(dist, collective)
        role = "src" if collective in ("broadcast", "scatter") else "dst"
        roots: list[dict[str, Any]] = [{}]
        if collective in ROOTED:
            roots = [{role: 0}, {f"group_{role}": 0}, *([{}] if collective in ("gather", "scatter") else [])]
        for root in roots:
            for options in ({}, {"async_op": False}, {"group": None}, {"group": dist.group.WORLD}):
                arguments, pairs = prepared(rank, collective)
                assert function(*arguments, **root, **options) is None, f"{root}, {options}"
                for right, out in pairs:
                    assert_same(right, out, f"{collective}, {root}, {options}")
            arguments, pairs = prepared(rank, collective)
            work = function(*arguments, **root, async_op=True)
            assert isinstance(work, dist.Work)
            assert work.wait() in (None, True)
            for right, out in pairs:
                assert_same(right, out, f"{collective}, {root}, async")

    world.run(body)


@requirement(
    "COLL-CALL-02",
    "A collective or message whose root or peer is given twice or not at all, or is no member, is refused.",
    source="torch.distributed.broadcast, reduce, gather, scatter, send, recv: src, group_src, dst, group_dst",
)
@pytest.mark.needs(features=["subgroups"])
@spmd(3)
def test_refused_roots(rank: Rank) -> None:
    """Ranks 1 and 2 call in their group with roots that cannot be; nothing is sent, and a broadcast follows."""
    group = dist.new_group([1, 2])
    if rank.index > 0:
        t = torch.full((2,), float(rank.index), device=rank.device)
        both = [torch.zeros_like(t) for _ in range(2)]
        calls: dict[str, tuple[Call, str]] = {
            "broadcast": (lambda **root: dist.broadcast(t, group=group, **root), "src"),
            "reduce": (lambda **root: dist.reduce(t, group=group, **root), "dst"),
            "gather": (lambda **root: dist.gather(t, both, group=group, **root), "dst"),
            "scatter": (lambda **root: dist.scatter(t, both, group=group, **root), "src"),
            "broadcast_object_list": (lambda **root: dist.broadcast_object_list(["x"], group=group, **root), "src"),
            "gather_object": (lambda **root: dist.gather_object("x", [None, None], group=group, **root), "dst"),
            "scatter_object_list": (lambda **root: dist.scatter_object_list([0], [1, 2], group=group, **root), "src"),
            "send": (lambda **root: dist.send(t, group=group, **root), "dst"),
            "isend": (lambda **root: dist.isend(t, group=group, **root), "dst"),
            "recv": (lambda **root: dist.recv(t, group=group, **root), "src"),
            "irecv": (lambda **root: dist.irecv(t, group=group, **root), "src"),
            "send_object_list": (lambda **root: dist.send_object_list(["x"], group=group, **root), "dst"),
            "recv_object_list": (lambda **root: dist.recv_object_list(["x"], group=group, **root), "src"),
        }
        for name, (call, role) in calls.items():
            twice = {role: 2, f"group_{role}": 1}
            outside: list[dict[str, int]] = [{role: 0}, {role: 3}, {role: -1}]
            for root in (twice, *outside):
                with pytest.raises((ValueError, RuntimeError)):
                    call(**root)
                assert t.tolist() == [rank.index] * 2, f"{name}, {root}"
            if name not in ("recv", "irecv"):  # which receive from any rank
                with pytest.raises((ValueError, TypeError, RuntimeError)):
                    call()  # rank 0 is no member
        dist.broadcast(t, 2, group=group)
        assert t.tolist() == [2, 2]


@requirement(
    "COLL-CALL-03",
    "gather and scatter refuse a list of tensors on a rank that is not the root, or no list on the root.",
    source="torch.distributed.gather: 'must be specified on the destination rank', scatter",
)
@pytest.mark.needs(collective="gather")
@pytest.mark.needs(collective="scatter")
@spmd(2)
def test_lists_of_others(rank: Rank) -> None:
    """Each rank in turn is the root, and every rank makes the mistake that it can; then each collective works."""
    tensor = torch.full((2,), float(rank.index), device=rank.device)
    for root in range(2):
        both = [torch.zeros(2, device=rank.device) for _ in range(2)]
        wrong: Any = None if rank.index == root else both
        right: Any = both if rank.index == root else None
        for function in (dist.gather, dist.scatter):
            with pytest.raises((ValueError, RuntimeError)):
                function(tensor, wrong, root)
        dist.gather(tensor, right, root)
        assert [t.tolist() for t in both] == ([[0, 0], [1, 1]] if rank.index == root else [[0, 0], [0, 0]])
        received = torch.zeros_like(tensor)
        dist.scatter(received, right, root)
        assert received.tolist() == [rank.index] * 2


@requirement(
    "COLL-ASYNC-12",
    "A collective in flight keeps the tensors alive that it needs, even if the caller releases them.",
    source="torch.distributed: asynchronous collective operations",
)
@pytest.mark.needs(features=["async", "messages"])
@spmd(2)
def test_released_inputs(rank: Rank) -> None:
    """Rank 0 releases what it sends and overwrites free memory before rank 1 takes part.

    Both issue every call together first, since a backend may connect two ranks in their first call, which then waits.
    """
    count = 5000

    def begin(number: int) -> tuple[Any, list[torch.Tensor]]:
        given = torch.full((count,), float(10 * number + rank.index), device=rank.device)
        outs = [torch.zeros(count, device=rank.device) for _ in range(2)]
        if number == 0:
            return dist.all_gather(outs, given, async_op=True), outs
        if number == 1:
            return dist.all_gather_into_tensor(whole := torch.cat(outs), given, async_op=True), [*whole.chunk(2)]
        if number == 2:
            return dist.all_to_all_single(outs[0], given, async_op=True), []
        if number == 3:
            return dist.gather(given, outs if rank.index == 1 else None, 1, async_op=True), outs[: 2 * rank.index]
        if rank.index == 0:
            return dist.isend(given, 1), []
        return dist.irecv(outs[0], 0), outs[:1]

    for number in range(5):
        begin(number)[0].wait()
    for number in range(5):
        if rank.index == 1:
            rank.store.wait([f"released {number}"])
        work, outs = begin(number)
        gc.collect()
        for _ in range(20):
            torch.full((count,), -5.0, device=rank.device)  # takes the memory, if it is free
        if rank.index == 0:
            rank.store.set(f"released {number}", "")
        work.wait()
        for sender, out in enumerate(outs):
            assert_same(torch.full((count,), 10.0 * number + sender), out, f"call {number}, from rank {sender}")


@requirement(
    "COLL-ASYNC-13",
    "A Work is completed once its result is there, even if nobody has waited for it.",
    source="torch.distributed.Work: is_completed, get_future",
)
@pytest.mark.parametrize("collective", [name for name in COLLECTIVES if not name.startswith("reduce_scatter")])
@pytest.mark.world(2)
def test_completes_by_itself(world: World, collective: str) -> None:
    """Ask a Work again and again, then look at its future and at the result.

    Reductions that scatter are left out: with one of PyTorch's own backends, their Work is completed by wait() only.
    """

    def body(rank: Rank) -> None:
        case = Case(collective, form="async")
        given = moved(inputs(case, rank.size, rank.index), rank.device)
        right = outputs(case, rank.size, rank.index)
        results = given if collective in IN_PLACE else [torch.full_like(e, -1, device=rank.device) for e in right]
        work = issue(case, given, results, None)
        tries = 0
        while not work.is_completed() and tries < 20_000_000:
            tries += 1
        assert work.is_completed()
        work.get_future().wait()
        assert work.get_future().done()
        for expected, out in zip(right, results, strict=False):
            assert_same(expected, out, collective)
        work.wait()

    world.run(body)


@requirement(
    "COLL-CALL-04",
    "A reduction that is undefined for complex numbers is refused in every form, before anything is sent.",
    source="torch.distributed: supports_complex",
)
@spmd(2)
def test_undefined_for_complex(rank: Rank) -> None:
    """Every operation without a meaning, with all_reduce, its form for lists, reduce and reduce_scatter_tensor."""
    t = torch.ones(2, dtype=torch.complex64, device=rank.device)
    for op in (dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT, dist.ReduceOp.BAND, dist.ReduceOp.BOR):
        calls: list[Callable[[], Any]] = [
            lambda op=op: dist.all_reduce(t, op),
            lambda op=op: dist.all_reduce(t, op, async_op=True),
            lambda op=op: dist.reduce(t, 0, op),
            lambda op=op: dist.reduce_scatter_tensor(t[:1].clone(), t, op),
            lambda op=op: dist.all_reduce_coalesced([t], op),
        ]
        for number, call in enumerate(calls):
            with pytest.raises((TypeError, ValueError, RuntimeError)):
                call()
            assert t.tolist() == [1, 1], f"{op}, call {number}"
    dist.all_reduce(t)
    assert t.tolist() == [2, 2]


FUNCTIONAL: dict[str, Call] = {
    "all_reduce": lambda t, op: functional.all_reduce(t, op, dist.group.WORLD),
    "all_reduce_coalesced": lambda t, op: functional.all_reduce_coalesced([t], op, dist.group.WORLD)[0],
    "reduce_scatter_tensor": lambda t, op: functional.reduce_scatter_tensor(t, op, 0, dist.group.WORLD),
    "reduce_scatter_tensor_coalesced": lambda t, op: functional.reduce_scatter_tensor_coalesced(
        [t], op, [0], dist.group.WORLD
    )[0],
}
"""Functional reductions of a tensor by an operation."""


@requirement(
    "COLL-CALL-04",
    "A reduction that is undefined for complex numbers is refused in every form, before anything is sent.",
    source="torch.distributed: supports_complex",
)
@pytest.mark.parametrize("collective", FUNCTIONAL)
@pytest.mark.world(2)
def test_functional_undefined_for_complex(world: World, collective: str) -> None:
    """Every operation without a meaning in a functional form, of numbers whose parts aren't reduced alone."""

    def body(rank: Rank) -> list[str]:
        accepted = []
        for op in ("product", "min", "max"):
            given = torch.full((2,), complex(rank.index + 1, 1), dtype=torch.complex64, device=rank.device)
            try:
                found = functional.wait_tensor(FUNCTIONAL[collective](given, op))  # type: ignore[no-untyped-call]
            except (TypeError, ValueError, RuntimeError):
                continue
            accepted.append(f"{op} is {found.tolist()}")
        return accepted

    assert_on_ranks([[]] * world.size, world.run(body))
