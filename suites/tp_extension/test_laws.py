"""Laws: comparisons of two runs with each other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given

from harness import World, requirement
from harness.programs import assert_law, examples, programs
from harness.specs.program import Program

SOURCE = "torch/distributed/tensor/parallel/fsdp.py: DTensorExtensions"
LAWS = [
    pytest.param(
        "permuted",
        marks=requirement(
            "TP-LAW-01",
            "Under FSDP over tensor parallelism, training gives the same numbers if ranks exchange their parts of a "
            "batch.",
            source=SOURCE,
        ),
    ),
    pytest.param(
        "spread",
        marks=requirement(
            "TP-LAW-03",
            "Under FSDP over tensor parallelism, training gives the same numbers if more ranks share a batch.",
            source=SOURCE,
        ),
    ),
    pytest.param(
        "accumulated",
        marks=requirement(
            "TP-LAW-04",
            "Under FSDP over tensor parallelism, training gives the same numbers if a batch is split into "
            "micro-batches.",
            source=SOURCE,
        ),
    ),
    pytest.param(
        "unwrapped",
        marks=requirement(
            "TP-LAW-05",
            "Under FSDP over tensor parallelism, training gives the same numbers if no layer is wrapped on its own.",
            source=SOURCE,
        ),
    ),
    pytest.param(
        "rewrapped",
        marks=requirement(
            "TP-LAW-06",
            "Under FSDP over tensor parallelism, training gives the same numbers if layers are wrapped in another "
            "order.",
            source=SOURCE,
        ),
    ),
    pytest.param(
        "undivided",
        marks=requirement(
            "TP-LAW-07",
            "Under FSDP over tensor parallelism, training gives the same numbers if no layer is tensor parallel.",
            source=SOURCE,
        ),
    ),
    pytest.param(
        "flattened",
        marks=requirement(
            "TP-LAW-08",
            "Under FSDP over tensor parallelism, training gives the same numbers if shards are replicated in pairs.",
            source=SOURCE,
        ),
    ),
    pytest.param(
        "never-saved",
        marks=requirement(
            "TP-LAW-09",
            "Under FSDP over tensor parallelism, training gives the same numbers if state is saved and loaded "
            "between steps.",
            source=SOURCE,
        ),
    ),
    pytest.param(
        "resumed",
        marks=requirement(
            "TP-LAW-10",
            "Under FSDP over tensor parallelism, training gives the same numbers if a world of another size resumes "
            "from saved state.",
            source=SOURCE,
        ),
    ),
]
"""Each law changes how a program is run, which must not change its numbers."""


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.world(1, 2, 4, 8)
@given(
    program=programs(
        "tp_extension", (1, 2, 4), smooth=False, most_steps=2, dtypes=("float64", "float32"), any_world=True
    )
)
@examples(6)
def test_law(worlds: Callable[[int], World], law: str, program: Program) -> None:
    """Compare parameters, buffers and optimizer states after every step, bit for bit."""
    assert_law(worlds, program, law)


@requirement(
    "TP-LAW-02",
    "On one rank, FSDP over tensor parallelism gives the same numbers as torch alone, bit for bit, even where "
    "results are rounded.",
    source=SOURCE,
)
@pytest.mark.world(1)
@given(program=programs("tp_extension", (1,), most_steps=2, any_world=True))
@examples(12)
def test_single(worlds: Callable[[int], World], program: Program) -> None:
    """Both runs do the same operations in the same order, in the program's own dtype."""
    assert_law(worlds, program, "single")
