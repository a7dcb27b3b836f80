"""Compiled code whose inputs are unwaited results of collectives, as tensors or inside DTensors."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from harness import Rank, World, assert_on_ranks, assert_same, dyadic, requirement
from harness.stacks import dynamo
from harness.stacks.collectives import functional, unwaited
from harness.stacks.limit import runs_with
from suites.dynamo.backends import INDUCTOR

LOCAL = 2
"""Elements of each rank's part of every result: one shape, so that Inductor generates only one kernel."""
MOVES: list[tuple[Placement, Placement]] = [
    (Shard(0), Replicate()),
    (Partial(), Replicate()),
    (Partial("max"), Replicate()),
    (Partial(), Shard(0)),
]
"""Redistributions that consist of a collective, without a later operation that would wait for it."""


def numbers(move: tuple[Placement, Placement], rank: Rank, call: int) -> torch.Tensor:
    """Return a rank's part of the tensor to redistribute, with different numbers in each call."""
    of, to = move
    count = LOCAL // rank.size if of.is_shard() else LOCAL * rank.size if to.is_shard() else LOCAL
    counted = torch.arange(count, dtype=torch.float32, device=rank.device)
    return counted * (1 + rank.index) + 7 * rank.index + 10 * call


def redistributed(move: tuple[Placement, Placement], mesh: Any, local: torch.Tensor, *, late: bool) -> DTensor:
    """Redistribute a local tensor; ``late``: without waiting for the collective."""
    return DTensor.from_local(local, mesh, [move[0]], run_check=False).redistribute(placements=[move[1]], async_op=late)


FORMS: dict[str, Callable[[DTensor, Any], Any]] = {
    "redistributed": lambda d, mesh: d,
    "to_local": lambda d, mesh: d.to_local(),
    "from_local": lambda d, mesh: DTensor.from_local(d.to_local(), mesh, [Shard(0)], run_check=False),
}
"""The forms in which compiled code gets a result."""


@requirement(
    "DYN-COLL-10",
    "Compiled code waits for an unwaited collective result that it is given, as a tensor or inside a DTensor, "
    "before it computes with it.",
    source="DTensor.redistribute: async_op; pytorch/pytorch#180614",
)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("backend", ["eager", "aot_eager", INDUCTOR])
@pytest.mark.world(2, timeout=180)
@pytest.mark.each_choice
def test_given(world: World, backend: str, form: str) -> None:
    """Test every redistribution in two calls; in the second, other ranks join after rank 0 launched the collective."""
    tag = uuid.uuid4().hex

    def body(rank: Rank) -> None:
        mesh = rank.mesh(rank.size)
        for move in MOVES:
            with dynamo.cached_as(tag):
                function, counter = dynamo.compiled(lambda x: x + 1, backend=backend)
                for call in range(2):
                    local, launched = numbers(move, rank, call), f"launched by rank 0: {move}, call {call}"
                    right = redistributed(move, mesh, local, late=False).to_local() + 1
                    if call and rank.index:
                        rank.store.wait([launched])
                    given = FORMS[form](redistributed(move, mesh, local, late=True), mesh)
                    assert unwaited() == 1, "the backend has waited already, so that nothing is seen here"
                    if call and not rank.index:
                        rank.store.set(launched, "")
                    result = function(given)
                    assert unwaited() == 0, f"{move}: nothing has waited for what was given"
                    assert_same(
                        right, result.to_local() if isinstance(result, DTensor) else result, f"{move}, call {call}"
                    )
                assert counter.graphs == 1

    world.run(body)


@requirement(
    "DYN-COLL-292",
    "A functional gather along a dimension before which the gathered tensor has only dimensions of one element stays "
    "pending until compiled or uncompiled code reads it.",
    source="torch/distributed/_functional_collectives.py: all_gather_single; torch/_utils.py: view optimization; "
    "pytorch/pytorch#172214",
)
@pytest.mark.skipif(runs_with("<2.12"), reason="before 2.12, a gather along another dimension than the first waits")
@pytest.mark.world(2, 3)
def test_gathered_along_others(world: World) -> None:
    """Gather along each dimension that allows it by each function; give the result to compiled code, or read it."""

    def body(rank: Rank) -> None:
        function, _ = dynamo.compiled(lambda x: x + 1, dynamic=False)
        gathers = (functional.all_gather_tensor, functional.all_gather_tensor_autograd)
        for shape, dim in ((1, 4), 1), ((1, 1, 3), 2), ((1, 3, 2), 1), ((3, 2), 0), ((1, 1), 1):
            for gather in gathers:
                what = f"{gather.__name__} of {shape} along {dim}"
                parts = [dyadic(*shape, key=i, dtype=torch.float32) for i in range(rank.size)]
                right = torch.cat(parts, dim)
                for read in (function, lambda y: y + 1):
                    result = gather(parts[rank.index].to(rank.device), dim, dist.group.WORLD)
                    assert unwaited() == 1, what
                    assert (result.shape, result.is_contiguous()) == (right.shape, True), what
                    assert unwaited() == 1, what
                    assert_same(right + 1, read(result), what)
                    assert unwaited() == 0, what

    world.run(body)


def views(x: torch.Tensor) -> list[torch.Tensor]:
    """Return views of a tensor of two rows and three columns, and something that is none."""
    return [x.unsqueeze(0), x.view(-1), x.t(), x[1:], x[:, 1], x * 2]


@requirement(
    "DYN-TANGENT-01",
    "Gradients pass through compiled code that is given the pending result of a collective, also to views of it.",
    source="torch/distributed/_functional_collectives.py: AsyncCollectiveTensor; torch/_functorch/_aot_autograd: "
    "tangents; test_c10d_functional_native.py: test_act_compile_backward_tangent_mismatch",
)
@pytest.mark.skipif(runs_with("<2.13"), reason="before 2.13, views of pending results have no gradient there")
@pytest.mark.world(2)
def test_gradients_of_views(world: World) -> None:
    """Use one of the views or all; what is given is pending, waited for, and pending again."""

    def body(rank: Rank) -> None:
        function, _ = dynamo.compiled(views, backend="aot_eager")
        for call, late in enumerate((True, False, True)):
            for some in ([0], [1, 2], range(6)):
                found = []
                for use in (views, function):
                    x = numbers(MOVES[0], rank, call).repeat(6).view(2, 3).requires_grad_()
                    given = functional.all_reduce(x, "sum", rank.group)
                    results = use(given if late else functional.wait_tensor(given))
                    loss: Any = sum((results[i] * (i + rank.index + 1)).sum() for i in some)
                    loss.backward()
                    assert x.grad is not None
                    found.append([x.grad, *[(result * 1).detach() for result in results]])
                    assert unwaited() == 0
                for one, other in zip(*found, strict=True):
                    assert_same(one.cpu(), other, f"views {some}, call {call}")

    world.run(body)


@requirement(
    "DYN-COLL-11",
    "One compiled function accepts DTensors with and without an unwaited collective, in any order.",
    source="DTensor.redistribute: async_op; pytorch/pytorch#180614; torch.compile: guards, caches on disk",
)
@pytest.mark.parametrize("first", ["waited-for", "late"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", INDUCTOR])
@pytest.mark.world(2, timeout=180)
@pytest.mark.each_choice
def test_by_turns(world: World, backend: str, first: str) -> None:
    """Call four times with an initially empty cache on disk."""
    tag = uuid.uuid4().hex

    def body(rank: Rank) -> None:
        mesh, move = rank.mesh(rank.size), MOVES[1]
        with dynamo.cached_as(tag):
            function, _ = dynamo.compiled(lambda x: x + 1, backend=backend)
            for call in range(4):
                local = numbers(move, rank, call)
                right = redistributed(move, mesh, local, late=False).to_local() + 1
                result = function(redistributed(move, mesh, local, late=(first == "late") != bool(call % 2)))
                assert unwaited() == 0
                assert_same(right, result.to_local(), f"call {call}")

    world.run(body)


@requirement(
    "DYN-COLL-203",
    "Code that was compiled for a pending result of a collective is not compiled again for results that were waited "
    "for.",
    source="torch/distributed/_functional_collectives.py: AsyncCollectiveTensor; pytorch/pytorch#187073",
)
@pytest.mark.parametrize("given", ["pending", "by-turns"])
@pytest.mark.world(2)
def test_waited_for_later(world: World, given: str) -> None:
    """Give four results of all_reduce: pending ones, or a pending one and one that was waited for by turns."""

    def body(rank: Rank) -> int:
        function, counter = dynamo.compiled(lambda x: x * 3)
        for call in range(4):
            result: Any = functional.all_reduce(
                torch.full((4,), 1.0 + call, device=rank.device), "sum", dist.group.WORLD
            )
            if given == "by-turns" and call % 2:
                result = result.wait()
            assert_same(torch.full((4,), 6.0 * (1 + call)), function(result).cpu(), f"call {call}")
        return counter.graphs

    assert_on_ranks([1] * world.size, world.run(body))


@requirement(
    "DYN-COLL-20",
    "With dynamic=True, code is compiled once for pending results of collectives of all sizes.",
    source="torch/distributed/_functional_collectives.py: AsyncCollectiveTensor; torch.compile: dynamic",
)
@pytest.mark.world(2)
def test_sizes(world: World) -> None:
    """Give three sizes as a pending result, and as a view of one, and then again after it was waited for."""

    def body(rank: Rank) -> None:
        forms: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "result": lambda x: x,
            "view": lambda x: x.view(2, -1),
        }
        for name, form in forms.items():
            function, counter = dynamo.compiled(lambda x: x * x.shape[-1] + 1, dynamic=True)
            for size in (6, 8, 10):
                given = torch.arange(float(size), device=rank.device) + rank.index
                right = form(2 * torch.arange(float(size)) + 1)
                pending = form(functional.all_reduce(given, "sum", dist.group.WORLD))
                assert unwaited() == 1, name
                assert_same(right * right.shape[-1] + 1, function(pending), f"{name} of {size}")
                assert unwaited() == 0, name
                assert counter.graphs == 1, f"{name} of {size}"

    world.run(body)
