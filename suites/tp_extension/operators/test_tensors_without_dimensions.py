"""Operators on DTensors without dimensions: numbers that are looked up, combined with others, reduced or viewed."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.nn import functional

from fixtures.operators import Operands, Operator, close, combinations, distributed, floats
from fixtures.placements import MORE_OPERATORS
from harness import Rank, World, assert_on_ranks, requirement

pytestmark = pytest.mark.needs(torch=MORE_OPERATORS)

VECTOR, MATRIX, NUMBER, AT = floats(7), floats(5, 7), torch.tensor(2.0, dtype=torch.float64), torch.tensor(3)
BOUNDARIES = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
FAMILIES: dict[str, dict[str, tuple[Operator, Operands]]] = {
    "positions": {
        "gather": (lambda x, i: x.gather(0, i), (VECTOR, AT)),
        "gather from the end": (lambda x, i: x.gather(-1, i), (VECTOR, AT)),
        "index_select": (lambda x, i: x.index_select(0, i), (VECTOR, AT)),
        "element": (lambda x, i: x[i], (VECTOR, AT)),
        "row": (lambda x, i: x[i], (MATRIX, AT)),
        "column": (lambda x, i: x[:, i], (MATRIX, AT)),
        "element of a matrix": (lambda x, i, j: x[i, j], (MATRIX, AT, AT + 3)),
        "scatter": (lambda x, i, v: x.scatter(0, i, v), (VECTOR, AT, NUMBER)),
        "scatter of a number": (lambda x, i: x.scatter(0, i, 9.0), (VECTOR, AT)),
        "index_copy": (lambda x, i, v: x.index_copy(0, i, v), (VECTOR, AT, NUMBER)),
        "index_fill": (lambda x, i: x.index_fill(0, i, 9.0), (VECTOR, AT)),
        "index_fill of columns": (lambda x, i: x.index_fill(1, i, 9.0), (MATRIX, AT)),
        "one_hot": (lambda i: functional.one_hot(i, 7), (AT,)),
        "nll_loss": (functional.nll_loss, (VECTOR, AT)),
        "cross_entropy": (functional.cross_entropy, (VECTOR, AT)),
    },
    "beside-others": {
        "sum": (torch.add, (VECTOR, NUMBER)),
        "difference": (lambda a, b: b - a, (MATRIX, NUMBER)),
        "product": (torch.mul, (MATRIX, NUMBER)),
        "quotient": (torch.div, (MATRIX, NUMBER)),
        "power": (torch.pow, (MATRIX, NUMBER)),
        "minimum": (torch.minimum, (MATRIX, NUMBER)),
        "comparison": (torch.lt, (MATRIX, NUMBER)),
        "clamp": (lambda a, b: torch.clamp(a, min=b), (MATRIX, NUMBER)),
        "lerp": (lambda a, b: torch.lerp(a, a * 2, b), (MATRIX, NUMBER)),
        "choice": (lambda a, b: torch.where(a > 0, a, b), (VECTOR, NUMBER)),
        "condition": (lambda a, b: torch.where(b > 0, a, b), (VECTOR, NUMBER)),
        "masked_fill": (lambda a, b: a.masked_fill(a > 0, b), (VECTOR, NUMBER)),
        "copy": (lambda a, b: a.clone().copy_(b), (MATRIX, NUMBER)),
        "equality": (lambda a, b: torch.tensor(torch.equal(a, b)), (VECTOR, NUMBER)),
        "bucketize": (torch.bucketize, (NUMBER, BOUNDARIES)),
        "addmm": (lambda a, b: torch.addmm(b, a, a.t()), (MATRIX, NUMBER)),
        "select_scatter": (lambda x, v: x.select_scatter(v, 0, 3), (VECTOR, NUMBER)),
    },
    "alone": {
        **{
            name: (getattr(torch, name), (NUMBER,))
            for name in ("sum", "mean", "prod", "amax", "amin", "max", "min", "argmax", "all", "any", "median", "t")
        },
        **{
            f"{name} over {dim}": (lambda x, name=name, dim=dim: getattr(x, name)(dim), (NUMBER,))
            for name in ("sum", "mean", "prod", "amax", "argmin", "softmax", "log_softmax", "argsort", "unsqueeze")
            for dim in (0, -1)
        },
        **{
            f"{name} of a dimension": (lambda x, name=name: getattr(x, name)(0).values, (NUMBER,))
            for name in ("max", "min", "median", "sort", "mode", "cummax")
        },
        "topk": (lambda x: x.topk(1).values, (NUMBER,)),
        "kthvalue": (lambda x: x.kthvalue(1).values, (NUMBER,)),
        "var": (lambda x: x.var(correction=0), (NUMBER,)),
        "norm": (torch.linalg.vector_norm, (NUMBER,)),
        "expand": (lambda x: x.expand(2, 5), (NUMBER,)),
        "repeat": (lambda x: x.repeat(3), (NUMBER,)),
        "view": (lambda x: x.view(1), (NUMBER,)),
        "reshape": (lambda x: x.reshape(1, 1), (NUMBER,)),
        "flatten": (torch.flatten, (NUMBER,)),
        "squeeze": (torch.squeeze, (NUMBER,)),
        "stack": (lambda x: torch.stack([x, x]), (NUMBER,)),
        "permute": (lambda x: x.permute(()), (NUMBER,)),
        "roll": (lambda x: x.roll(1), (NUMBER,)),
        "conversion": (lambda x: x.to(torch.int32), (NUMBER,)),
        "full_like": (lambda x: torch.full_like(x, 3), (NUMBER,)),
        "distance": (lambda x: torch.dist(x, x * 2), (NUMBER,)),
        "mse_loss": (lambda x: functional.mse_loss(x, x * 2), (NUMBER,)),
        "histc": (lambda x: x.histc(4, 0, 4), (NUMBER,)),
    },
    "logsumexp": {
        f"logarithm over {dim}, {keep}": (lambda x, dim=dim, keep=keep: x.logsumexp(dim, keep), (NUMBER,))
        for dim in (0, -1)
        for keep in (False, True)
    },
}
"""Operators with operands, of which at least one has no dimensions."""


@requirement(
    "TP-OP-1100",
    "An operator takes DTensors without dimensions wherever it takes such plain tensors, and gives the same result.",
    source="torch.distributed.tensor.DTensor: a single-device abstraction over multi-device tensors",
)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.world(2)
def test_without_dimensions(world: World, family: str) -> None:
    """Give each operand each of its placements; numbers are replicated or pending."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong = rank.mesh(), []
        for name, (operator, given) in FAMILIES[family].items():
            operands = tuple(x.to(rank.device) for x in given)
            expected = operator(*operands)
            for placements in combinations(operands):
                case = f"{name} of {', '.join(map(str, placements))}"
                own = [distributed(x, p, rank, mesh) for x, p in zip(operands, placements, strict=True)]
                try:
                    found = operator(*own)
                except (IndexError, NotImplementedError, RuntimeError) as e:
                    wrong.append(f"{case}: {str(e).splitlines()[0]}")
                    continue
                if not close(expected, found.full_tensor() if isinstance(found, DTensor) else found):
                    wrong.append(case)
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))
