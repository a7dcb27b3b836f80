"""Operators of other operators in inference mode, in which PyTorch gives them to DTensor whole."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.nn import functional

from fixtures.operators import Operands, Operator, distributed, floats, right
from fixtures.placements import MORE_OPERATORS
from harness import Rank, World, assert_on_ranks, requirement

EVEN, OTHER, UNEVEN, MATRIX = floats(2, 4, 6), floats(2, 4, 6, start=3), floats(2, 5, 3), floats(5, 7)
PLACES = torch.arange(24).reshape(2, 4, 3).remainder(6)
KINDS: dict[str, dict[str, tuple[Operator, Operands]]] = {
    "views": {
        "movedim": (lambda x: x.movedim((0, 1), (1, 2)), (UNEVEN,)),
        "swapaxes": (lambda x: x.swapaxes(0, -1), (UNEVEN,)),
        "mT": (lambda x: x.mT, (UNEVEN,)),
        "atleast_3d": (torch.atleast_3d, (MATRIX,)),
        "flatten": (lambda x: x.flatten(1), (EVEN,)),
        "flatten the first": (lambda x: x.flatten(0, -2), (EVEN,)),
        "reshape": (lambda x: x.reshape(2, -1), (EVEN,)),
        "unflatten": (lambda x: x.unflatten(-1, (-1, 3)), (EVEN,)),
        "chunk": (lambda x: x.chunk(2, 1)[1], (UNEVEN,)),
        "tensor_split": (lambda x: x.tensor_split(3, 1)[1], (UNEVEN,)),
        "hsplit": (lambda x: torch.hsplit(x, [2])[1], (UNEVEN,)),
        "narrow": (lambda x: x.narrow(1, 1, 3), (UNEVEN,)),
        "tile": (lambda x: x.tile(2, 1, 1), (UNEVEN,)),
        "view_as": (lambda x: x.view_as(x + 1), (EVEN,)),
        "reshape_as": (lambda x: x.transpose(0, 1).reshape_as(x.transpose(0, 1) + 1), (EVEN,)),
    },
    "products": {
        "inner": (torch.inner, (MATRIX, floats(3, 7))),
        "tensordot": (lambda x, y: torch.tensordot(x, y, 2), (EVEN, floats(4, 6, 3))),
    },
    "reductions": {
        "nanmean": (lambda x: x.nanmean(1), (UNEVEN,)),
        "diff": (lambda x: x.diff(dim=1), (UNEVEN,)),
        "take_along_dim": (lambda x, i: torch.take_along_dim(x, i, 2), (EVEN, PLACES)),
        "cosine_similarity": (lambda x, y: functional.cosine_similarity(x, y, dim=1), (EVEN, OTHER)),
        "normalize": (lambda x: functional.normalize(x, dim=1), (EVEN,)),
    },
    "losses": {
        "l1_loss": (functional.l1_loss, (EVEN, OTHER)),
        "sum of l1_loss": (lambda x, y: functional.l1_loss(x, y, reduction="sum"), (UNEVEN, UNEVEN + 1)),
        "kl_div": (lambda x, y: functional.kl_div(x, y, reduction="batchmean"), (EVEN, OTHER.abs() + 1)),
    },
}
"""Operators that PyTorch computes by other operators, with their operands."""


@requirement(
    "TP-MODEL-04",
    "An operator on DTensors gives the same result in inference mode, in which PyTorch does not split it into others.",
    source="torch.inference_mode; torch.distributed.tensor.DTensor",
)
@pytest.mark.needs(torch=MORE_OPERATORS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.world(2)
def test_composed(world: World, kind: str) -> None:
    """Shard the first operand or all of them; what DTensor refuses outside of inference mode is not tried in it."""

    def body(rank: Rank) -> list[str]:
        wrong = []
        for turn, (name, (operator, given)) in enumerate(KINDS[kind].items()):
            operands = tuple(operand.to(rank.device) for operand in given)
            dims = min(x.dim() for x in operands)
            every: list[tuple[Placement, ...]] = [
                *((Shard(dim),) * len(operands) for dim in range(dims)),
                *(
                    (Shard(dim), *(Replicate(),) * (len(operands) - 1))
                    for dim in range(dims if len(operands) > 1 else 0)
                ),
            ]
            for placements in every if kind == "views" else every[turn % 2 :: 2]:
                own = [distributed(x, p, rank, rank.mesh()) for x, p in zip(operands, placements, strict=True)]
                case = f"{name} of {', '.join(map(str, placements))}"
                try:
                    with torch.no_grad():
                        operator(*own)
                except (NotImplementedError, RuntimeError, AssertionError):
                    continue
                try:
                    with torch.inference_mode():
                        own = [distributed(x, p, rank, rank.mesh()) for x, p in zip(operands, placements, strict=True)]
                        if not right(operator(*operands), operator(*own)):
                            wrong.append(case)
                except (NotImplementedError, RuntimeError, AssertionError, IndexError) as error:
                    wrong.append(f"{case}: {error!r:.120}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))
