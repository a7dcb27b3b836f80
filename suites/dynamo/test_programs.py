"""Generated training runs, compiled, on each of the other stacks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given

from harness import World, requirement
from harness.programs import assert_same_as_alone, examples, programs
from harness.specs.program import Program

SIZES = (1, 2, 3)


@requirement(
    "DYN-GRAD-02",
    "Any model compiled on ranks trains as it does uncompiled on one device, bit for bit if every result is "
    "representable.",
    source="torch/_dynamo/variables/distributed.py; torch.compile",
)
@requirement(
    "DYN-COUNT-02",
    "Every rank compiles a model into the same number of graphs.",
    source="torch.compile: guards",
)
@requirement(
    "DYN-COUNT-03",
    "Compiling a model on ranks produces at least one graph on every rank.",
    source="torch/_dynamo/variables/distributed.py; torch.compile",
)
@pytest.mark.world(*SIZES, timeout=120)
@given(program=programs("dynamo", SIZES, smooth=False, most_steps=2))
@examples(8)
def test_representable(worlds: Callable[[int], World], program: Program) -> None:
    """Draw layers and optimizers that only add and multiply small numbers."""
    assert_same_as_alone(worlds, program)


@requirement(
    "DYN-GRAD-03",
    "Any model compiled on ranks trains as it does uncompiled on one device, within the rounding error.",
    source="torch/_dynamo/variables/distributed.py; torch.compile",
)
@pytest.mark.world(*SIZES, timeout=120)
@given(program=programs("dynamo", SIZES, smooth=True, most_steps=2))
@examples(4)
def test_rounded(worlds: Callable[[int], World], program: Program) -> None:
    """Draw norms, attention, smooth activations, AdamW and clipping."""
    assert_same_as_alone(worlds, program)


@requirement(
    "DYN-GRAD-05",
    "Any model under FSDP1 over tensor parallelism, two by two ranks, trains compiled as it does uncompiled on "
    "one device.",
    source="torch/distributed/tensor/parallel/fsdp.py: DTensorExtensions; torch.compile",
)
@pytest.mark.world(4, timeout=120)
@given(
    # Only float32: in other dtypes, hardly any layer may be tensor parallel (docs/findings/tp_gradient_dtype.py).
    program=programs("dynamo", (4,), most_steps=2, dtypes=("float32",), compiled=("tp_extension",)).filter(
        lambda program: program.layout.two_dimensional
    )
)
@examples(4)
def test_two_dimensional(worlds: Callable[[int], World], program: Program) -> None:
    """FSDP1 over a tensor-parallel plan needs four ranks, more than the tests above use."""
    assert_same_as_alone(worlds, program)
