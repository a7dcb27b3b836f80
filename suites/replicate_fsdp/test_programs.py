"""Generated training runs under FSDP-replicate."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given

from harness import World, requirement
from harness.programs import assert_same_as_alone, examples, programs
from harness.specs.program import Program

SIZES = (1, 2, 3, 4, 5)


@requirement(
    "RFSDP-GRAD-02",
    "Any model under FSDP-replicate trains on ranks as on one device, bit for bit at every step if every result "
    "is representable.",
    source="torch/distributed/_composable/replicate_with_fsdp.py: replicate",
)
@pytest.mark.world(*SIZES)
@given(program=programs("replicate_fsdp", SIZES, smooth=False))
@examples(60)
def test_representable(worlds: Callable[[int], World], program: Program) -> None:
    """Draw layers and optimizers that only add and multiply small numbers.

    Compare outputs, gradients, parameters, buffers and optimizer states.
    """
    assert_same_as_alone(worlds, program)


@requirement(
    "RFSDP-GRAD-03",
    "Any model under FSDP-replicate trains on ranks as on one device, within the rounding error.",
    source="torch/distributed/_composable/replicate_with_fsdp.py: replicate",
)
@pytest.mark.world(*SIZES)
@given(program=programs("replicate_fsdp", SIZES, smooth=True))
@examples(20)
def test_rounded(worlds: Callable[[int], World], program: Program) -> None:
    """Draw norms, attention, smooth activations, AdamW and clipping."""
    assert_same_as_alone(worlds, program)
