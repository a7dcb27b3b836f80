"""Generated training runs under composable DDP."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given

from harness import World, requirement
from harness.programs.assertion import assert_same_as_alone
from harness.programs.examples import examples
from harness.programs.spec import Program
from harness.programs.strategies import programs

SIZES = (1, 2, 3, 4, 5)


@requirement(
    "REPL-GRAD-02",
    "Any model that composable DDP takes trains on ranks as it does on one device, bit for bit where every result is "
    "representable: outputs, gradients, parameters, buffers and optimizer states, at every step.",
    source="torch/distributed/_composable/replicate.py: replicate",
)
@pytest.mark.world(*SIZES)
@given(program=programs("replicate", SIZES, smooth=False))
@examples(60)
def test_representable(worlds: Callable[[int], World], program: Program) -> None:
    """Layers and optimizers that only add and multiply small numbers."""
    assert_same_as_alone(worlds, program)


@requirement(
    "REPL-GRAD-03",
    "Any model that composable DDP takes trains on ranks as it does on one device, within what rounding explains.",
    source="torch/distributed/_composable/replicate.py: replicate",
)
@pytest.mark.world(*SIZES)
@given(program=programs("replicate", SIZES, smooth=True))
@examples(20)
def test_rounded(worlds: Callable[[int], World], program: Program) -> None:
    """Norms, attention, smooth activations, AdamW, clipping."""
    assert_same_as_alone(worlds, program)
