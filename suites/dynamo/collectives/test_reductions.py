"""Every reduction in compiled code, by every operation, named by position and by keyword."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist

from harness import Rank, World, assert_same, requirement
from harness.oracles.collectives import Case
from harness.stacks.collectives import claimed_cases, functional, reduction

OPERATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "SUM": operator.add,
    "PRODUCT": operator.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": operator.and_,
    "BOR": operator.or_,
    "BXOR": operator.xor,
}
"""What combines the tensors of two ranks."""


def numbers_of(index: int, call: int) -> torch.Tensor:
    """Return a rank's numbers, of which each operation makes others."""
    return torch.tensor([[3 + index, 6 - index], [12 + call, 5 + 4 * index]])


def written(x: torch.Tensor, names: Sequence[str]) -> list[torch.Tensor]:
    """Reduce by each operation in the forms of which a graph has all; half of them scatter."""
    results = []
    for name in names:
        one, other, mine, own = x * 1, x * 1, x.new_zeros(1, 2), x.new_zeros(1, 2)
        dist.all_reduce(one, reduction(name))
        dist.all_reduce(other, op=reduction(name))
        dist.reduce_scatter_tensor(mine, x, reduction(name))
        dist.reduce_scatter_tensor(own, x, op=reduction(name))
        results += [one, other, mine, own]
    return results


def returned(x: torch.Tensor, names: Sequence[str]) -> list[torch.Tensor]:
    """Reduce by each operation in the functional forms, of which half scatter."""
    group, results = dist.group.WORLD, []
    for name in names:
        op = name.lower()
        results += [
            functional.all_reduce(x, op, group),
            functional.all_reduce_coalesced([x * 1, x], op, group)[1],
            functional.reduce_scatter_tensor(x, op, 0, group),
            functional.reduce_scatter_tensor_coalesced([x * 1, x], op, [0, 0], group)[1],
        ]
    return results


def rooted(x: torch.Tensor, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Reduce to rank 0 by each operation, by position or by keyword, which breaks the graph."""
    found = {name: x.clone() for name in names}
    if "PRODUCT" in found:
        dist.reduce(found["PRODUCT"], 0, dist.ReduceOp.PRODUCT)
    if "MIN" in found:
        dist.reduce(found["MIN"], dst=0, op=dist.ReduceOp.MIN)
    if "MAX" in found:
        dist.reduce(found["MAX"], 0, dist.ReduceOp.MAX)
    if "BAND" in found:
        dist.reduce(found["BAND"], op=dist.ReduceOp.BAND, group_dst=0)
    if "BOR" in found:
        dist.reduce(found["BOR"], 0, dist.ReduceOp.BOR, None)
    if "BXOR" in found:
        dist.reduce(found["BXOR"], 0, op=dist.ReduceOp.BXOR)
    if "SUM" in found:
        dist.reduce(found["SUM"], 0)
    return found


def listed(x: torch.Tensor, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Reduce and scatter lists by some operations, by position or by keyword, which breaks the graph."""
    found = {name: x.new_zeros(1, 2) for name in ("MAX", "BAND", "SUM") if name in names}
    if "MAX" in found:
        dist.reduce_scatter(found["MAX"], [x[:1], x[1:]], dist.ReduceOp.MAX)
    if "BAND" in found:
        dist.reduce_scatter(found["BAND"], [x[:1], x[1:]], op=dist.ReduceOp.BAND)
    if "SUM" in found:
        dist.reduce_scatter(found["SUM"], [x[:1], x[1:]])
    return found


@requirement(
    "DYN-OP-01",
    "Each compiled reduction has the result of its operation, named by position or by keyword, where the result goes.",
    source="torch.distributed: all_reduce, reduce, reduce_scatter, reduce_scatter_tensor",
)
@requirement(
    "DYN-OP-02",
    "Each compiled functional reduction has the result of the operation that it is given by name.",
    source="torch/distributed/_functional_collectives.py: REDUCE_OP_TO_STR",
)
@pytest.mark.needs(collective="reduce_scatter_tensor")
@pytest.mark.world(2)
def test_operations(world: World) -> None:
    """Reduce whole numbers by seven operations, or those that are claimed, in all forms, in two calls."""
    names = [case.op for case in claimed_cases([Case("all_reduce", name, torch.int64) for name in OPERATIONS])]

    def body(rank: Rank) -> None:
        me = rank.index
        torch.compiler.reset()
        whole_graphs = [torch.compile(function, backend="eager", fullgraph=True) for function in (written, returned)]
        in_parts = [torch.compile(function, backend="eager") for function in (rooted, listed)]
        for call in range(2):
            x = numbers_of(me, call).to(rank.device)
            everyone = [numbers_of(i, call) for i in range(rank.size)]
            right = {name: functools.reduce(combine, everyone) for name, combine in OPERATIONS.items()}
            for function in whole_graphs:
                found = function(x, names)
                for number, result in enumerate(found):
                    name, form = names[number // 4], number % 4
                    expected = right[name][me : me + 1] if form > 1 else right[name]
                    assert_same(expected, result + 0, f"{name}, form {form} of call {call}")
            to_root, scattered = (function(x, names) for function in in_parts)
            for name, result in to_root.items():
                if me == 0:
                    assert_same(right[name], result, f"{name} to rank 0, call {call}")
            for name, result in scattered.items():
                assert_same(right[name][me : me + 1], result, f"{name} of a list, call {call}")
            assert_same(numbers_of(me, call), x, f"what was given in call {call}")

    world.run(body)
