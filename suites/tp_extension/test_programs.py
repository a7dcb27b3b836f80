"""Generated training runs under FSDP1 over tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given

from harness import World, requirement
from harness.programs.assertion import assert_same_as_alone
from harness.programs.examples import examples
from harness.programs.spec import Program
from harness.programs.strategies import programs

SIZES = (1, 2, 3, 4)


@requirement(
    "TP-GRAD-02",
    "Any model that FSDP over tensor parallelism takes trains on ranks as it does on one device, bit for bit where "
    "every result is representable: outputs, gradients, parameters and buffers, at every step.",
    source="torch/distributed/tensor/parallel/fsdp.py: DTensorExtensions",
)
@pytest.mark.world(*SIZES)
@given(program=programs("tp_extension", SIZES, smooth=False))
@examples(60)
def test_representable(worlds: Callable[[int], World], program: Program) -> None:
    """Layers and optimizers that only add and multiply small numbers."""
    assert_same_as_alone(worlds, program)


@requirement(
    "TP-GRAD-03",
    "Any model that FSDP over tensor parallelism takes trains on ranks as it does on one device, within what rounding "
    "explains.",
    source="torch/distributed/tensor/parallel/fsdp.py: DTensorExtensions",
)
@pytest.mark.world(*SIZES)
@given(program=programs("tp_extension", SIZES, smooth=True))
@examples(20)
def test_rounded(worlds: Callable[[int], World], program: Program) -> None:
    """Norms, attention, smooth activations, AdamW, clipping."""
    assert_same_as_alone(worlds, program)


@requirement(
    "TP-GRAD-17",
    "Any model whose layers are divided among tensor-parallel ranks and sharded among data-parallel ones, two by two, "
    "trains as it does on one device.",
    source="torch/distributed/tensor/parallel/fsdp.py: DTensorExtensions",
)
@pytest.mark.world(4)
@given(program=programs("tp_extension", (4,)).filter(lambda program: program.layout.two_dimensional))
@examples(20)
def test_two_dimensional(worlds: Callable[[int], World], program: Program) -> None:
    """A plan on a mesh of two dimensions: of programs that are drawn for all sizes, one in thirty."""
    assert_same_as_alone(worlds, program)
