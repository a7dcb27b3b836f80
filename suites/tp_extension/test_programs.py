"""Generated training runs under FSDP1 over tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given

from harness import World, requirement
from harness.programs import assert_same_as_alone, examples, programs
from harness.specs.program import Program

SIZES = (1, 2, 3, 4)


@requirement(
    "TP-GRAD-02",
    "Any model under FSDP over tensor parallelism trains on ranks as on one device, bit for bit if every result "
    "is representable.",
    source="torch/distributed/tensor/parallel/fsdp.py: DTensorExtensions",
)
@pytest.mark.world(*SIZES)
@given(program=programs("tp_extension", SIZES, smooth=False))
@examples(60)
def test_representable(worlds: Callable[[int], World], program: Program) -> None:
    """Draw layers and optimizers that only add and multiply small numbers.

    Compare outputs, gradients, parameters and buffers.
    """
    assert_same_as_alone(worlds, program)


@requirement(
    "TP-GRAD-03",
    "Any model under FSDP over tensor parallelism trains on ranks as on one device, within the rounding error.",
    source="torch/distributed/tensor/parallel/fsdp.py: DTensorExtensions",
)
@pytest.mark.world(*SIZES)
@given(program=programs("tp_extension", SIZES, smooth=True))
@examples(20)
def test_rounded(worlds: Callable[[int], World], program: Program) -> None:
    """Draw norms, attention, smooth activations, AdamW and clipping."""
    assert_same_as_alone(worlds, program)


@requirement(
    "TP-GRAD-17",
    "Any model that is both tensor parallel and sharded, on two by two ranks, trains as on one device.",
    source="torch/distributed/tensor/parallel/fsdp.py: DTensorExtensions",
)
@pytest.mark.world(4)
@given(program=programs("tp_extension", (4,)).filter(lambda program: program.layout.two_dimensional))
@examples(20)
def test_two_dimensional(worlds: Callable[[int], World], program: Program) -> None:
    """Draw plans on a two-dimensional mesh, which only one in thirty programs for all sizes has."""
    assert_same_as_alone(worlds, program)
