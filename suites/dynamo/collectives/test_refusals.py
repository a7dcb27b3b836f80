"""Compiled collectives refuse the tensors that uncompiled ones refuse, and accept those that they accept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn import functional as differentiable

from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks import dynamo
from harness.stacks.collectives import functional

SOURCE = "torch/_dynamo/variables/functions.py: CollectiveFunctionRewriteVariable"
WIDE = torch.float64

Tensors = list[torch.Tensor]


def _ones(rank: Rank, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor whose elements are the rank's number plus one."""
    return torch.full(shape, rank.index + 1.0, dtype=dtype, device=rank.device)


def _zeros(rank: Rank, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=rank.device)


def all_gather(into: Tensors, given: Tensors) -> None:
    """Gather one tensor into several."""
    dist.all_gather(into, given[0])


def all_gather_into_tensor(into: Tensors, given: Tensors) -> None:
    """Gather one tensor into one."""
    dist.all_gather_into_tensor(into[0], given[0])


def reduce_scatter(into: Tensors, given: Tensors) -> None:
    """Sum and scatter several tensors."""
    dist.reduce_scatter(into[0], given)


def reduce_scatter_tensor(into: Tensors, given: Tensors) -> None:
    """Sum and scatter one tensor."""
    dist.reduce_scatter_tensor(into[0], given[0])


def all_to_all_single(into: Tensors, given: Tensors) -> None:
    """Exchange equal parts of one tensor."""
    dist.all_to_all_single(into[0], given[0])


def all_reduce(into: Tensors, given: Tensors) -> None:
    """Sum in place; nothing is given."""
    dist.all_reduce(into[0])


Make = Callable[[Rank], tuple[Tensors, Tensors]]
Call = Callable[[Tensors, Tensors], None]

MISMATCHED: dict[str, tuple[Call, Make]] = {
    "all_gather-list": (all_gather, lambda r: ([_zeros(r, 2)], [_ones(r, 2)])),
    "all_gather-dtype": (all_gather, lambda r: ([_zeros(r, 2, dtype=WIDE) for _ in range(r.size)], [_ones(r, 2)])),
    "all_gather_into_tensor-dtype": (
        all_gather_into_tensor,
        lambda r: ([_zeros(r, 2 * r.size, dtype=WIDE)], [_ones(r, 2)]),
    ),
    "all_gather_into_tensor-size": (all_gather_into_tensor, lambda r: ([_zeros(r, r.size, 3)], [_ones(r, 1, 1)])),
    "all_gather-size": (all_gather, lambda r: ([_zeros(r, 3) for _ in range(r.size)], [_ones(r, 2)])),
    "all_gather_into_tensor-elements": (all_gather_into_tensor, lambda r: ([_zeros(r, 3 * r.size)], [_ones(r, 2)])),
    "reduce_scatter_tensor-elements": (reduce_scatter_tensor, lambda r: ([_zeros(r, 3)], [_ones(r, 2 * r.size)])),
    "reduce_scatter-list": (reduce_scatter, lambda r: ([_zeros(r, r.size)], [_ones(r, r.size)])),
    "reduce_scatter-dtype": (reduce_scatter, lambda r: ([_zeros(r, 2, dtype=WIDE)], [_ones(r, 2)] * r.size)),
    "reduce_scatter_tensor-dtype": (
        reduce_scatter_tensor,
        lambda r: ([_zeros(r, 2, dtype=WIDE)], [_ones(r, 2 * r.size)]),
    ),
    "reduce_scatter_tensor-size": (reduce_scatter_tensor, lambda r: ([_zeros(r, 2)], [_ones(r, r.size)])),
    "all_to_all_single-dtype": (
        all_to_all_single,
        lambda r: ([_zeros(r, 2 * r.size, dtype=WIDE)], [_ones(r, 2 * r.size)]),
    ),
    "all_to_all_single-size": (all_to_all_single, lambda r: ([_zeros(r, r.size, 2)], [_ones(r, r.size, 1)])),
}
"""Outputs that do not fit their inputs: too few of them, of another dtype, or of another size."""

BREAKS = {"all_gather-size"}
"""Calls that cannot be traced. The graph breaks, and a backend that accepts such tensors has the uncompiled result."""

UNUSUAL: dict[str, tuple[Call, Make]] = {
    "all_gather-scalars": (all_gather, lambda r: ([_zeros(r) for _ in range(r.size)], [_ones(r)])),
    "reduce_scatter-scalars": (reduce_scatter, lambda r: ([_zeros(r)], [_ones(r) for _ in range(r.size)])),
    "reduce_scatter-nothing": (reduce_scatter, lambda r: ([_zeros(r, 0, 2)], [_ones(r, 0, 2) for _ in range(r.size)])),
    "all_to_all_single-reshaped": (all_to_all_single, lambda r: ([_zeros(r, r.size, 2)], [_ones(r, 2 * r.size)])),
    "all_reduce-scalar": (all_reduce, lambda r: ([_ones(r)], [])),
    "all_reduce-nothing": (all_reduce, lambda r: ([_ones(r, 0, 2)], [])),
    "all_gather-strided": (all_gather, lambda r: ([_zeros(r, 3) for _ in range(r.size)], [_ones(r, 3, 2)[:, 1]])),
    "all_to_all_single-nothing": (all_to_all_single, lambda r: ([_zeros(r, 0)], [_ones(r, 0)])),
    "all_reduce-parameter": (all_reduce, lambda r: ([nn.Parameter(_ones(r, 2))], [])),
}
"""Tensors without dimensions, without elements, of another shape, or with gradients."""


def _cases(cases: dict[str, tuple[Call, Make]]) -> list[Any]:
    """Parametrize over cases. Before 2.14, reduce_scatter breaks the graph, and so is not compiled."""
    needs = pytest.mark.needs(torch=f"{functional.__name__}.reduce_scatter_inplace")
    return [pytest.param(case, marks=[needs] * case.startswith("reduce_scatter-")) for case in cases]


def _outcome(call: Call, tensors: tuple[Tensors, Tensors]) -> Any:
    """Call a collective and return its output's values, or a word if it raises an error that is not Dynamo's own."""
    try:
        call(*tensors)
        return [tensor.tolist() for tensor in tensors[0]]  # on an accelerator only this waits
    except dynamo.INTERNAL:
        raise
    except (RuntimeError, ValueError, TypeError, AssertionError):
        return "an error"


def _as_uncompiled(world: World, call: Call, make: Make, breaks: bool = False) -> None:
    def body(rank: Rank) -> None:
        compiled, counter = dynamo.compiled(call, fullgraph=False)
        expected = _outcome(call, make(rank))
        observed = _outcome(compiled, make(rank))
        assert observed == expected, f"uncompiled {expected}, compiled {observed}, in {counter.graphs} graphs"
        assert observed == "an error" or counter.graphs == 1 or breaks

    world.run(body)


@requirement(
    "DYN-REFUSE-01",
    "If an uncompiled collective raises an error because its tensors do not match, so does the compiled one.",
    source=SOURCE,
)
@pytest.mark.parametrize("case", _cases(MISMATCHED))
@pytest.mark.world(2)
@pytest.mark.each_choice
def test_mismatched(world: World, case: str) -> None:
    """Where the uncompiled collective accepts such tensors, the compiled one gives the same result."""
    _as_uncompiled(world, *MISMATCHED[case], breaks=case in BREAKS)


@requirement(
    "DYN-COLL-15",
    "A compiled collective accepts all tensors that the uncompiled one accepts, and gives the same result.",
    source=SOURCE,
)
@pytest.mark.parametrize("case", _cases(UNUSUAL))
@pytest.mark.world(2)
def test_unusual(world: World, case: str) -> None:
    """Where the uncompiled collective raises an error, so does the compiled one."""
    _as_uncompiled(world, *UNUSUAL[case])


@requirement(
    "DYN-COLL-202",
    "A compiled all_gather_into_tensor or reduce_scatter_tensor takes stacked tensors as well as concatenated ones.",
    source="torch.distributed.all_gather_into_tensor, torch.distributed.reduce_scatter_tensor: concatenation or stack; "
    "pytorch/pytorch#155632",
)
@pytest.mark.parametrize("form", ["concatenated", "stacked"])
@pytest.mark.world(2)
def test_stacked(world: World, form: str) -> None:
    """Gather vectors into a vector or into the rows of a matrix, and scatter such a vector or matrix."""

    def gather(x: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        dist.all_gather_into_tensor(whole, x)
        return whole + 0

    def scatter(x: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        dist.reduce_scatter_tensor(x, whole)
        return x + 0

    def body(rank: Rank) -> list[Any]:
        found: list[Any] = []
        shape = (rank.size * 3,) if form == "concatenated" else (rank.size, 3)
        for function in gather, scatter:
            x = torch.arange(3.0, device=rank.device) + 10 * rank.index
            whole = torch.arange(rank.size * 3.0, device=rank.device).reshape(shape)
            try:
                found.append(dynamo.compiled(function)[0](x, whole).flatten().tolist())
            except RuntimeError as error:
                found.append(f"{error!r:.150}")
        return found

    rows = [[i + 10.0 * r for i in range(3)] for r in range(world.size)]
    due = [[[*rows[0], *rows[1]], [world.size * (3.0 * r + i) for i in range(3)]] for r in range(world.size)]
    assert_on_ranks(due, world.run(body))


@requirement(
    "DYN-REFUSE-02",
    "Compiled code refuses an all_reduce of torch.distributed.nn.functional, or has the result of the uncompiled one.",
    source="torch/distributed/nn/functional.py: all_reduce",
)
@pytest.mark.needs(collective="all_reduce")
@pytest.mark.world(2)
def test_differentiable(world: World) -> None:
    """Give each operation, with graph breaks allowed or not."""

    def body(rank: Rank) -> None:
        for op, right in (("SUM", 6.0), ("PRODUCT", 8.0), ("MAX", 4.0), ("MIN", 2.0)):
            reduce_op = getattr(dist.ReduceOp, op)
            for fullgraph in (True, False):

                def reduced(x: torch.Tensor, reduce_op: Any = reduce_op) -> torch.Tensor:
                    result: torch.Tensor = differentiable.all_reduce(x, reduce_op)
                    return result + 1

                compiled, _ = dynamo.compiled(reduced, fullgraph=fullgraph)
                try:
                    result = compiled(torch.full((2,), 2.0 * (rank.index + 1), device=rank.device))
                except dynamo.INTERNAL:
                    raise
                except RuntimeError:
                    continue
                assert result.tolist() == [right + 1] * 2, f"{op}, fullgraph={fullgraph}"

    world.run(body)
