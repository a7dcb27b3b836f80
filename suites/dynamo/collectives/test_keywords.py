"""Every argument of the collectives that can be compiled: by position, by keyword, left out, and changed by call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import Rank, World, assert_same, dyadic, requirement
from harness.stacks import dynamo
from harness.stacks.collectives import functional, unwaited
from harness.stacks.limit import runs_with

SOURCE = "torch/_dynamo/variables/functions.py: CollectiveFunctionRewriteVariable"
SUM, MAX, MIN, PRODUCT = dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT
Tensors = list[torch.Tensor]


def _all_reduce(x: torch.Tensor, g: Any, splits: list[int]) -> Tensors:
    out = [x + k for k in range(10)]
    dist.all_reduce(out[0])
    dist.all_reduce(out[1], MAX)
    dist.all_reduce(out[2], MIN, g)
    dist.all_reduce(out[3], PRODUCT, None, False)
    dist.all_reduce(tensor=out[4])
    dist.all_reduce(async_op=False, group=dist.group.WORLD, op=MAX, tensor=out[5])
    dist.all_reduce(out[6], group=g)
    dist.all_reduce(out[7], op=SUM, async_op=False)
    dist.all_reduce(out[8], op=MIN, group=g)
    dist.all_reduce(out[9], SUM, g, async_op=False)
    return out


def _gather(x: torch.Tensor, g: Any, splits: list[int]) -> Tensors:
    size = dist.get_world_size(g)
    all_, some = [x.new_zeros(6, 2) for _ in range(3)], [x.new_zeros(2 * size, 2) for _ in range(3)]
    x = x[:2]
    dist.all_gather_into_tensor(all_[0], x)
    dist.all_gather_into_tensor(all_[1], x + 1, None, False)
    dist.all_gather_into_tensor(all_[2], input_tensor=x + 2, group=dist.group.WORLD)
    dist.all_gather_into_tensor(some[0], x + 3, g)
    dist.all_gather_into_tensor(input_tensor=x + 4, output_tensor=some[1], group=g)
    dist.all_gather_into_tensor(some[2], x + 5, async_op=False, group=g)
    return all_ + some


def _gather_list(x: torch.Tensor, g: Any, splits: list[int]) -> Tensors:
    all_ = [[torch.zeros_like(x) for _ in range(3)] for _ in range(3)]
    some = [[torch.zeros_like(x) for _ in range(dist.get_world_size(g))] for _ in range(3)]
    dist.all_gather(all_[0], x)
    dist.all_gather(all_[1], x + 1, None, False)
    dist.all_gather(async_op=False, tensor=x + 2, tensor_list=all_[2])
    dist.all_gather(some[0], x + 3, g)
    dist.all_gather(some[1], tensor=x + 4, group=g)
    dist.all_gather(some[2], x + 5, g, async_op=False)
    return [each for tensors in all_ + some for each in tensors]


def _scatter(x: torch.Tensor, g: Any, splits: list[int]) -> Tensors:
    rows = 6 // dist.get_world_size(g)
    all_, some = [x.new_zeros(2, 2) for _ in range(4)], [x.new_zeros(rows, 2) for _ in range(3)]
    dist.reduce_scatter_tensor(all_[0], x)
    dist.reduce_scatter_tensor(all_[1], x + 1, MAX)
    dist.reduce_scatter_tensor(all_[2], x + 2, SUM, None, False)
    dist.reduce_scatter_tensor(all_[3], input=x + 3, group=dist.group.WORLD, op=MIN)
    dist.reduce_scatter_tensor(some[0], x + 4, MAX, g)
    dist.reduce_scatter_tensor(group=g, input=x + 5, output=some[1], async_op=False)
    dist.reduce_scatter_tensor(some[2], x + 6, op=MIN, group=g)
    return all_ + some


def _exchange(x: torch.Tensor, g: Any, splits: list[int]) -> Tensors:
    out = [torch.zeros_like(x) for _ in range(6)]
    dist.all_to_all_single(out[0], x)
    dist.all_to_all_single(out[1], x + 1, None, None, g, False)
    dist.all_to_all_single(out[2], x + 2, splits, splits, g)
    dist.all_to_all_single(input=x + 3, output=out[3], async_op=False)
    dist.all_to_all_single(out[4], x + 4, input_split_sizes=splits, output_split_sizes=splits, group=g)
    dist.all_to_all_single(out[5], x + 5, output_split_sizes=None, input_split_sizes=None, group=g)
    return out


def _single(x: torch.Tensor, g: Any, splits: list[int]) -> Tensors:
    size = dist.get_world_size(g)
    all_, some = [x.new_zeros(2, 2) for _ in range(4)], [x.new_zeros(6 // size, 2) for _ in range(3)]
    dist.reduce_scatter_single(all_[0], x)
    dist.reduce_scatter_single(all_[1], x + 1, MAX)
    dist.reduce_scatter_single(all_[2], x + 2, SUM, None, False)
    dist.reduce_scatter_single(all_[3], input=x + 3, group=dist.group.WORLD, op=MIN)
    dist.reduce_scatter_single(some[0], x + 4, MAX, g)
    dist.reduce_scatter_single(group=g, input=x + 5, output=some[1], async_op=False)
    dist.reduce_scatter_single(some[2], x + 6, op=MIN, group=g)
    whole, parts = [x.new_zeros(6, 2) for _ in range(2)], [x.new_zeros(2 * size, 2) for _ in range(2)]
    x = x[:2]
    dist.all_gather_single(whole[0], x)
    dist.all_gather_single(whole[1], x + 1, dist.group.WORLD, False)
    dist.all_gather_single(parts[0], x + 2, g)
    dist.all_gather_single(parts[1], x + 3, async_op=False, group=g)
    return all_ + some + whole + parts


COLLECTIVES = (
    *(_all_reduce, _gather, _gather_list, _scatter, _exchange),
    pytest.param(_single, marks=pytest.mark.needs(torch="torch.distributed.reduce_scatter_single")),
)


@requirement(
    "DYN-CALL-01",
    "A compiled collective takes each argument by position or by keyword, also if it is the default.",
    source=SOURCE,
)
@pytest.mark.parametrize("collective", COLLECTIVES, ids=lambda f: f.__name__.strip("_"))
@pytest.mark.world(3)
def test_forms(world: World, collective: Callable[..., Tensors]) -> None:
    """One graph has every form in the world and in a group of the last two ranks, or of the first one alone."""

    def body(rank: Rank) -> None:
        pair, alone = dist.new_group([1, 2]), dist.new_group([0])
        group = pair if rank.index else alone
        splits = ([2, 4] if rank.index == 1 else [4, 2]) if rank.index else [6]
        function, counter = dynamo.compiled(lambda x: collective(x, group, splits))
        for call in range(2):
            x = dyadic(6, 2, key=(rank.index, call), dtype=torch.float32).to(rank.device)
            given = x.clone()
            for number, (right, result) in enumerate(zip(collective(x, group, splits), function(given), strict=True)):
                assert_same(right, result, f"tensor {number} of call {call}")
            assert_same(x, given, "what was given")
        assert unwaited() == 0
        assert counter.graphs == 1

    world.run(body)


def _by_op(x: torch.Tensor, op: Any) -> torch.Tensor:
    y = x * 2
    dist.all_reduce(y, op=op)
    return y


def _scattered_by_op(x: torch.Tensor, op: Any) -> torch.Tensor:
    y = x.new_zeros(2, 4)
    dist.reduce_scatter_tensor(y, x, op)
    return y


def _by_name(x: torch.Tensor, op: str) -> torch.Tensor:
    return functional.all_reduce(x, op, dist.group.WORLD) + 1


def _by_source(x: torch.Tensor, source: int) -> torch.Tensor:
    return functional.broadcast(x, source, dist.group.WORLD) + 1


def _by_dimension(x: torch.Tensor, dim: int) -> torch.Tensor:
    return functional.all_gather_tensor(x, dim, dist.group.WORLD) + 1


def _scattered_by_dimension(x: torch.Tensor, dim: int) -> torch.Tensor:
    return functional.reduce_scatter_tensor(x, "sum", dim, dist.group.WORLD) + 1


def _by_peers(x: torch.Tensor, peers: list[int]) -> torch.Tensor:
    return functional.permute_tensor(x.view(-1), peers, dist.group.WORLD) + 1


def _by_split(x: torch.Tensor, first: int) -> torch.Tensor:
    sizes = [first, 4 - first] if dist.get_rank() == 0 else [4 - first, first]
    return functional.all_to_all_single(x, sizes, sizes, dist.group.WORLD) + 1


CHANGED: list[tuple[Callable[[torch.Tensor, Any], torch.Tensor], list[Any]]] = [
    (_by_op, [SUM, MAX, MIN]),
    (_scattered_by_op, [MAX, SUM]),
    (_by_name, ["sum", "max"]),
    (_by_source, [0, 1]),
    (_by_dimension, [0, 1]),
    (_scattered_by_dimension, [1, 0]),
    (_by_peers, [[0, 1], [1, 0]]),
    (_by_split, [2, 1, 3]),
]


@requirement(
    "DYN-CALL-02",
    "A compiled function that is given an argument of a collective uses the value that it has at each call.",
    source="torch.compile: guards",
)
@requirement(
    "DYN-CALL-03",
    "A function that is given an argument of a collective is compiled at most once for each of its values.",
    source="torch.compile: guards",
)
@pytest.mark.skipif(runs_with("<2.12"), reason="before 2.12, operations are not guarded")
@pytest.mark.world(2)
def test_changed(world: World) -> None:
    """Give operations, names, sources, dimensions, peers and sizes, in turn and again."""

    def body(rank: Rank) -> None:
        for function, values in CHANGED:
            compiled, counter = dynamo.compiled(function)
            for call, value in enumerate(values * 2):
                x = dyadic(4, 4, key=(rank.index, call), dtype=torch.float32).to(rank.device)
                what = f"{function.__name__.strip('_')}: call {call} with {value}"
                assert_same(function(x, value) + 0, compiled(x, value), what)
                assert counter.graphs <= min(call + 1, len(values)), what

    world.run(body)


def _later_operation(x: torch.Tensor) -> Tensors:
    largest = partial(dist.all_reduce, op=MAX)
    out = [x + k for k in range(4)]
    largest(out[0])
    largest(out[1], op=SUM)
    partial(largest, op=MIN)(out[2])
    partial(largest, out[3])(op=SUM)
    return out


def _later_name(x: torch.Tensor) -> Tensors:
    reduce = partial(functional.all_reduce, x, group=dist.group.WORLD, reduceOp="max")
    return [reduce() + 0, reduce(reduceOp="sum") + 0, reduce(reduceOp="min", group=dist.group.WORLD) + 0]


def _later_dimension(x: torch.Tensor) -> Tensors:
    gather = partial(functional.all_gather_tensor, gather_dim=0, group=dist.group.WORLD)
    return [gather(x) + 0, gather(x, gather_dim=1) + 0, partial(gather, gather_dim=1)(x) + 0]


def _later_keyword(x: torch.Tensor) -> Tensors:
    def scaled(x: torch.Tensor, *, scale: float = 1.0, **more: float) -> torch.Tensor:
        return functional.all_reduce(x * scale, "sum", dist.group.WORLD) + sum(more.values())

    call = partial(scaled, scale=2.0, shift=1.0)
    return [call(x), call(x, scale=3.0), call(x, shift=5.0, further=7.0), partial(call, shift=2.0)(x, scale=4.0)]


# before 2.13, Dynamo does not trace gathering along columns
PARTIALS = (_later_operation, _later_name, _later_keyword, *(() if runs_with("<2.13") else (_later_dimension,)))


@requirement(
    "DYN-CALL-5000",
    "In compiled code, keywords in the call of a functools.partial extend or override those that it was made with.",
    source="functools.partial: 'they extend and override keywords'; torch.compile",
)
@pytest.mark.world(2)
def test_partials(world: World) -> None:
    """Override operations, dimensions and keywords of a function's own in calls, and in partials of partials."""

    def body(rank: Rank) -> None:
        for function in PARTIALS:
            compiled = dynamo.compiled(function)[0]
            x = dyadic(4, 2, key=rank.index, dtype=torch.float32).to(rank.device)
            for number, (right, result) in enumerate(zip(function(x), compiled(x), strict=True)):
                assert_same(right, result, f"{function.__name__.strip('_')}, result {number}")

    world.run(body)
