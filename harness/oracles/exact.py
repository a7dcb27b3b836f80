"""The exact oracle: data whose sums and products are all representable, and a comparison without a tolerance.

With such data, any order of operations gives the same bits.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_MOST_SHOWN = 5
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes, by their size in bytes."""


class Mismatch(AssertionError):
    """The error for two tensors that must be equal bit for bit and are not; it says where and how they differ."""


@dataclass(frozen=True)
class Element:
    """An element that differs between two tensors."""

    index: tuple[int, ...]
    expected: object
    found: object
    allowed: float | None = None
    """The largest absolute difference that is allowed; None if bits are compared."""


@dataclass(frozen=True)
class Difference:
    """The difference between two tensors: in dtype or shape, or in elements."""

    expected: str
    """Dtype and shape, such as ``float32[4, 3]``."""
    found: str
    wrong: int = 0
    """The number of elements that differ; 0 if the dtype or the shape differs."""
    of: int = 0
    """The number of elements of each tensor."""
    elements: tuple[Element, ...] = ()
    """The first elements that differ."""
    unknown: int = 0
    """The number of elements whose tolerance exceeds their own magnitude."""

    def __str__(self) -> str:
        if not self.wrong:
            return f"expected {self.expected}, found {self.found}"
        more = self.wrong - len(self.elements)
        if any(element.allowed is not None for element in self.elements):
            note = f" ({self.unknown} are allowed more than their own size)" if self.unknown else ""
            shown = "; ".join([*map(_bounded, self.elements), *([f"and {more} more"] if more else [])])
            return f"{self.wrong} of {self.of} elements differ by more than rounding explains{note}: {shown}"
        lines = [*map(_exact, self.elements), *([f"and {more} more"] if more else [])]
        return "\n  ".join([f"{self.wrong} of {self.of} elements differ", *lines])


def _exact(element: Element) -> str:
    return f"{list(element.index)} expected {element.expected!r}, found {element.found!r}"


def _bounded(element: Element) -> str:
    return (
        f"{list(element.index)} expected {element.expected:.9g}, found {element.found:.9g}, "
        f"allowed ±{element.allowed:.2g}"
    )


def dyadic(
    *shape: int, key: object, dtype: torch.dtype = torch.float64, span: int = 4, denominator: int = 4
) -> torch.Tensor:
    """Draw small dyadic rationals: whole numbers from -``span`` to ``span`` without zero, over ``denominator``.

    The same ``key`` gives the same values on every rank and every machine; another key gives others.  Returns a
    tensor of the given shape and dtype on the CPU.
    Errors: ValueError if ``denominator`` is not a power of two.
    """
    if denominator < 1 or denominator & (denominator - 1):
        raise ValueError(f"denominator must be a power of two, not {denominator}")
    generator = torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))
    numbers = torch.randint(1, span + 1, shape, generator=generator, device="cpu")
    signs = torch.randint(0, 2, shape, generator=generator, device="cpu") * 2 - 1
    return (numbers * signs / denominator).to(dtype)


def assert_same(expected: torch.Tensor, actual: torch.Tensor, what: str) -> None:
    """Require equal dtype, shape and bits (a NaN equals any NaN; 0.0 differs from -0.0).

    Errors: :class:`Mismatch`, which names ``what`` and the first elements that differ.
    """
    __tracebackhide__ = True
    problem = difference(expected, actual, what)
    if problem:
        raise Mismatch(problem)


def identical(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Check quickly whether two tensors on the CPU have the same dtype, shape and bits.

    False means nothing for complex128, since no integer dtype has its size, and for NaN, which has many bit patterns.
    """
    whole = _WHOLE.get(one.itemsize)
    return (
        whole is not None
        and one.dtype == other.dtype
        and one.shape == other.shape
        and torch.equal(one.view(whole), other.view(whole))
    )


def compare(expected: torch.Tensor, actual: torch.Tensor) -> Difference | None:
    """Return how two tensors differ, as :func:`assert_same` compares them; None if they do not."""
    if expected.dtype != actual.dtype or expected.shape != actual.shape:
        return Difference(kind(expected), kind(actual))
    a, b = (t.detach().cpu().resolve_conj().resolve_neg().contiguous() for t in (expected, actual))
    if identical(a, b):
        return None
    same = (_bits(a) == _bits(b)).reshape(a.numel(), -1).all(dim=1) if a.numel() else torch.ones(0, dtype=torch.bool)
    if a.dtype.is_floating_point or a.dtype.is_complex:
        same |= (torch.isnan(a) & torch.isnan(b)).reshape(-1)
    wrong = (~same).nonzero().reshape(-1)
    if not wrong.numel():
        return None
    elements = tuple(
        Element(_index(int(i), a.shape), a.reshape(-1)[i].item(), b.reshape(-1)[i].item()) for i in wrong[:_MOST_SHOWN]
    )
    return Difference(kind(expected), kind(actual), wrong.numel(), a.numel(), elements)


def difference(expected: torch.Tensor, actual: torch.Tensor, what: str) -> str:
    """Describe how two tensors differ, as :func:`assert_same` does; empty if they do not."""
    mismatch = compare(expected, actual)
    return "" if mismatch is None else f"{what}: {mismatch}"


def assert_same_all(expected: Mapping[str, torch.Tensor], actual: Mapping[str, torch.Tensor], what: str) -> None:
    """Require the same names in the same order, and the same tensor under each name.  Errors: :class:`Mismatch`."""
    __tracebackhide__ = True
    if list(expected) != list(actual):
        missing = [n for n in expected if n not in actual]
        extra = [n for n in actual if n not in expected]
        raise Mismatch(f"{what}: names differ: missing {missing}, unexpected {extra}, order {list(actual)}")
    for name in expected:
        assert_same(expected[name], actual[name], f"{what} {name!r}")


def _bits(t: torch.Tensor) -> torch.Tensor:
    if t.dtype == torch.bool:
        return t.reshape(-1).to(torch.uint8)
    # A tensor with one element is contiguous whatever its stride, but view() still checks the stride.
    return t.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)


def kind(t: torch.Tensor) -> str:
    """Describe a tensor's dtype and shape, as in ``float32[4, 3]``."""
    return kind_of(t.dtype, t.shape)


def kind_of(dtype: torch.dtype, shape: Sequence[int]) -> str:
    """Describe a dtype and a shape, as in ``float32[4, 3]``."""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def _index(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    index: list[Any] = []
    for size in reversed(shape):
        flat, at = divmod(flat, size)
        index.insert(0, at)
    return tuple(index)
