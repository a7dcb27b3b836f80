"""The rules of :mod:`harness.oracles.proof`: what operations that add or multiply do to magnitudes and granularity.

A rule computes the facts of each result from those of the operands, and requires that no partial sum is rounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from harness.oracles.operators import OPERATORS, Proof

aten = torch.ops.aten

ENDLESS = 1 << 20
"""The exponent of the granularity of zero, which every power of two divides."""

Terms = tuple[torch.Tensor, int]
"""Magnitudes, and the exponent of the granularity."""


class Watch(Protocol):
    """What a rule needs of the proof that it is part of."""

    def terms(self, x: torch.Tensor | float) -> Terms:
        """Return the magnitude and the exponent of an operand, which is a tensor of any dtype or a number."""

    def mirror(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """Execute the same operation on magnitudes, in place if it is in place."""

    def require(self, magnitude: torch.Tensor, exponent: int, factor: float = 1.0) -> None:
        """Require that sums up to ``magnitude`` times ``factor`` of multiples of ``2**exponent`` are representable.

        Errors: Unproven, which says what is missing.
        """


Rule = Callable[[Watch, Any, tuple[Any, ...], dict[str, Any]], list[Terms | None]]
"""Takes the watch, the operation and its arguments; returns the facts of each result, or None to start anew from the
result's values. Errors: Unproven, with the reason."""


class Unproven(Exception):
    """The error for an operation that is not shown to be exact; it says why."""


def exponent_of(x: float) -> int:
    """Return the exponent of the largest power of two that divides a number."""
    if not x or not math.isfinite(x):
        return ENDLESS
    above, below = x.as_integer_ratio()
    return (above & -above).bit_length() - below.bit_length()


def flattened(x: Sequence[Any]) -> list[Any]:
    """Flatten nested lists and tuples, in order."""
    items: list[Any] = []
    for each in x:
        if isinstance(each, (list, tuple)):
            items += flattened(each)
        else:
            items.append(each)
    return items


def _product(watch: Watch, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Terms | None]:
    """Follow mm, bmm, mv, dot and mul: a product of the first two operands."""
    (a, i), (b, j) = watch.terms(args[0]), watch.terms(args[1])
    magnitude = func(a, b, **_out(watch, kwargs))
    watch.require(magnitude, i + j)
    return [(magnitude, i + j)]


def _added(watch: Watch, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Terms | None]:
    """Follow add, sub and rsub, with their ``alpha``."""
    given, name = {**kwargs}, func.__name__
    alpha = given.pop("alpha", args[2] if len(args) > 2 else 1)
    (a, i), (b, j) = watch.terms(args[0]), watch.terms(args[1])
    if name.startswith("rsub"):
        a, b, i, j, alpha = b, a * abs(alpha), j, i + exponent_of(float(alpha)), 1
        a, b, i, j, func = b, a, j, i, aten.add.Tensor
    elif name.startswith("sub"):
        operation, _, overload = name.partition(".")
        func = getattr(getattr(aten, operation.replace("sub", "add")), overload)
    exponent = min(i, j + exponent_of(float(alpha)))
    magnitude = func(a, b, alpha=abs(alpha), **_out(watch, given))
    watch.require(magnitude, exponent)
    return [(magnitude, exponent)]


def _product_added(watch: Watch, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Terms | None]:
    """Follow addmm, its variants and addcmul: beta times the first plus alpha (or value) times the others' product."""
    given = {**kwargs}
    beta = given.pop("beta", args[3] if len(args) > 3 else 1)
    alpha = given.pop("value", given.pop("alpha", args[4] if len(args) > 4 else 1))
    factors = {"value": abs(alpha)} if "addcmul" in func.__name__ else {"beta": abs(beta), "alpha": abs(alpha)}
    (c, k), (a, i), (b, j) = map(watch.terms, args[:3])
    exponent = min(k + exponent_of(float(beta)), i + j + exponent_of(float(alpha)))
    magnitude = func(c, a, b, **factors, **_out(watch, given))
    watch.require(magnitude, exponent)
    if 0 < abs(alpha) != 1:  # the product may be summed before it is scaled
        watch.require(magnitude, min(exponent, i + j), max(1.0, 1 / abs(alpha)))
    return [(magnitude, exponent)]


def _summed(watch: Watch, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Terms | None]:
    """Follow sum, cumsum, and operations that sum while they move: linear in all their float64 operands."""
    if any(x is True for x in args[4:5]) and "embedding" in func.__name__:
        raise Unproven("divides by how often an index occurs")
    exponent = min([watch.terms(x)[1] for x in _floats(args)], default=ENDLESS)
    terms = watch.mirror(func, args, kwargs)
    watch.require(terms[0], exponent)
    return [(terms[0], exponent)]


def _scattered(watch: Watch, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Terms | None]:
    """Follow index_add with its ``alpha``."""
    alpha = kwargs.get("alpha", 1)
    exponent = min(watch.terms(args[0])[1], watch.terms(args[3])[1] + exponent_of(float(alpha)))
    terms = watch.mirror(func, args, {**kwargs, "alpha": abs(alpha)})
    watch.require(terms[0], exponent)
    return [(terms[0], exponent)]


def _averaged(watch: Watch, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Terms | None]:
    (magnitude,) = watch.mirror(func, args, kwargs)
    count = args[0].numel() // max(1, magnitude.numel())
    if count < 1 or count & (count - 1):
        raise Unproven(f"divides by {count}, which is not a power of two")
    exponent = watch.terms(args[0])[1]
    watch.require(magnitude, exponent, float(count))
    exponent -= count.bit_length() - 1
    watch.require(magnitude, exponent)
    return [(magnitude, exponent)]


def _divided(watch: Watch, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Terms | None]:
    """Follow a division by powers of two."""
    if kwargs.get("rounding_mode") is not None:
        raise Unproven("rounds")
    by = torch.as_tensor(args[1], dtype=torch.float64).detach().abs()
    half, above = torch.frexp(by)
    if not bool((half == 0.5).all()):
        raise Unproven(f"divides by {by[half != 0.5].reshape(-1)[0].item():g}, which is not a power of two")
    magnitude, exponent = watch.terms(args[0])
    magnitude = func(magnitude, by if isinstance(args[1], torch.Tensor) else abs(args[1]), **_out(watch, kwargs))
    exponent -= int(above.amax()) - 1 if by.numel() else 0
    watch.require(magnitude, exponent)
    return [(magnitude, exponent)]


def _power(watch: Watch, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Terms | None]:
    if not isinstance(args[1], (int, float)) or args[1] not in (1, 2, 3):
        raise Unproven("a power other than 1, 2 and 3")
    magnitude, exponent = watch.terms(args[0])
    magnitude, exponent = func(magnitude, args[1], **_out(watch, kwargs)), exponent * int(args[1])
    watch.require(magnitude, exponent)
    return [(magnitude, exponent)]


def _negated(watch: Watch, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Terms | None]:
    magnitude, exponent = watch.terms(args[0])
    return [(magnitude.clone(), exponent)]


def _masked(watch: Watch, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Terms | None]:
    """Follow threshold_backward and max_pool2d_with_indices_backward, which are linear in the first operand.

    The other operands select elements.
    """
    magnitude, exponent = watch.terms(args[0])
    named = {k: watch.terms(v)[0] if k in ("grad_input", "out") else v for k, v in kwargs.items()}
    magnitude = func(magnitude, *args[1:], **named)
    watch.require(magnitude, exponent)
    return [(magnitude, exponent)]


def _convolved(watch: Watch, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Terms | None]:
    (a, i), (b, j) = watch.terms(args[0]), watch.terms(args[1])
    c, k = watch.terms(args[2]) if args[2] is not None else (None, ENDLESS)
    magnitude = func(a, b, c, *args[3:], **_out(watch, kwargs))
    watch.require(magnitude, min(i + j, k))
    return [(magnitude, min(i + j, k))]


def _convolved_back(watch: Watch, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Terms | None]:
    if any(isinstance(x, torch.Tensor) for x in kwargs.values()):
        raise Unproven("writes to results given")
    (g, h), (a, i), (b, j) = map(watch.terms, args[:3])
    terms: list[Terms | None] = []
    for magnitude, exponent in zip(func(g, a, b, *args[3:], **kwargs), (h + j, h + i, h), strict=True):
        if magnitude is not None:
            watch.require(magnitude, exponent)
        terms.append((magnitude, exponent))
    return terms


def _put(watch: Watch, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Terms | None]:
    """Follow index_put, which writes or adds.  Writing to duplicate indices is a race, which is not detected."""
    exponent = min(watch.terms(args[0])[1], watch.terms(args[2])[1])
    (magnitude,) = watch.mirror(func, args, kwargs)
    if kwargs.get("accumulate", args[3] if len(args) > 3 else False):
        watch.require(magnitude, exponent)
    return [(magnitude, exponent)]


def _floats(args: Sequence[Any]) -> list[torch.Tensor]:
    return [x for x in flattened(args) if isinstance(x, torch.Tensor) and x.dtype == torch.float64]


def _out(watch: Watch, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of an operation on magnitudes: only ``out``, which says where its result goes.

    Errors: Unproven for other keyword arguments.
    """
    if any(v is not None for k, v in kwargs.items() if k not in ("out", "rounding_mode")):
        raise Unproven(f"takes {', '.join(sorted(kwargs))}")
    return {"out": watch.terms(kwargs["out"])[0]} if "out" in kwargs else {}


FOLLOWED: dict[Proof, Rule] = {
    "product": _product,
    "added": _added,
    "product_added": _product_added,
    "summed": _summed,
    "scattered": _scattered,
    "averaged": _averaged,
    "divided": _divided,
    "power": _power,
    "negated": _negated,
    "masked": _masked,
    "convolved": _convolved,
    "convolved_back": _convolved_back,
    "put": _put,
}
"""The rules, by their names in the table of operators."""

RULES = {name: FOLLOWED[op.proof] for name, op in OPERATORS.items() if op.proof in FOLLOWED}
"""The rule of each operation that adds or multiplies, by the operation's name."""
