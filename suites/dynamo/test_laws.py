"""Laws: comparisons of two runs with each other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given

from harness import World, requirement
from harness.programs import assert_law, examples, programs
from harness.specs.program import Program

SOURCE = "torch/_dynamo/variables/distributed.py; torch.compile"
LAWS = [
    pytest.param(
        "permuted",
        marks=requirement(
            "DYN-LAW-01",
            "Under torch.compile, training gives the same numbers if ranks exchange their parts of a batch.",
            source=SOURCE,
        ),
    ),
    pytest.param(
        "spread",
        marks=requirement(
            "DYN-LAW-03",
            "Under torch.compile, training gives the same numbers if more ranks share a batch.",
            source=SOURCE,
        ),
    ),
    pytest.param(
        "accumulated",
        marks=requirement(
            "DYN-LAW-04",
            "Under torch.compile, training gives the same numbers if a batch is split into micro-batches.",
            source=SOURCE,
        ),
    ),
    pytest.param(
        "unwrapped",
        marks=requirement(
            "DYN-LAW-05",
            "Under torch.compile, training gives the same numbers if no layer is wrapped on its own.",
            source=SOURCE,
        ),
    ),
    pytest.param(
        "never-saved",
        marks=requirement(
            "DYN-LAW-06",
            "Under torch.compile, training gives the same numbers if state is saved and loaded between steps.",
            source=SOURCE,
        ),
    ),
]
"""Each law changes how a program is run, which must not change its numbers."""


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.world(1, 2, 4, timeout=120)
@given(program=programs("dynamo", (1, 2), smooth=False, most_steps=2, dtypes=("float64", "float32"), any_world=True))
@examples(2)
def test_law(worlds: Callable[[int], World], law: str, program: Program) -> None:
    """Compare parameters, buffers and optimizer states after every step, bit for bit."""
    assert_law(worlds, program, law)


@requirement(
    "DYN-LAW-02",
    "A compiled model trains to the same numbers as the uncompiled one on the same ranks, bit for bit, even where "
    "results are rounded.",
    source=SOURCE,
)
@pytest.mark.world(1, 2, timeout=120)
@given(program=programs("dynamo", (1, 2), most_steps=2, any_world=True))
@examples(6)
def test_eager(worlds: Callable[[int], World], program: Program) -> None:
    """Both runs do the same operations in the same order on the same ranks."""
    assert_law(worlds, program, "eager")
