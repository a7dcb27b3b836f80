"""Laws that hold between two runs on ranks, whatever one device would say."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given

from harness import World, requirement
from harness.programs.examples import examples
from harness.programs.laws import assert_law
from harness.programs.spec import Program
from harness.programs.strategies import programs


@requirement(
    "DYN-LAW-01",
    "Under torch.compile the numbers stay the same when ranks exchange their parts of a batch, when more ranks "
    "share it, when it comes in micro-batches, when no layer is wrapped on its own, and when state is saved and "
    "loaded in between.",
    source="torch/_dynamo/variables/distributed.py; torch.compile",
)
@pytest.mark.parametrize("law", ["permuted", "spread", "accumulated", "unwrapped", "never-saved"])
@pytest.mark.world(1, 2, 4, timeout=120)
@given(program=programs("dynamo", (1, 2), smooth=False, most_steps=2, dtypes=("float64", "float32"), any_world=True))
@examples(2)
def test_law(worlds: Callable[[int], World], law: str, program: Program) -> None:
    """Parameters, buffers and states of the optimizer after every step, bit for bit."""
    assert_law(worlds, program, law)


@requirement(
    "DYN-LAW-02",
    "Compiled ranks have the numbers of uncompiled ones, bit for bit, whatever rounds.",
    source="torch/_dynamo/variables/distributed.py; torch.compile",
)
@pytest.mark.world(1, 2, timeout=120)
@given(program=programs("dynamo", (1, 2), most_steps=2, any_world=True))
@examples(6)
def test_eager(worlds: Callable[[int], World], program: Program) -> None:
    """The same operations in the same order on the same ranks."""
    assert_law(worlds, program, "eager")
