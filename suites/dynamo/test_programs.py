"""Generated training runs, compiled, on each of the other stacks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given

from harness import World, requirement
from harness.programs.assertion import assert_same_as_alone
from harness.programs.spec import Program
from harness.programs.strategies import programs
from suites.settings import examples

SIZES = (1, 2, 3)


@requirement(
    "DYN-GRAD-02",
    "Any model that is compiled on ranks trains as it does uncompiled on one device, bit for bit where every result is "
    "representable, and every rank compiles the same graphs, at least one.",
    source="torch/_dynamo/variables/distributed.py; torch.compile",
)
@pytest.mark.world(*SIZES, timeout=120)
@given(program=programs("dynamo", SIZES, smooth=False, most_steps=2))
@examples(8)
def test_representable(worlds: Callable[[int], World], program: Program) -> None:
    """Layers and optimizers that only add and multiply small numbers."""
    assert_same_as_alone(worlds, program)


@requirement(
    "DYN-GRAD-03",
    "Any model that is compiled on ranks trains as it does uncompiled on one device, within what rounding explains.",
    source="torch/_dynamo/variables/distributed.py; torch.compile",
)
@pytest.mark.world(*SIZES, timeout=120)
@given(program=programs("dynamo", SIZES, smooth=True, most_steps=2))
@examples(4)
def test_rounded(worlds: Callable[[int], World], program: Program) -> None:
    """Norms, attention, smooth activations, AdamW, clipping."""
    assert_same_as_alone(worlds, program)
