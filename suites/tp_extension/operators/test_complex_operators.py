"""Operators on complex DTensors: their real and imaginary parts, and what linear algebra conjugates."""

from __future__ import annotations

import itertools

import pytest
import torch

from fixtures.operators import Operator, choices, distributed, floats
from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks.limit import runs_with

MATRIX = torch.complex(floats(4, 4), floats(4, 4, start=3)) + 8 * torch.eye(4)
NUMBER = torch.tensor(3 - 4j, dtype=torch.complex128)
PARTS: dict[str, Operator] = {
    "real": torch.real,
    "imag": torch.imag,
    "isfinite": torch.isfinite,
    "isreal": torch.isreal,
    "view_as_real": torch.view_as_real,
}
FAMILIES: dict[str, tuple[torch.Tensor, dict[str, Operator]]] = {
    "parts of matrices": (MATRIX, PARTS),
    "parts of numbers": (NUMBER, PARTS),
    "sums": (
        MATRIX,
        {
            "angle": lambda x: x.sum(0).angle(),
            "abs": lambda x: x.sum().abs(),
            "adjoint": lambda x: x.mH.sum(1),
            "product": lambda x: x @ x,
        },
    ),
    "linear algebra": (
        MATRIX,
        {
            "inv": torch.linalg.inv,
            "solve": lambda x: torch.linalg.solve(x, x.mH),
            "det": torch.linalg.det,
            "svdvals": torch.linalg.svdvals,
            "eigvalsh": lambda x: torch.linalg.eigvalsh(x + x.mH),
            "inverse by hand": lambda x: torch.linalg.solve(x.mH @ x, x.mH),
        },
    ),
    "pseudo-inverses": (
        MATRIX,
        {
            "pinv": torch.linalg.pinv,
            "pinverse": torch.pinverse,
            "pinv of rows": lambda x: torch.linalg.pinv(x[:3]),
            "pinv with a tolerance": lambda x: torch.linalg.pinv(x, rtol=1e-8),
        },
    ),
}
"""Operators, by the tensor of which they are."""
if runs_with("<2.12"):  # which has no strategy for it
    del FAMILIES["pseudo-inverses"]


@requirement(
    "TP-OPERATOR-5382",
    "An operator on a complex DTensor gives the result of the plain tensor.",
    source="torch.distributed.tensor.DTensor; torch.linalg.pinv; torch.real; torch.view_as_real",
)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.world(2)
def test_operators(world: World, family: str) -> None:
    """Place the operand in every way; results that are rounded may differ by a thousandth."""
    operand, operators = FAMILIES[family]

    def body(rank: Rank) -> list[str]:
        mesh, wrong = rank.mesh(), []
        x = operand.to(rank.device)
        for (name, operator), placement in itertools.product(operators.items(), choices(x)):
            try:
                found, expected = operator(distributed(x, placement, rank, mesh)), operator(x)
                if found.shape != expected.shape or found.dtype != expected.dtype:
                    wrong.append(f"{name}, {placement}: {found.dtype}{tuple(found.shape)}")
                elif not torch.allclose(found.full_tensor(), expected, rtol=1e-3, atol=1e-3):
                    wrong.append(f"{name}, {placement}: other values")
            except NotImplementedError:
                assert runs_with("<2.12"), f"{name}, {placement}: not implemented"
            except RuntimeError as error:
                wrong.append(f"{name}, {placement}: {str(error).splitlines()[0]}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))
