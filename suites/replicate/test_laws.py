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
    "REPL-LAW-01",
    "Under composable DDP the numbers stay the same when ranks exchange their parts of a batch, when more ranks "
    "share it, when it comes in micro-batches, when no layer is wrapped on its own, when layers are wrapped in "
    "another order, when the ranks are those of a mesh that is flattened, when state is saved and loaded in "
    "between, and when a world of another size takes over.",
    source="torch/distributed/_composable/replicate.py: replicate",
)
@pytest.mark.parametrize(
    "law", ["permuted", "spread", "accumulated", "unwrapped", "rewrapped", "flattened", "never-saved", "resumed"]
)
@pytest.mark.world(1, 2, 4)
@given(program=programs("replicate", (1, 2), smooth=False, most_steps=2, dtypes=("float64", "float32"), any_world=True))
@examples(6)
def test_law(worlds: Callable[[int], World], law: str, program: Program) -> None:
    """Parameters, buffers and states of the optimizer after every step, bit for bit."""
    assert_law(worlds, program, law)


@requirement(
    "REPL-LAW-02",
    "On one rank the numbers are those of torch alone, bit for bit, in the program's own dtype, whatever rounds.",
    source="torch/distributed/_composable/replicate.py: replicate",
)
@pytest.mark.world(1)
@given(program=programs("replicate", (1,), most_steps=2, any_world=True))
@examples(12)
def test_single(worlds: Callable[[int], World], program: Program) -> None:
    """The same operations in the same order, so that nothing has to be proven exact."""
    assert_law(worlds, program, "single")
