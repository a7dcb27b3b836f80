"""What compiled code sees of a collective's result, and what else it may not touch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import Rank, World, assert_on_ranks, assert_same, dyadic, requirement
from harness.profiles.obeyed import in_force
from harness.stacks import dynamo
from harness.stacks.collectives import functional, unwaited
from harness.stacks.limit import runs_with
from suites.dynamo.backends import INDUCTOR

SOURCE = "torch/distributed/_functional_collectives.py: the functions registered for Meta"

Call = Callable[[torch.Tensor, Any], Any]

OF_ANY_LAYOUT: dict[str, Call] = {
    "all_reduce": lambda x, g: functional.all_reduce(x, "sum", g),
    "all_gather_tensor of rows": lambda x, g: functional.all_gather_tensor(x, 0, g),
    "all_gather_tensor of columns": lambda x, g: functional.all_gather_tensor(x, 1, g),
    "reduce_scatter_tensor of rows": lambda x, g: functional.reduce_scatter_tensor(x, "sum", 0, g),
    "reduce_scatter_tensor of columns": lambda x, g: functional.reduce_scatter_tensor(x, "max", 1, g),
    "all_to_all_single": lambda x, g: functional.all_to_all_single(x, None, None, g),
    "all_gather_into_tensor_coalesced": lambda x, g: functional.all_gather_into_tensor_coalesced([x, x[:2]], g),
    "reduce_scatter_tensor_coalesced": lambda x, g: functional.reduce_scatter_tensor_coalesced(
        [x, x[:2]], "sum", [0, 1], g
    ),
    "all_gather_tensor_autograd": lambda x, g: functional.all_gather_tensor_autograd(x, 0, g),
    "reduce_scatter_tensor_autograd": lambda x, g: functional.reduce_scatter_tensor_autograd(x, "sum", 0, g),
    "all_to_all_single_autograd": lambda x, g: functional.all_to_all_single_autograd(x, None, None, g),
}
"""Functional collectives of a tensor of four rows and at least two columns, and a group of two ranks."""

OF_ROWS: dict[str, Call] = {
    # Healthy PyTorch gives these two the strides of their input while it traces them, and contiguous results.
    "broadcast": lambda x, g: functional.broadcast(x, 1, g),
    "all_reduce_coalesced": lambda x, g: functional.all_reduce_coalesced([x, x[:2]], "max", g),
    "all_to_all_single of other lengths": lambda x, g: functional.all_to_all_single(
        x, [[1, 2], [3, 2]][dist.get_rank(g)], [[1, 3], [2, 2]][dist.get_rank(g)], g
    ),
    "permute_tensor": lambda x, g: functional.permute_tensor(x.view(-1), [1, 0], g),
    "all_reduce of a scalar": lambda x, g: functional.all_reduce(x[0, 0], "sum", g),
    "all_gather_tensor of one element": lambda x, g: functional.all_gather_tensor(x[0, :1], 0, g),
    "broadcast of a scalar": lambda x, g: functional.broadcast(x[0, 0], 0, g),
    "all_reduce of nothing": lambda x, g: functional.all_reduce(x[:0], "sum", g),
    "all_gather_tensor of nothing": lambda x, g: functional.all_gather_tensor(x[:0], 0, g),
}
"""Those of a contiguous tensor."""

Layout = Callable[[torch.Tensor], torch.Tensor]

LAYOUTS: dict[str, Layout] = {
    "contiguous": lambda x: x.view(4, 24),
    "transposed": lambda x: x.view(24, 4).t(),
    "every second column": lambda x: x.view(4, 24)[:, ::2],
    "last rows": lambda x: x.view(8, 12)[4:],
    "channels last": lambda x: x.view(4, 2, 4, 3).to(memory_format=torch.channels_last),
}
"""Tensors of 96 elements or a part of them."""


def seen(result: Any) -> list[tuple[Any, ...]]:
    """Return what code can ask a result, or each of several."""
    return [
        (tuple(y.shape), y.stride(), y.dtype, str(y.device), y.is_contiguous(), y.requires_grad, y.dim(), y.numel())
        for y in (result if isinstance(result, list) else [result])
    ]


TURNS: dict[str, list[Call]] = {
    "new": [
        lambda y, _: y.transpose(0, 1),
        lambda y, _: y.unsqueeze(0),
        lambda y, _: y.as_strided([3], [1]),
    ],
    "in-place": [
        lambda y, _: y.transpose_(0, 1),
        lambda y, _: y.unsqueeze_(0),
        lambda y, _: y.as_strided_([3], [1]),
    ],
}
"""Views of a result, and operations that make a view of the result itself."""


@requirement(
    "DYN-RESULT-336",
    "Compiled code sees the shape and strides of a view of a collective's result, also of one made in place.",
    source="torch.Tensor: transpose_, unsqueeze_, as_strided_; "
    "torch/distributed/_functional_collectives.py: all_gather_tensor, wait_tensor",
)
@pytest.mark.parametrize("how", TURNS)
@pytest.mark.world(2)
def test_views_of_results(world: World, how: str) -> None:
    """Gather rows, make a view of them, look at it, and multiply by what was seen."""

    def body(rank: Rank) -> list[str]:
        wrong = []
        for number, turn in enumerate(TURNS[how]):

            def look(x: torch.Tensor, turn: Call = turn) -> Any:
                y = functional.wait_tensor(functional.all_gather_tensor(x, 0, dist.group.WORLD))
                view = turn(y, None)
                view = y if how == "in-place" else view
                return view * view.size(0), seen(view)

            x = torch.arange(3.0, device=rank.device)[None] + rank.index
            (right, expected), (found, observed) = look(x), dynamo.compiled(look, backend="eager")[0](x)
            if (right.tolist(), expected) != (found.tolist(), observed):
                wrong.append(
                    f"{number}: {right.tolist()}, {expected[0][:2]} became {found.tolist()}, {observed[0][:2]}"
                )
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


def all_calls(layouts: Iterable[str]) -> list[tuple[str, Call, str]]:
    """Return each collective with the name of a layout."""
    return [
        *((name, call, layout) for name, call in OF_ANY_LAYOUT.items() for layout in layouts),
        *((name, call, "contiguous") for name, call in OF_ROWS.items()),
    ]


@requirement(
    "DYN-RESULT-337",
    "A loss that was computed has its gradient after compiled code set a parameter's data to a collective's result.",
    source="torch.Tensor.data; torch/_functorch/_aot_autograd: mutations of inputs; pytorch/pytorch#139152",
)
@pytest.mark.parametrize("loss", ["later", "before"])
@pytest.mark.world(2)
def test_data_of_parameters(world: World, loss: str) -> None:
    """Compute a loss before or after compiled code averages the parameter, and take its gradient."""

    def average(parameter: torch.Tensor) -> torch.Tensor:
        parameter.data = functional.all_reduce(parameter.detach(), "sum", dist.group.WORLD) / 2
        return parameter.detach() + 1

    def body(rank: Rank) -> list[list[float]] | str:
        parameter = torch.nn.Parameter(torch.arange(3.0, device=rank.device) + 4 * rank.index)
        if loss == "before":
            total = parameter.square().sum()
        dynamo.compiled(average, backend="aot_eager")[0](parameter)
        if loss == "later":
            total = parameter.square().sum()
        try:
            total.backward()
        except RuntimeError as error:
            return f"{error!r:.80}"
        assert parameter.grad is not None
        return [parameter.tolist(), parameter.grad.tolist()]

    # the gradient of a square is taken with the data that the parameter has now
    assert_on_ranks([[[2.0, 3.0, 4.0], [4.0, 6.0, 8.0]]] * world.size, world.run(body))


@requirement(
    "DYN-RESULT-2900",
    "Compiled code sees the shape that a parameter has after its data became a collective's result of another size.",
    source="torch.Tensor.data; torch.Tensor: shape, numel; torch.compile",
)
@pytest.mark.parametrize("data", ["averaged", "gathered"])
@pytest.mark.world(2)
def test_shape_of_new_data(world: World, data: str) -> None:
    """Average a parameter, or gather it from its shards, and use its new shape."""

    def replace(parameter: torch.Tensor) -> list[Any]:
        if data == "averaged":
            parameter.data = functional.all_reduce(parameter.detach(), "sum", dist.group.WORLD) / 2
        else:
            gathered = functional.all_gather_tensor(parameter.detach(), 0, dist.group.WORLD)
            parameter.data = functional.wait_tensor(gathered)
        new = parameter.detach()
        return [new / new.numel(), new.new_ones(parameter.shape), [*parameter.shape], parameter.size(0)]

    def body(rank: Rank) -> list[Any]:
        found = []
        for call in (replace, dynamo.compiled(replace, backend="eager", fullgraph=False)[0]):
            parameter = torch.nn.Parameter(torch.arange(3.0, device=rank.device) + 3 * rank.index)
            mean, ones, *shape = call(parameter)
            found.append([mean.tolist(), ones.tolist(), *shape, [*parameter.shape]])
        return found

    for right, found in world.run(body):
        assert found == right, f"{right} uncompiled, {found} compiled"


@requirement(
    "DYN-RESULT-01",
    "Compiled code sees the shape, strides, dtype, device and requires_grad that a functional collective's result has.",
    source=SOURCE,
)
@requirement(
    "DYN-RESULT-02",
    "A functional collective in compiled code leaves its input unchanged, and its result has memory of its own.",
    source="torch/distributed/_functional_collectives.py; torch._inductor: lowerings of collectives",
)
@requirement(
    "DYN-RESULT-03",
    "Compiled code waits for each functional collective that it calls, even if nothing else uses the result.",
    source="torch/distributed/_functional_collectives.py: wait_tensor",
)
@pytest.mark.parametrize(
    ("dtype", "backend", "layouts"),
    [
        pytest.param(torch.float32, "eager", tuple(LAYOUTS), id="eager"),
        pytest.param(torch.int64, "aot_eager", tuple(LAYOUTS), id="aot_eager"),
        pytest.param(torch.float32, "inductor", ("contiguous",), id="inductor", marks=INDUCTOR.marks),
    ],
)
@pytest.mark.skipif(runs_with("<2.13"), reason="before 2.13, not all of these collectives can be traced")
@pytest.mark.world(2, timeout=180)
def test_functional(world: World, dtype: torch.dtype, backend: str, layouts: tuple[str, ...]) -> None:
    """One function calls each collective with each layout of its input; it sees what uncompiled code sees."""

    def body(rank: Rank) -> None:
        group, calls = dist.group.WORLD, all_calls(layouts)

        def everything(given: dict[str, torch.Tensor]) -> list[tuple[Any, list[tuple[Any, ...]]]]:
            results = []
            for _, call, layout in calls:
                result = call(given[layout], group)
                results.append((result, seen(result)))
            return results

        compiled, counter = dynamo.compiled(everything, backend=backend)
        for number in range(2):
            data = dyadic(96, key=(rank.index, number), dtype=torch.float32).to(rank.device).to(dtype)
            given = {name: layout(data.clone()) for name, layout in LAYOUTS.items()}
            before = {name: x.clone() for name, x in given.items()}
            uncompiled = everything(given)
            for right, _ in uncompiled:
                for each in right if isinstance(right, list) else [right]:
                    functional.wait_tensor(each)
            assert unwaited() == 0
            results = compiled(given)
            assert unwaited() == 0, "compiled code has not waited for a collective"
            for name, x in given.items():
                assert_same(before[name], x, f"what was given, {name}, call {number}")
            memory = {x.untyped_storage().data_ptr() for x in given.values()}
            for (name, _, layout), (right, facts), (result, traced) in zip(calls, uncompiled, results, strict=True):
                what = f"{name} of a tensor that is {layout}, call {number}"
                assert traced == facts, what
                assert seen(result) == facts, what
                for one, other in zip(*(r if isinstance(r, list) else [r] for r in (right, result)), strict=True):
                    assert_same(one + 0, other, what)
                    assert other.numel() == 0 or other.untyped_storage().data_ptr() not in memory, what
        assert counter.graphs == 1

    world.run(body)


def in_place(x: torch.Tensor, y: torch.Tensor, group: Any) -> tuple[list[torch.Tensor], list[Any]]:
    """Call collectives that write into intermediate tensors and into parts of ``y``; return all tensors and returns."""
    doubled = x * 2
    kept = doubled + 1
    gathered, scattered, exchanged = x.new_zeros(8, 4), x.new_zeros(2, 4), x.new_zeros(4, 4)
    listed = [x.new_zeros(4, 4), y[4:]]
    splits = [1, 3] if dist.get_rank() else [3, 1]
    returned = [
        dist.all_reduce(doubled, op=dist.ReduceOp.MAX, group=group),
        dist.all_gather_into_tensor(gathered, kept, group=group),
        dist.reduce_scatter_tensor(scattered, kept, group=group),
        dist.all_to_all_single(exchanged, kept, splits, splits, group=group),
        dist.all_gather(listed, kept, group=group),
        dist.all_reduce(y[1:3], group=group),
        dist.all_reduce(tensor=y[0, 1:3], op=dist.ReduceOp.MIN, group=group, async_op=False),
    ]
    return [doubled, kept, gathered, scattered, exchanged, *listed, y * 3], returned


@requirement(
    "DYN-RESULT-04",
    "Compiled collectives that write into intermediate tensors or parts of an input change nothing else.",
    source="torch/distributed/_functional_collectives.py: traceable_collective_remaps; torch._inductor: reinplacing",
)
@pytest.mark.parametrize("backend", ["eager", "aot_eager", INDUCTOR])
@pytest.mark.skipif(runs_with("<2.12"), reason="before 2.12, compiled collectives return tensors")
@pytest.mark.world(2, timeout=180)
def test_in_place(world: World, backend: str) -> None:
    """Compare all tensors of a function of seven collectives with uncompiled code, in two calls."""

    def body(rank: Rank) -> None:
        group = dist.group.WORLD
        compiled, counter = dynamo.compiled(in_place, backend=backend)
        for call in range(2):
            found = []
            for function in (in_place, compiled):
                x = dyadic(4, 4, key=(rank.index, call), dtype=torch.float32).to(rank.device)
                y = dyadic(8, 4, key=("y", rank.index, call), dtype=torch.float32).to(rank.device)
                results, returned = function(x, y, group)
                assert returned == [None] * len(returned)
                found.append([x, y, *results])
            for number, (right, result) in enumerate(zip(*found, strict=True)):
                assert_same(right, result, f"tensor {number} of call {call}")
        assert unwaited() == 0
        assert counter.graphs == 1

    world.run(body)


INTO: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "data": lambda x: x.data,
    "detached": lambda x: x.detach(),
    "data of a part": lambda x: x[1:].data,
    "part of data": lambda x: x.data[:1],
    "data viewed": lambda x: x.data.view(-1),
    "detached and transposed": lambda x: x.detach().t(),
    "data of data": lambda x: x.data.data,
    "the gradient": lambda x: x.grad,  # type: ignore[return-value]
    "data of the gradient": lambda x: x.grad.data,  # type: ignore[union-attr]
    "the detached gradient": lambda x: x.grad.detach(),  # type: ignore[union-attr]
}
"""Tensors that share memory with a tensor or with its gradient."""

WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "all_reduce": lambda y: dist.all_reduce(y),
    "all_gather_into_tensor": lambda y: dist.all_gather_into_tensor(y.view(2, -1), y.view(2, -1)[:1] * 2),
    "reduce_scatter_tensor": lambda y: dist.reduce_scatter_tensor(y, torch.cat([y, y * 2])),
    "all_to_all_single": lambda y: dist.all_to_all_single(y.view(-1), y.view(-1) * 3),
    "all_gather": lambda y: dist.all_gather(list(y.view(2, -1)), y.view(2, -1)[1] * 2),
}
STRIDED = ("detached and transposed",)
"""The ways to tensors that are not contiguous."""
OTHERS = ("data", "data of the gradient")
"""The ways that other collectives than all_reduce take."""


@requirement(
    "DYN-RESULT-06",
    "In compiled code, a collective into the data, the gradient or a view of a tensor changes that tensor.",
    source="torch.Tensor: data, detach, grad; torch.distributed: all_reduce",
)
@pytest.mark.world(2)
def test_in_shared_memory(world: World) -> None:
    """All-reduce by every way to the memory of parameters and gradients, and call other collectives by two ways."""
    dense = in_force().claims.lacks_features("collectives", ["strided"])
    ways = [how for how in INTO if not (dense and how in STRIDED)]
    calls = [(name, how) for name in WRITES for how in ways if name == "all_reduce" or how in OTHERS]

    def body(rank: Rank) -> None:
        def everything(xs: list[torch.Tensor]) -> list[torch.Tensor]:
            for x, (name, how) in zip(xs, calls, strict=True):
                WRITES[name](INTO[how](x))
            return [x.detach() * 2 for x in xs]

        found = []
        for run in (everything, dynamo.compiled(everything)[0]):
            xs = []
            for key in range(len(calls)):
                x = dyadic(2, 2, key=(rank.index, key), dtype=torch.float32).to(rank.device).requires_grad_()
                x.grad = dyadic(2, 2, key=("g", rank.index, key), dtype=torch.float32).to(rank.device)
                xs.append(x)
            results = run(xs)
            found.append([(x.detach(), x.grad, y) for x, y in zip(xs, results, strict=True)])
        for (name, how), rights, others in zip(calls, *found, strict=True):
            for one, other in zip(rights, others, strict=True):
                assert one is not None
                assert other is not None
                assert_same(one, other, f"{name} into {how}")

    world.run(body)


def _one_by_one(given: torch.Tensor, into: torch.Tensor, other: int) -> tuple[list[Any], torch.Tensor]:
    """Send and receive by the functions with which compiled code replaces isend and irecv."""
    results = [functional.isend_inplace(given, other), functional.irecv_inplace(into, other)]
    facts = seen(results)
    for each in results:
        functional.wait_tensor(each)
    return facts, into + into.new_ones(results[1].shape)


def _replaced(given: torch.Tensor, into: torch.Tensor, other: int) -> tuple[list[Any], torch.Tensor]:
    """Send and receive by isend and irecv, which give tensors in compiled code alone."""
    results: Any = [dist.isend(given, other), dist.irecv(into, other)]
    facts = seen(results)
    for each in results:
        each.wait()
    return facts, into + into.new_ones(results[1].shape)


MESSAGES: list[tuple[str, torch.dtype, tuple[int, ...]]] = [
    ("eager", torch.float32, (3,)),
    ("eager", torch.int64, (2, 3)),
    ("aot_eager", torch.bfloat16, (1, 2, 2)),
    ("aot_eager", torch.float64, (1,)),
]
"""A backend for each message, and its dtype and shape."""


@requirement(
    "DYN-RESULT-05",
    "Compiled code sees the shape, strides, dtype and device that the result of a functional isend or irecv has.",
    source="torch/distributed/_functional_collectives.py: isend_inplace, irecv_inplace",
)
@pytest.mark.needs(torch=dynamo.COMPILES_MESSAGES)
@pytest.mark.world(2, timeout=30)
def test_messages(world: World) -> None:
    """Exchange messages of several dtypes and shapes, and compute with the shape of what is received."""

    def body(rank: Rank) -> None:
        other = 1 - rank.index
        for backend, dtype, shape in MESSAGES:
            sent = [torch.full(shape, 4 + each, dtype=dtype, device=rank.device) for each in range(rank.size)]
            what = f"{dtype}{[*shape]}"
            right, result = _one_by_one(sent[rank.index], torch.zeros_like(sent[other]), other)
            assert_same(sent[other] + 1, result, what)
            assert [facts[0] for facts in right] == [(0,), shape], what
            with dynamo.compiled_messages():
                for exchange in (_one_by_one, _replaced):
                    compiled, counter = dynamo.compiled(exchange, backend=backend)
                    traced, result = compiled(sent[rank.index], torch.zeros_like(sent[other]), other)
                    assert traced == right, f"{what}, {exchange.__name__}"
                    assert_same(sent[other] + 1, result, f"{what}, {exchange.__name__}")
                    assert counter.graphs == 1, f"{what}, {exchange.__name__}"

    world.run(body)


OF_INTERMEDIATES: dict[str, Call] = {
    "all_reduce": lambda y, group: functional.all_reduce(y, "sum", group),
    "all_gather": lambda y, group: functional.all_gather_tensor(y, 0, group),
    "reduce_scatter": lambda y, group: functional.reduce_scatter_tensor(y, "sum", 0, group),
    "broadcast": lambda y, group: functional.broadcast(y, 1, group),
    "exchange": lambda y, group: functional.all_to_all_single(y, None, None, group),
    "coalesced": lambda y, group: functional.all_reduce_coalesced([y, y + 1], "sum", group),
}


@requirement(
    "DYN-RESULT-66",
    "Functional collectives of intermediate tensors have the values and strides of uncompiled code, also if other code "
    "uses these tensors again.",
    source="torch._inductor: lowerings of collectives; test_inductor_collectives.py: "
    "test_inductor_doesnt_mutate_shared, test_allgather_contiguous_input",
)
@pytest.mark.parametrize(
    ("backend", "names"),
    [
        pytest.param("aot_eager", tuple(OF_INTERMEDIATES), id="aot_eager"),
        pytest.param("inductor", ("all_reduce",), id="inductor", marks=INDUCTOR.marks),
    ],
)
@pytest.mark.skipif(runs_with("<2.13"), reason="before 2.13, not all of these collectives can be traced")
@pytest.mark.world(2, timeout=180)
def test_intermediates(world: World, backend: str, names: tuple[str, ...]) -> None:
    """Call collectives with sums and transposed products that are returned, changed or used again afterwards."""
    dense = in_force().claims.lacks_features("collectives", ["strided"])

    def body(rank: Rank) -> None:
        group = dist.group.WORLD

        def everything(x: torch.Tensor) -> list[Any]:
            results: list[Any] = []
            for number, call in enumerate(OF_INTERMEDIATES[name] for name in names):
                y = x * 2 + number
                results += [call(y, group), y, y + 1]
                z = x - number
                w = call(z, group)
                results += [[v + 0 for v in w] if isinstance(w, list) else w + 0, z.mul_(3)]
                if not dense:
                    t = (x + number).t()
                    results += [call(t, group), t * 2]
            return results

        x = dyadic(4, 6, key=rank.index, dtype=torch.float32, span=4).to(rank.device)
        compiled, counter = dynamo.compiled(everything, backend=backend)
        right = [z for y in everything(x) for z in (y if isinstance(y, list) else [y])]
        for _ in range(2):
            found = [z for y in compiled(x) for z in (y if isinstance(y, list) else [y])]
            for number, (one, other) in enumerate(zip(right, found, strict=True)):
                assert_same(one + 0, other + 0, f"tensor {number}")
                assert one.stride() == other.stride(), f"tensor {number}"
        assert counter.graphs == 1

    world.run(body)
