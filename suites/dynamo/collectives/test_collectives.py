"""Compiled collectives give the same results as uncompiled ones, in one graph, and launch nothing else."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness import Rank, World, assert_on_ranks, assert_same, requirement
from harness.oracles.collectives import Case, inputs, lay, outputs
from harness.stacks import dynamo
from harness.stacks.collectives import functional, reduction, unwaited
from harness.stacks.limit import runs_with
from harness.stacks.training import launched, since
from suites.dynamo.backends import INDUCTOR

SOURCE = "torch/_dynamo/variables/functions.py: CollectiveFunctionRewriteVariable"
GROUPS = pytest.mark.parametrize("members", [(0, 1, 2), (1, 2), (0, 2)], ids=["world", "without-rank-0", "ends"])
INTEGERS = [(op, torch.int64) for op in ("SUM", "MAX", "MIN", "PRODUCT", "BAND", "BOR", "BXOR")]
FLOATS = [(op, torch.float32) for op in ("SUM", "MAX", "MIN")]
KINDS = {
    "all_reduce": INTEGERS + FLOATS,
    "reduce_scatter_tensor": FLOATS,
    **dict.fromkeys(("all_gather_into_tensor", "all_gather", "all_to_all_single"), FLOATS[:1]),
}
"""The operations and dtypes of each collective that compiled code rewrites."""


def among(world: World, ranks: tuple[int, ...], body: Callable[[Rank, Any, int, int], None]) -> None:
    """Run ``body(rank, group, member, size)`` on the members of a group; the group of everyone is the default one."""

    def run(rank: Rank) -> None:
        group = None if len(ranks) == rank.size else dist.new_group(list(ranks))
        if rank.index in ranks:
            body(rank, group, ranks.index(rank.index), len(ranks))

    world.run(run)


def issue(case: Case, given: Any, into: Any, group: Any) -> Any:
    """Call the collective of a case; ``into``: the output tensors."""
    name = case.collective
    if name == "all_reduce":
        return dist.all_reduce(into[0], op=reduction(case.op), group=group)
    if name == "all_gather":
        return dist.all_gather(into, given, group=group)
    if name == "reduce_scatter_tensor":
        return dist.reduce_scatter_tensor(into[0], given, op=reduction(case.op), group=group)
    return getattr(dist, name)(into[0], given, group=group)


@requirement(
    "DYN-COLL-01",
    "A compiled collective writes the same result to its tensors as an uncompiled one.",
    source=SOURCE,
)
@requirement(
    "DYN-COLL-12",
    "A compiled collective returns None and is waited for.",
    source=SOURCE,
)
@requirement(
    "DYN-COLL-13",
    "A collective is compiled once, into one graph, for all calls of one tensor shape.",
    source=SOURCE,
)
@GROUPS
@pytest.mark.world(3)
def test_rewritten(world: World, members: tuple[int, ...]) -> None:
    """Use every operation in one graph, in two calls with different data; the function closes over the group."""

    def body(rank: Rank, group: Any, member: int, size: int) -> None:
        cases = [Case(name, op, dtype, (6,)) for name, kinds in KINDS.items() for op, dtype in kinds]
        function, counter = dynamo.compiled(
            lambda given, into: [issue(case, x, y, group) for case, x, y in zip(cases, given, into, strict=True)]
        )
        for call in range(2):
            given = [inputs(case, size, member, call)[0].to(rank.device) for case in cases]
            expected = [outputs(case, size, member, call) for case in cases]
            into = [[torch.full_like(right, -1, device=rank.device) for right in rights] for rights in expected]
            for place, case in enumerate(cases):
                into[place] = [given[place].clone()] if case.collective == "all_reduce" else into[place]
            for returned in function(given, into):
                assert returned is None
            assert unwaited() == 0
            for case, rights, results in zip(cases, expected, into, strict=True):
                for right, result in zip(rights, results, strict=True):
                    assert_same(right, result, f"{case}, call {call}")
        assert counter.graphs == 1

    among(world, members, body)


@requirement(
    "DYN-COLL-02",
    "A compiled all_reduce works in place on tensors of any layout, including zero-dimensional ones.",
    source=SOURCE,
)
@pytest.mark.parametrize(
    ("shape", "layout"),
    [((), "contiguous"), ((1,), "contiguous"), ((3, 5), "column"), ((3, 5), "transposed")],
    ids=["scalar", "one", "column", "transposed"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.bfloat16], ids=lambda d: str(d)[6:])
@pytest.mark.world(2)
@pytest.mark.each_choice
def test_in_place(world: World, dtype: torch.dtype, shape: tuple[int, ...], layout: str) -> None:
    """The memory between the elements stays unchanged."""

    def body(rank: Rank) -> None:
        case = Case("all_reduce", "SUM", dtype, shape or (1,), layout=layout)
        function, _ = dynamo.compiled(lambda tensor: dist.all_reduce(tensor))
        given, memory = lay(inputs(case, 2, rank.index, 0)[0].to(rank.device), layout)
        given = given if shape else given.reshape(())
        outside = torch.ones_like(memory, dtype=torch.bool)
        outside.as_strided(given.shape, given.stride(), given.storage_offset()).fill_(False)
        before = memory[outside].clone()
        function(given)
        assert_same(
            outputs(case, 2, rank.index, 0)[0].reshape(shape), given.clone(memory_format=torch.contiguous_format), "sum"
        )
        assert_same(before, memory[outside], "between")

    world.run(body)


@requirement(
    "DYN-COLL-03",
    "A compiled all_to_all_single exchanges chunks of any sizes.",
    source=SOURCE,
)
@pytest.mark.world(2, 3)
def test_uneven_exchange(world: World) -> None:
    """Rank i sends i + j + 1 numbers to rank j."""

    def body(rank: Rank) -> None:
        sent = [rank.index + j + 1 for j in range(rank.size)]
        function, counter = dynamo.compiled(
            lambda output, tensor: dist.all_to_all_single(output, tensor, list(sent), list(sent))
        )
        given = [torch.arange(count) + 100 * rank.index + 10 * j for j, count in enumerate(sent)]
        output = torch.zeros(sum(sent), dtype=torch.int64, device=rank.device)
        function(output, torch.cat(given).to(rank.device))
        expected = [torch.arange(count) + 100 * j + 10 * rank.index for j, count in enumerate(sent)]
        assert_same(torch.cat(expected), output, "received")
        assert counter.graphs == 1

    world.run(body)


EXCHANGES: dict[str, Callable[[int, int, int], int]] = {
    "the first sends nothing": lambda i, j, size: 0 if i == 0 else i + j,
    "the first receives nothing": lambda i, j, size: 0 if j == 0 else i + j,
    "the last has no part": lambda i, j, size: 0 if size - 1 in (i, j) else 2,
    "each to itself": lambda i, j, size: i + 1 if i == j else 0,
    "each to the next": lambda i, j, size: i + 1 if (i + 1) % size == j else 0,
    "nobody": lambda i, j, size: 0,
}
"""How many rows rank i sends to rank j, in exchanges in which some are not sent any."""


@requirement(
    "DYN-COLL-19",
    "In compiled code, an exchange in which ranks send or receive nothing is one collective of all ranks.",
    source=f"{SOURCE}; torch/distributed/_functional_collectives.py: all_to_all_single",
)
@pytest.mark.needs(collective="all_to_all_single")
@pytest.mark.world(2, 3)
def test_exchange_of_nothing(world: World) -> None:
    """Use all three forms in one graph for each exchange; compare rows, gradients and counts of collectives."""

    def body(rank: Rank) -> None:
        size, me = rank.size, rank.index
        for what, rows in EXCHANGES.items():
            sent, received = ([rows(me, j, size) for j in range(size)], [rows(j, me, size) for j in range(size)])

            def exchange(
                x: torch.Tensor, into: torch.Tensor, sent: list[int] = sent, received: list[int] = received
            ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
                dist.all_to_all_single(into, x.detach(), received, sent)
                y = functional.all_to_all_single(x.detach() * 2, received, sent, dist.group.WORLD)
                z = functional.all_to_all_single_autograd(x, received, sent, dist.group.WORLD)
                return into + 1, y + 1, z * 4

            function, counter = dynamo.compiled(exchange)
            numbers = [[torch.full((rows(i, j, size), 2), 10.0 * i + j) for j in range(size)] for i in range(size)]
            x = torch.cat(numbers[me]).to(rank.device).requires_grad_()
            right = torch.cat([numbers[i][me] for i in range(size)])
            before = launched()
            results = function(x, torch.full_like(right, -1, device=rank.device))
            assert since(before) == {tuple(range(size)): 3}, what
            results[2].sum().backward()
            assert since(before) == {tuple(range(size)): 4}, what
            for one, other in zip((right + 1, right * 2 + 1, right * 4), results, strict=True):
                assert_same(one, other.detach() + 0, what)
            assert x.grad is not None
            assert_same(torch.full_like(x, 4).detach().cpu(), x.grad, f"gradient, {what}")
            assert counter.graphs == 1

    world.run(body)


@requirement(
    "DYN-COLL-04",
    "One compiled function works with each group that it is given.",
    source="torch/_dynamo/variables/distributed.py; torch.compile: guards",
)
@pytest.mark.world(3)
def test_other_groups(world: World) -> None:
    """Pass the world, two ranks, and one rank alone, in turn and again, to a function of four collectives."""
    names = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")

    def body(rank: Rank) -> None:
        cases = [Case(name, shape=(6,)) for name in (*names, "all_reduce")]

        def collective(given: Any, into: Any, group: Any) -> None:
            for case, x, y in zip(cases[:-1], given, into, strict=False):
                issue(case, x, y, group)
            into[-1][0].copy_(functional.all_reduce(given[-1], "sum", group))

        function, _ = dynamo.compiled(collective)
        everyone = [(0, 1, 2), (1, 2), (rank.index,), (0, 2)]
        groups = {members: dist.new_group(list(members)) for members in [(0, 1, 2), (1, 2), (0, 2), (0,), (1,), (2,)]}
        for call, members in enumerate(everyone * 2):
            if rank.index not in members:
                continue
            member = members.index(rank.index)
            given = [inputs(case, len(members), member, call)[0].to(rank.device) for case in cases]
            expected = [outputs(case, len(members), member, call)[0] for case in cases]
            into = [[torch.zeros_like(right, device=rank.device)] for right in expected]
            into[0] = [given[0].clone()]
            function(given, into, groups[members])
            for case, right, (result,) in zip(cases, expected, into, strict=True):
                assert_same(right, result, f"{case}, call {call} among {members}")

    world.run(body)


@requirement(
    "DYN-COLL-05",
    "An asynchronous collective in compiled code has its result after wait().",
    source="torch.distributed.all_reduce: async_op",
)
@pytest.mark.world(2)
def test_asynchronous(world: World) -> None:
    """Compute between the collective and the wait; graph breaks are allowed."""

    def body(rank: Rank) -> None:
        def collective(tensor: torch.Tensor) -> torch.Tensor:
            work: Any = dist.all_reduce(tensor, async_op=True)
            other = tensor.new_ones(3)
            work.wait()
            return tensor + other

        function, _ = dynamo.compiled(collective, fullgraph=False)
        for call in range(2):
            given = torch.full((3,), 1.0 + rank.index + call, device=rank.device)
            assert_same(torch.full((3,), 4.0 + 2 * call), function(given), "sum")

    world.run(body)


@requirement(
    "DYN-COLL-06",
    "Compiled code launches the same collectives as uncompiled code, in the same order, even if a result is not used.",
    source="torch.compile; torch/distributed/_functional_collectives.py",
)
@requirement(
    "DYN-COLL-14",
    "Compiling launches no collective.",
    source="torch.compile; torch/distributed/_functional_collectives.py",
)
@pytest.mark.world(2, 3)
def test_launched(world: World) -> None:
    """Call three collectives, one of them unused and two independent, three times with two shapes."""

    def body(rank: Rank) -> None:
        def collectives(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            functional.all_reduce(x * 2, "max", dist.group.WORLD)
            largest = functional.all_reduce(y, "max", dist.group.WORLD)
            dist.all_reduce(x)
            return x + 1, largest + 1

        function, counter = dynamo.compiled(collectives)
        for call, rows in enumerate((2, 2, 3)):
            before = launched()
            x = torch.full((rows,), 1.0 + rank.index + call, device=rank.device)
            y = torch.full((rows,), 10.0 + rank.index, device=rank.device)
            total, largest = function(x, y)
            assert_same(torch.full((rows,), 1 + sum(1.0 + i + call for i in range(rank.size))), total, "sum")
            assert_same(torch.full((rows,), 10.0 + rank.size), largest, "maximum")
            assert since(before) == {tuple(range(rank.size)): 3}
            assert unwaited() == 0
        assert counter.graphs == 2

        def used_by_one(x: torch.Tensor) -> torch.Tensor:
            largest = functional.all_reduce(x * 2, "max", dist.group.WORLD)
            share = functional.reduce_scatter_tensor(x, "sum", 0, dist.group.WORLD)
            whole = functional.all_gather_tensor(share, 0, dist.group.WORLD)
            return x + whole + largest if rank.index == 0 else x + 1

        function, _ = dynamo.compiled(used_by_one)
        x = torch.arange(2.0 * rank.size, device=rank.device) + rank.index
        right = used_by_one(x)
        before, left = launched(), unwaited()
        assert_same(right, function(x), "the result that one rank uses")
        assert since(before) == {tuple(range(rank.size)): 3}
        assert unwaited() == left

    world.run(body)


@requirement(
    "DYN-COLL-06",
    "Compiled code launches the same collectives as uncompiled code, in the same order, even if a result is not used.",
    source="torch.compile; torch/distributed/_functional_collectives.py",
)
@pytest.mark.parametrize("trained", [False, True], ids=["evaluated", "trained"])
@pytest.mark.world(2)
def test_equal(world: World, trained: bool) -> None:
    """Call an all-reduce of the same tensor twice, with or without a weight that is trained."""

    def body(rank: Rank) -> None:
        def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            one, other = (functional.all_reduce(x, "sum", dist.group.WORLD) for _ in range(2))
            return (one + other * 2) * w

        function, _ = dynamo.compiled(step)
        x = torch.full((3,), 1.0 + rank.index, device=rank.device)
        before = launched()
        result = function(x, torch.ones(3, device=rank.device, requires_grad=trained))
        assert_same(torch.full((3,), 9.0), result.detach(), "sum")
        counts = since(before)
        assert counts == {(0, 1): 2}, f"all-reduces of {'a trained' if trained else 'an evaluated'} step: {counts}"

    world.run(body)


def _gathered(x: torch.Tensor) -> torch.Tensor:
    return functional.all_gather_tensor_autograd(x, 0, dist.group.WORLD)


def _scattered(x: torch.Tensor) -> torch.Tensor:
    return functional.reduce_scatter_tensor_autograd(x, "sum", 0, dist.group.WORLD)


def _summed(x: torch.Tensor) -> torch.Tensor:
    return functional.all_reduce(x, "sum", dist.group.WORLD)


def _exchanged(x: torch.Tensor) -> torch.Tensor:
    return functional.all_to_all_single_autograd(x, None, None, dist.group.WORLD)


def gradient(name: str, weights: list[torch.Tensor], index: int) -> torch.Tensor:
    """Compute the gradient of a rank's input, which has two elements per rank, from the weights of all ranks."""
    if name == "_scattered":
        return torch.cat(weights)
    if name == "_exchanged":
        return torch.cat([w.view(-1, 2)[index] for w in weights])
    total = torch.stack(weights).sum(0)
    return total.view(len(weights), -1)[index] if name == "_gathered" else total


@requirement(
    "DYN-COLL-07",
    "The gradient of a functional collective, compiled or not, is the transposed collective of the gradients.",
    source="torch/distributed/_functional_collectives.py: register_autograd",
)
@pytest.mark.parametrize("how", ["compiled", "uncompiled"])
@pytest.mark.world(2, 3)
def test_gradients(world: World, how: str) -> None:
    """Each rank weights every element of its outputs differently; the expected gradient uses all weights."""
    collectives = (_summed, _gathered, _scattered, _exchanged)

    def body(rank: Rank) -> None:
        size = rank.size

        def weighted(xs: list[torch.Tensor], weights: list[torch.Tensor]) -> torch.Tensor:
            pairs = zip(collectives, xs, weights, strict=True)
            return torch.stack([(collective(x) * weight).sum() for collective, x, weight in pairs]).sum()

        function, counter = dynamo.compiled(weighted) if how == "compiled" else (weighted, None)
        for call in range(2):
            start = torch.arange(2.0 * size, device=rank.device) + rank.index + call
            xs = [(start + 3 * place).requires_grad_() for place in range(len(collectives))]
            counts = (2 * size, 2 * size * size, 2, 2 * size)
            weights = [[torch.arange(float(count)) + 10 * i + 1 for i in range(size)] for count in counts]
            function(xs, [of_ranks[rank.index].to(rank.device) for of_ranks in weights]).backward()
            for collective, x, of_ranks in zip(collectives, xs, weights, strict=True):
                name = collective.__name__
                assert x.grad is not None
                assert_same(gradient(name, of_ranks, rank.index), x.grad + 0, f"gradient of {name}, call {call}")
        assert counter is None or counter.graphs == 1

    world.run(body)


TRANSPOSED = "contiguous" if runs_with("<2.12") else "transposed"
"""The layout of a transposed input, which compiled gathers refuse before 2.12."""

LAID_OUT = [
    Case(name, dtype=dtype, shape=shape, layout=layout, out_layout=out)
    for name in ("all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
    for shape, layout, dtype in (((4, 3), "contiguous", torch.float32), ((2, 3, 2), TRANSPOSED, torch.int64))
    for out in ("offset", "column", "transposed")
]
"""Collectives into tensors that are not contiguous, of two or three dimensions."""


@requirement(
    "DYN-COLL-9250",
    "A compiled collective writes its result to the elements of the tensors that it is given, whatever their strides.",
    source="torch.distributed: tensors are given by their elements; no page asks for contiguous ones",
)
@requirement(
    "DYN-COLL-9251",
    "A compiled collective leaves the memory between the elements of its tensors unchanged.",
    source="torch.distributed: tensors are given by their elements; no page asks for contiguous ones",
)
@pytest.mark.parametrize("backend", ["eager", "aot_eager", INDUCTOR])
@pytest.mark.world(2, timeout=120)
def test_strided_outputs(world: World, backend: str) -> None:
    """Call each collective that has outputs in one graph, twice; lists have an output of the layout and a dense one."""
    cases = LAID_OUT[:: 2 if backend == "inductor" else 1]

    def body(rank: Rank) -> None:
        def laid(tensor: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
            return lay(tensor.to(rank.device), layout)

        function, counter = dynamo.compiled(
            lambda given, into: [issue(case, x, y, None) for case, x, y in zip(cases, given, into, strict=True)],
            backend=backend,
        )
        for call in range(2):
            given, into = [], []
            for case in cases:
                given.append(laid(inputs(case, 2, rank.index, call)[0], case.layout))
                blank = [torch.full_like(right, -1) for right in outputs(case, 2, rank.index, call)]
                layouts = ["contiguous", case.out_layout][-len(blank) :]
                layouts = layouts if len(case.shape) == 2 else layouts[::-1]
                into.append([laid(one, layout) for one, layout in zip(blank, layouts, strict=True)])
            memory = [[buffer.clone() for _, buffer in parts] for parts in into]
            with dynamo.inductor_options({"fallback_by_default": True}):
                function([x for x, _ in given], [[y for y, _ in parts] for parts in into])
            assert unwaited() == 0
            for case, (x, _), parts, buffers in zip(cases, given, into, memory, strict=True):
                assert_same(inputs(case, 2, rank.index, call)[0], x + 0, f"input of {case}, call {call}")
                rights = outputs(case, 2, rank.index, call)
                for right, (y, found), before in zip(rights, parts, buffers, strict=True):
                    before.as_strided(y.shape, y.stride(), y.storage_offset()).copy_(right)
                    assert_same(right, y + 0, f"{case}, call {call}")
                    assert_same(before, found, f"memory of {case}, call {call}")
        assert counter.graphs == 1

    world.run(body)


@requirement(
    "DYN-COLL-9253",
    "A compiled gather may read the rank's own part of its output, and a reduce-scatter write one of its input.",
    source="torch.distributed.all_gather, all_gather_into_tensor, reduce_scatter_tensor, as "
    "torch.distributed.fsdp.fully_shard calls them",
)
@pytest.mark.parametrize("backend", ["eager", "aot_eager", INDUCTOR])
@pytest.mark.skipif(runs_with("<2.12"), reason="before 2.12, compiled gathers refuse what is not contiguous")
@pytest.mark.world(2, timeout=120)
def test_own_parts(world: World, backend: str) -> None:
    """Gather a tensor of the list, a column of many and a part of the whole; reduce into a part of what is reduced."""

    def body(rank: Rank) -> None:
        me = rank.index

        def code(listed: list[torch.Tensor], columns: list[torch.Tensor], whole: torch.Tensor) -> torch.Tensor:
            dist.all_gather(listed, listed[me])
            dist.all_gather(columns, columns[me])
            dist.all_gather_into_tensor(whole, whole[2 * me : 2 * me + 2])
            total = whole * 3
            dist.reduce_scatter_tensor(total[2 * me : 2 * me + 2], total)
            return total

        compiled, _ = dynamo.compiled(code, backend=backend)
        for call in range(2):
            numbers = torch.arange(2.0, device=rank.device) * 5 + call
            listed, matrix, whole = numbers.new_zeros(2, 3), numbers.new_zeros(3, 4), numbers.new_zeros(4)
            for own in (listed[me], matrix[:, 2 * me], whole[2 * me : 2 * me + 2]):
                own.fill_(me * 5.0 + call)
            with dynamo.inductor_options({"fallback_by_default": True}):
                total = compiled([*listed], [matrix[:, 0], matrix[:, 2]], whole)
            right = numbers.repeat_interleave(2)
            assert_same(numbers[:, None].expand(2, 3), listed, f"list of call {call}")
            assert_same((right * numbers.new_tensor([1, 0, 1, 0])).expand(3, 4), matrix, f"columns of call {call}")
            assert_same(right, whole, f"whole of call {call}")
            reduced = right * 3
            reduced[2 * me : 2 * me + 2] *= 2
            assert_same(reduced, total, f"total of call {call}")

    world.run(body)


OVERWRITE: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "all_reduce": lambda held, x: dist.all_reduce(held),
    "all_gather_into_tensor": lambda held, x: dist.all_gather_into_tensor(held, x[:1] * 5),
}
"""Collectives that write other values into the first tensor in each step."""


class Scaled(nn.Module):
    """Weights times a function of a buffer, which a collective overwrites before or after it is read, or not at all."""

    def __init__(self, name: str, when: str, rank: Rank) -> None:
        super().__init__()
        self.name, self.when = name, when
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("scale", torch.full((2,), 1.0 + rank.index))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        overwrite = OVERWRITE[self.name]
        if self.when == "before":
            overwrite(self.scale, x)
        y: torch.Tensor = self.weight * x * self.scale.exp2()
        if self.when == "copy":
            overwrite(self.scale.clone(), x)
        elif self.when == "after":
            overwrite(self.scale, x)
        return y


@requirement(
    "DYN-COLL-322",
    "The gradients of compiled code use the values that its forward read, even if a collective overwrites them "
    "afterwards.",
    source="torch.compile; torch/_functorch/partitioners.py: recomputation; torch.distributed.all_reduce",
)
@pytest.mark.parametrize(
    ("backend", "when"), [("eager", "after"), ("aot_eager", "before"), ("aot_eager", "copy"), ("aot_eager", "after")]
)
@pytest.mark.world(2)
def test_read_before_overwritten(world: World, backend: str, when: str) -> None:
    """Scale weights by a power of a buffer in two steps; their gradients have those of an uncompiled module."""

    def body(rank: Rank) -> None:
        wrong = {}
        for name in OVERWRITE:
            found = []
            for compiles in (False, True):
                module: Any = Scaled(name, when, rank).to(rank.device)
                function = dynamo.compiled(module, backend=backend)[0] if compiles else module
                for step in range(2):
                    function(torch.full((2,), 1.0 + step, device=rank.device)).sum().backward()
                    found.append((module.weight.grad.tolist(), module.scale.tolist()))
                    module.zero_grad()
            if found[:2] != found[2:]:
                wrong[name] = found
        assert not wrong, f"uncompiled, then compiled: {wrong}"

    world.run(body)


USES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cast": lambda x: x.double(),
    "clone": lambda x: x.clone(),
    "cat": lambda x: torch.cat([x, x]),
    "view": lambda x: x.view(2, 2).t() + 1,
    "slice-cast": lambda x: x[1:].double(),
    "bfloat16": lambda x: x.to(torch.bfloat16),
    "detach": lambda x: x.detach() * 2,
    "list": lambda x: torch.tensor(x.tolist()),
    "numpy": lambda x: torch.from_numpy(x.cpu().numpy()) + 1,
}
"""Operations on a result."""


@requirement(
    "DYN-COLL-08",
    "An operation on the result of a functional collective uses the completed result, inside or outside of "
    "compiled code.",
    source="torch/distributed/_functional_collectives.py: AsyncCollectiveTensor",
)
@pytest.mark.world(2)
def test_result(world: World) -> None:
    """Use it right after an all_reduce: uncompiled, in the same graph, and in a graph that is given the result."""

    def body(rank: Rank) -> None:
        for name, use in USES.items():

            def both(x: torch.Tensor, use: Callable[[torch.Tensor], torch.Tensor] = use) -> torch.Tensor:
                return use(functional.all_reduce(x, "sum", dist.group.WORLD))

            given, right = torch.arange(4.0, device=rank.device) + rank.index, use(2 * torch.arange(4.0) + 1)
            assert_same(right, both(given) + 0, f"{name}, uncompiled")
            assert_same(right, dynamo.compiled(both, fullgraph=False)[0](given) + 0, f"{name}, compiled")
            before = functional.all_reduce(given, "sum", dist.group.WORLD)
            assert_same(right, dynamo.compiled(use, fullgraph=False)[0](before) + 0, f"{name}, given")

    world.run(body)


@requirement(
    "DYN-COLL-09",
    "A collective can be compiled no matter what else the calling module has imported.",
    source="torch._dynamo.guards; pytorch/pytorch#122404",
)
@pytest.mark.world(2)
def test_imported_alone(world: World) -> None:
    """Compile a function of a module that has imported all_reduce but not torch."""

    def body(rank: Rank) -> list[float]:
        module = sys.modules["has_all_reduce_alone"] = types.ModuleType("has_all_reduce_alone")
        exec(
            "from torch.distributed import all_reduce\ndef add(x):\n    all_reduce(x)\n    return x + 1\n", vars(module)
        )
        function, counter = dynamo.compiled(module.add)
        result: list[float] = function(torch.full((2,), 1.0 + rank.index, device=rank.device)).tolist()
        assert counter.graphs == 1
        return result

    assert_on_ranks([[4.0, 4.0]] * 2, world.run(body))


def _sized(x: torch.Tensor, received: torch.Tensor, sent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, outputs = sent.tolist(), received.tolist()
    into = x.new_empty(sum(outputs), x.shape[1])
    dist.all_to_all_single(into, x.detach() * 2, outputs, inputs)
    y = functional.all_to_all_single(x.detach(), outputs, inputs, dist.group.WORLD)
    z = functional.all_to_all_single_autograd(x * 3, outputs, inputs, dist.group.WORLD)
    return into + y, z


@requirement(
    "DYN-COLL-21",
    "A compiled exchange takes sizes that the code reads from tensors, and is compiled once for all of them.",
    source=f"{SOURCE}; torch/_dynamo/config.py: capture_scalar_outputs; torch.distributed.all_to_all_single",
)
@pytest.mark.needs(collective="all_to_all_single")
@pytest.mark.world(2, 3)
def test_sizes_from_tensors(world: World) -> None:
    """Exchange rows by all three functions in three calls with other sizes, of which some are zero or one."""

    def body(rank: Rank) -> None:
        with dynamo.data_in_graphs():
            function, counter = dynamo.compiled(_sized, dynamic=True)
            for call in range(3):
                least = (
                    0 if call == 1 else 2
                )  # no size is 0 or 1 at first, because the first sizes decide what is dynamic
                rows = [[(i + 2 * j + call) % 4 + least for j in range(rank.size)] for i in range(rank.size)]
                sent = torch.tensor(rows[rank.index], device=rank.device)
                received = torch.tensor([row[rank.index] for row in rows], device=rank.device)
                parts = [
                    [torch.full((count, 13), 10.0 * i + j + call) for j, count in enumerate(row)]
                    for i, row in enumerate(rows)
                ]
                x = torch.cat(parts[rank.index]).to(rank.device).requires_grad_()
                right = torch.cat([parts[i][rank.index] for i in range(rank.size)])
                first, second = function(x, received, sent)
                assert_same(right * 3, first + 0, f"rows of call {call}")
                assert_same(right * 3, second.detach() + 0, f"rows of call {call}, with gradients")
                (second * (rank.index + 1)).sum().backward()
                weights = torch.cat(
                    [torch.full((count, 13), 3.0 * (j + 1)) for j, count in enumerate(rows[rank.index])]
                )
                assert x.grad is not None
                assert_same(weights, x.grad + 0, f"gradient of call {call}")
            assert counter.graphs == 1

    world.run(body)


@requirement(
    "DYN-COLL-22",
    "Compiled collectives find their group in another thread than the one that made the group.",
    source="torch.compile; torch.distributed: groups; test_c10d_functional_native.py: test_threading",
)
@pytest.mark.world(2)
def test_threads(world: World) -> None:
    """Call in a thread what was compiled outside of it, and compile in a thread, in the world and in a group."""

    def body(rank: Rank) -> None:
        group: Any = dist.new_group([0, 1])

        def total(x: torch.Tensor) -> torch.Tensor:
            y = functional.all_reduce(x, "sum", group) + 1
            dist.all_reduce(y)
            return y * dist.get_world_size(group) + dist.get_rank()

        x = torch.full((2,), 1.0 + rank.index, device=rank.device)
        right, results = total(x), []
        function, counter = dynamo.compiled(total)
        results.append(function(x))

        def called() -> None:
            results.append(total(x))
            results.append(function(x))
            results.append(function(x.new_ones(3) + rank.index))

        thread = threading.Thread(target=called)
        thread.start()
        thread.join()
        assert len(results) == 4
        for number, result in enumerate(results):
            assert_same(right[:1].expand(len(result)), result, f"result {number}")
        assert counter.graphs == 2

    world.run(body)


def _with_gathered(x: torch.Tensor, rank: int) -> torch.Tensor:
    parts = [torch.empty_like(x) for _ in range(2)]
    dist.all_gather(parts, x)
    return torch.stack(parts).sum(0) + 2 * x


def _with_exchanged(x: torch.Tensor, rank: int) -> torch.Tensor:
    into = torch.empty_like(x)
    dist.all_to_all_single(into, x)
    return into + 2 * x


@requirement(
    "DYN-COLL-472",
    "Compiled code takes the gathered or exchanged tensors for constants in its gradients, as uncompiled code does.",
    source="torch.compile; torch.distributed.all_gather, all_to_all_single; torch.distributed.nn: those with gradients",
)
@pytest.mark.parametrize("given", ["detached", "attached"])
@pytest.mark.world(2)
def test_gathered_are_constants(world: World, given: str) -> None:
    """Add to twice a tensor what the ranks send, where the tensor that is sent does or does not require gradients."""

    def body(rank: Rank) -> list[list[float]]:
        found = []
        for function in _with_gathered, _with_exchanged:

            def weighted(x: torch.Tensor, function: Any = function) -> torch.Tensor:
                y = function(x.detach(), rank.index) + 2 * x if given == "detached" else function(x, rank.index)
                return y * (rank.index + 3)

            for run in weighted, dynamo.compiled(weighted)[0]:
                x = torch.ones(2, device=rank.device, requires_grad=True)
                run(x).sum().backward()
                assert x.grad is not None
                found.append((x.grad + 0).tolist())
        return found

    for gathered, compiled_gathered, exchanged, compiled_exchanged in world.run(body):
        compiled = [compiled_gathered, compiled_exchanged]
        assert compiled == [gathered, exchanged], f"gradients: {compiled}"


STRIDED: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "all_reduce": lambda x, g: functional.all_reduce(x, "sum", g),
    "all_gather": lambda x, g: functional.all_gather_tensor(x, 0, g),
    "reduce_scatter": lambda x, g: functional.reduce_scatter_tensor(x, "sum", 0, g),
    "all_gather_coalesced": lambda x, g: functional.all_gather_into_tensor_coalesced([x], g)[0],
    "all_to_all": lambda x, g: functional.all_to_all_single(x, None, None, g),
    "broadcast": lambda x, g: functional.broadcast(x, 0, g),
    "all_reduce_coalesced": lambda x, g: functional.all_reduce_coalesced([x, x], "sum", g)[0],
}


@requirement(
    "DYN-COLL-473",
    "Compiled code can view the result of a functional collective of a transposed tensor as uncompiled code can.",
    source="torch/distributed/_functional_collectives.py: functions that are registered as Meta; torch.Tensor.view",
)
@pytest.mark.skipif(runs_with("<2.12"), reason="before 2.12, most refuse strided tensors")
@pytest.mark.parametrize("name", STRIDED)
@pytest.mark.world(2)
def test_views_of_strided(world: World, name: str) -> None:
    """View it as a vector, for which the result has to be contiguous."""

    def body(rank: Rank) -> list[Any]:
        def vector(x: torch.Tensor) -> torch.Tensor:
            return STRIDED[name](x.t(), dist.group.WORLD).view(-1)

        found: list[Any] = []
        for run in vector, dynamo.compiled(vector)[0]:
            try:
                found.append((run(torch.arange(4.0, device=rank.device).view(2, 2) + rank.index) + 0).tolist())
            except RuntimeError as error:
                found.append(type(error).__name__)
        return found

    for uncompiled, compiled in world.run(body):
        assert compiled == uncompiled, f"viewed: {compiled}"


@requirement(
    "DYN-COLL-07",
    "The gradient of a functional collective, compiled or not, is the transposed collective of the gradients.",
    source="torch/distributed/_functional_collectives.py: register_autograd",
)
@pytest.mark.world(2)
def test_gradient_of_broadcast(world: World) -> None:
    """It has what the uncompiled one has, and the tests of functional collectives say what that is."""

    def body(rank: Rank) -> tuple[Any, Any]:
        def weighted(x: torch.Tensor) -> torch.Tensor:
            return functional.broadcast(x, 0, dist.group.WORLD) * (rank.index + 3)

        found = []
        for function in weighted, dynamo.compiled(weighted)[0]:
            x = torch.ones(2, device=rank.device, requires_grad=True)
            function(x).sum().backward()
            found.append(None if x.grad is None else (x.grad + 0).tolist())
        return found[0], found[1]

    for uncompiled, compiled in world.run(body):
        assert compiled == uncompiled, f"gradient of the compiled broadcast: {compiled}"
