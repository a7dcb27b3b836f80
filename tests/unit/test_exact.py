"""The exact oracle: what has the same bits is the same, and nothing else is."""

from __future__ import annotations

import math

import pytest
import torch

from harness.oracles.exact import Mismatch, assert_same, assert_same_all, difference, identical

DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
)
NUMBERS = torch.tensor([[1.0, 0.0, 3.0], [0.0, 5.0, 6.0]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("strided", [False, True])
def test_one_element_is_enough(dtype: torch.dtype, strided: bool) -> None:
    """The same bits are no difference, whatever the strides; one other element is, and is named."""
    one = NUMBERS.to(dtype)
    other = one.t().contiguous().t() if strided else one.clone()
    assert difference(one, other, "x") == ""
    other[1, 2] = 0
    assert not identical(one, other)
    said = difference(one, other, "x")
    assert said.startswith("x: 1 of 6 elements differ\n  [1, 2] expected")


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ([0.0], [-0.0], False),
        ([math.nan], [math.nan], True),
        ([math.nan], [1.0], False),
        ([math.inf], [-math.inf], False),
        ([], [], True),
    ],
)
def test_bits(one: list[float], other: list[float], same: bool) -> None:
    """Zeros have signs; of NaN there is one."""
    assert (difference(torch.tensor(one), torch.tensor(other), "x") == "") == same


def test_not_a_number_has_many_bits() -> None:
    """Two kinds of NaN are the same, though their bits are not."""
    one = torch.tensor([math.nan])
    other = (one.view(torch.int32) + 1).view(torch.float32)
    assert not identical(one, other)
    assert difference(one, other, "x") == ""


def test_lazily_conjugated_and_negated() -> None:
    """Bits that a tensor only promises are those that count."""
    one = torch.tensor([1 + 2j])
    assert difference(one.conj(), torch.tensor([1 - 2j]), "x") == ""
    assert difference(one.conj(), one, "x").startswith("x: 1 of 1")
    assert difference(one.conj().imag, torch.tensor([-2.0]), "x") == ""
    assert difference(one.conj().imag, torch.tensor([2.0]), "x").startswith("x: 1 of 1")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (torch.zeros(3), r"x: expected float32\[2\], found float32\[3\]"),
        (torch.zeros(2, 1), r"x: expected float32\[2\], found float32\[2, 1\]"),
        (torch.zeros(2, dtype=torch.int32), r"x: expected float32\[2\], found int32\[2\]"),
        (torch.tensor([0.0, 1.0]), r"x: 1 of 2 elements differ\n  \[1\] expected 0.0, found 1.0"),
    ],
)
def test_mismatch(other: torch.Tensor, message: str) -> None:
    """Another shape or dtype is a difference even where all bits are zero."""
    assert not identical(torch.zeros(2), other)
    with pytest.raises(Mismatch, match=message):
        assert_same(torch.zeros(2), other, "x")


def test_names() -> None:
    """The same names in the same order."""
    zero = torch.zeros(1)
    with pytest.raises(Mismatch, match=r"names differ: missing \['b'\], unexpected \['c'\]"):
        assert_same_all({"a": zero, "b": zero}, {"a": zero, "c": zero}, "gradient of")
    with pytest.raises(Mismatch, match="gradient of 'a': 1 of 1"):
        assert_same_all({"a": zero}, {"a": zero + 1}, "gradient of")
