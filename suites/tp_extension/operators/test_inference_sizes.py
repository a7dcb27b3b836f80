"""Sizes and numbers that operators on DTensors take in inference mode, where these reach a DTensor whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.nn import functional

from fixtures.operators import Operands, Operator, distributed, floats, right
from fixtures.placements import MORE_OPERATORS
from harness import Rank, World, assert_on_ranks, requirement

BOX, MATRIX, NUMBER = floats(2, 4, 6), floats(2, 8), torch.tensor(3.0)
S0, S1, S2, R = Shard(0), Shard(1), Shard(2), Replicate()
Case = tuple[Operator, Operands, tuple[Placement, ...]]
FAMILIES: dict[str, dict[str, Case]] = {
    "inferred-sizes": {
        "unflatten": (lambda x: x.unflatten(1, (2, -1)), (MATRIX,), (S1,)),
        "unflatten without elements": (lambda x: x.unflatten(1, (2, -1)), (floats(0, 8),), (S1,)),
        "unflatten in three": (lambda x: x.unflatten(2, (2, 1, -1)), (floats(1, 2, 8),), (S2,)),
    },
    "sizes-to-take": {
        "expand_as": (lambda x, y: x.expand_as(y), (BOX[:, :1], BOX), (S0, R)),
        "expand_as of one in parts": (lambda x, y: x.expand_as(y), (BOX[:, :1], BOX), (R, S1)),
        "broadcast_to": (lambda x: x.broadcast_to(2, 4, 6), (BOX[:, :1],), (S0,)),
        "view_as": (lambda x, y: x.view_as(y), (BOX, BOX), (S0, S1)),
        "view_as of one in rows": (lambda x, y: x.view_as(y), (BOX, BOX), (S1, S0)),
        "reshape_as": (lambda x, y: x.reshape_as(y), (BOX, BOX), (S0, S1)),
    },
    "uneven-sizes": {
        "flatten": (lambda x: x.flatten(1), (floats(2, 5, 2),), (S1,)),
        "repeat_interleave": (lambda x: x.repeat_interleave(2, 1), (floats(2, 5, 2),), (S1,)),
        "l1_loss": (functional.l1_loss, (floats(5, 2), floats(5, 2, start=3)), (S0, S0)),
    },
    "numbers": {
        "item": (lambda x: torch.tensor(x.item()), (NUMBER,), (R,)),
        "float": (lambda x: torch.tensor(float(x)), (NUMBER,), (R,)),
        "int": (lambda x: torch.tensor(int(x)), (NUMBER,), (R,)),
        "bool": (lambda x: torch.tensor(bool(x)), (NUMBER,), (R,)),
    },
    "given-sizes": {
        "reshape": (lambda x: x.reshape(2, 4, 2, 3), (BOX,), (S1,)),
        "flatten": (lambda x: x.flatten(1), (BOX,), (S0,)),
        "swapaxes": (lambda x: x.swapaxes(0, 1), (BOX,), (S1,)),
        "movedim": (lambda x: x.movedim(0, 2), (BOX,), (S0,)),
        "chunk": (lambda x: x.chunk(2, 2)[1], (BOX,), (S1,)),
        "narrow": (lambda x: x.narrow(2, 1, 3), (BOX,), (S1,)),
        "linear": (functional.linear, (BOX, floats(3, 6)), (S0, R)),
        "matmul": (torch.matmul, (BOX, floats(6, 3)), (S1, R)),
    },
}
"""An operator, the operands, and how each is laid out."""


@requirement(
    "TP-MODEL-04",
    "An operator on DTensors gives the same result in inference mode, in which PyTorch does not split it into others.",
    source="torch.inference_mode; torch.distributed.tensor.DTensor",
)
@pytest.mark.needs(torch=MORE_OPERATORS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.world(2)
def test_split_operators(world: World, family: str) -> None:
    """Take what is right without the mode, or refused on all ranks: a layout that an operator can't keep."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong = rank.mesh(), []
        for name, (operator, given, placements) in FAMILIES[family].items():
            operands = tuple(operand.to(rank.device) for operand in given)
            expected = operator(*operands)
            outcomes = []
            for mode in (torch.no_grad(), torch.inference_mode()):
                with mode:
                    own = [distributed(x, p, rank, mesh) for x, p in zip(operands, placements, strict=True)]
                    outcomes.append(outcome(operator, own, expected))
            usual, found = outcomes
            if usual != "right" and "refused" not in usual:
                wrong.append(f"{name} without inference mode: {usual}")
            elif found != usual:
                wrong.append(f"{name}: {found}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


def outcome(operator: Operator, operands: list[DTensor], expected: torch.Tensor) -> str:
    """Return whether an operator's result is right, or what it is instead."""
    try:
        found: Any = operator(*operands)
    except (NotImplementedError, RuntimeError) as error:
        return f"refused with {type(error).__name__}"
    if not isinstance(found, DTensor):
        return "right" if torch.equal(found, expected.cpu()) else f"values {found.tolist()}"
    return "right" if right(expected, found) else f"a part of shape {tuple(found.to_local().shape)} on a rank"
