"""Laws: comparisons of two runs with each other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given

from harness import World, requirement
from harness.programs import assert_law, examples, programs
from harness.specs.program import Program

SOURCE = "torch/distributed/_composable/replicate.py: replicate"
LAWS = [
    pytest.param(
        "permuted",
        marks=requirement(
            "REPL-LAW-01",
            "Under composable DDP, training gives the same numbers if ranks exchange their parts of a batch.",
            source=SOURCE,
        ),
    ),
    pytest.param(
        "spread",
        marks=requirement(
            "REPL-LAW-03",
            "Under composable DDP, training gives the same numbers if more ranks share a batch.",
            source=SOURCE,
        ),
    ),
    pytest.param(
        "accumulated",
        marks=requirement(
            "REPL-LAW-04",
            "Under composable DDP, training gives the same numbers if a batch is split into micro-batches.",
            source=SOURCE,
        ),
    ),
    pytest.param(
        "unwrapped",
        marks=requirement(
            "REPL-LAW-05",
            "Under composable DDP, training gives the same numbers if no layer is wrapped on its own.",
            source=SOURCE,
        ),
    ),
    pytest.param(
        "rewrapped",
        marks=requirement(
            "REPL-LAW-06",
            "Under composable DDP, training gives the same numbers if layers are wrapped in another order.",
            source=SOURCE,
        ),
    ),
    pytest.param(
        "flattened",
        marks=requirement(
            "REPL-LAW-07",
            "Under composable DDP, training gives the same numbers if the ranks come from a flattened mesh.",
            source=SOURCE,
        ),
    ),
    pytest.param(
        "never-saved",
        marks=requirement(
            "REPL-LAW-08",
            "Under composable DDP, training gives the same numbers if state is saved and loaded between steps.",
            source=SOURCE,
        ),
    ),
    pytest.param(
        "resumed",
        marks=requirement(
            "REPL-LAW-09",
            "Under composable DDP, training gives the same numbers if a world of another size resumes from saved "
            "state.",
            source=SOURCE,
        ),
    ),
]
"""Each law changes how a program is run, which must not change its numbers."""


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.world(1, 2, 4)
@given(program=programs("replicate", (1, 2), smooth=False, most_steps=2, dtypes=("float64", "float32"), any_world=True))
@examples(6)
def test_law(worlds: Callable[[int], World], law: str, program: Program) -> None:
    """Compare parameters, buffers and optimizer states after every step, bit for bit."""
    assert_law(worlds, program, law)


@requirement(
    "REPL-LAW-02",
    "On one rank, composable DDP gives the same numbers as torch alone, bit for bit, even where results are rounded.",
    source=SOURCE,
)
@pytest.mark.world(1)
@given(program=programs("replicate", (1,), most_steps=2, any_world=True))
@examples(12)
def test_single(worlds: Callable[[int], World], program: Program) -> None:
    """Both runs do the same operations in the same order, in the program's own dtype."""
    assert_law(worlds, program, "single")
