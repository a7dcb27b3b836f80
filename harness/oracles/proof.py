"""A proof that a computation is exact in a dtype for any order of summation, made while it runs once in float64.

Each element of a tensor is a sum of terms, and the proof tracks two facts about them. The *granularity* of a tensor is
a power of two that divides every term. The *magnitude* of an element bounds the sum of the absolute values of its
terms. It is computed by the same operation on absolute values. A partial sum of any terms, in any order, is a multiple
of the granularity and at most the magnitude. So if their quotient fits into the mantissa of a dtype, and both fit into
its range, nothing is rounded.

Linear operations pass both facts on, because ranks may apply them before partial sums are complete: each rank may
accumulate gradients, scale them, or add them to a momentum before they are reduced. Operations that are not linear
(relu, max) get whole values on ranks, too, so the facts start anew from their results. They also start anew when a
:class:`torch.nn.Parameter` is changed in place, because an optimizer's step takes whole gradients.

Fused multiply-add is covered, and so are sums that are kept in a wider dtype and rounded at the end, because nothing is
rounded. The proof does not cover:

- the sign of a zero. Whether a sum that vanishes is 0.0 or -0.0 depends on the order, and on how a kernel starts its
  sum. It changes no other value as long as nothing divides by it. Compare results after adding 0.0.
- algorithms that sum other terms than the products: Winograd and FFT convolution, Strassen.
- steps on gradients that ranks have not reduced yet, and anything else that ranks compute beyond the watched
  computation, except that they multiply by a number up to ``factor`` and divide by it again.
- hardware that computes with other numbers than those of the dtype (TF32, or bfloat16 instead of float32).
- data that is written without an aten operation (by NumPy or a custom kernel).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from harness.oracles.operators import OPERATORS, followed
from harness.oracles.proof_rules import ENDLESS, RULES, Terms, Unproven, exponent_of, flattened

aten = torch.ops.aten

_BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
_NOT_LOOKED_AT = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_MOST_SAID = 20


class Exactness(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own is not typed
    """A mode that watches a computation in float64 and proves that it is exact in ``dtype`` for any order of summation.

    Enter it once, around the whole run on a single device, after modules and data have been created: drawing random
    numbers is not proven. A second block starts anew from the values of its tensors. Parameters and data must be
    representable in ``dtype`` when an operation first uses them (a view is not a use). Integers and booleans are not
    checked.

    ``factor``: the largest whole number by which ranks multiply and divide again (a world size). A power of two takes
    bits of the range and none of the mantissa.
    ``stop``: whether to raise :class:`NotExact` at the first operation that is not shown to be exact.

    Errors: ValueError for a dtype other than float64, float32, float16 and bfloat16, and for a factor below 1.
    """

    def __init__(self, dtype: torch.dtype, *, factor: int = 1, stop: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        if dtype not in _BITS:
            raise ValueError(f"dtype must be one of {', '.join(map(str, _BITS))}, not {dtype}")
        if factor < 1:
            raise ValueError(f"factor must be 1 or more, not {factor}")
        self._dtype, self._stop = dtype, stop
        self._beyond = (factor - 1).bit_length()
        self._spare = self._beyond if factor & (factor - 1) else 0
        self._name, self._bits = str(dtype).removeprefix("torch."), _BITS[dtype]
        info = torch.finfo(dtype)
        self._most = float(info.max)
        # Subnormal numbers count only in float16, where they are a good part of the range. In other dtypes, hardware
        # may flush them to zero.
        self._least = -24 if dtype == torch.float16 else round(math.log2(info.tiny))
        self._said: dict[str, str] = {}
        self._watched: dict[int, _Watched] = {}

    @property
    def unproven(self) -> list[str]:
        """A sentence for each kind of operation that was not shown to be exact, in order; at most 20."""
        return list(self._said.values())

    @property
    def proven(self) -> bool:
        """Whether everything seen so far is exact in any order of summation."""
        return not self._said

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._watched.clear()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        known = _operation(func)
        if known.ignored:
            return func(*args, **kwargs)
        name, base = known.name, known.base
        plans: list[Terms | None] = []
        why = ""
        try:
            if func.namespace != "aten":
                raise Unproven("not an operation of aten")
            if known.listed:
                for each, given, named in _single(func, name, args, kwargs):
                    plans += self._plan(each, _operation(each), given, named) or [None]
            else:
                plans = self._plan(func, known, args, kwargs) or [None]
        except Unproven as reason:
            why = str(reason)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:  # a mistake of the caller is raised below
            why = f"could not be repeated on absolute values ({str(error).splitlines()[0]})"
        result = func(*args, **kwargs)
        changed = args[0] if known.in_place else kwargs.get("out", result)
        outputs = flattened([changed])
        if why:
            plans = []
            if any(x.dtype not in _NOT_LOOKED_AT for x in _tensors((outputs, args, *kwargs.values()))):
                self._say(f"{func.namespace}.{name}", why)
        for i, output in enumerate(outputs):
            if isinstance(output, torch.Tensor) and output.dtype not in _NOT_LOOKED_AT and output.numel():
                self._note(name, output, plans[i] if i < len(plans) else None, forget=base in _EMPTY)
        return result

    # What an operation does to magnitudes and granularity.

    def _plan(self, func: Any, known: _Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Terms | None]:
        """Compute the facts of each result; None, or no entry, means that they start anew from the result's values.

        Errors: Unproven, with the reason.
        """
        base = known.base
        if base in _EMPTY:
            return []
        rule = RULES.get(base)
        if (rule is None and base not in _EXACT) or func.__name__ in _OTHERWISE:
            raise Unproven("not known to be a sum of products")
        numbers, tensors, floats, exponent = 0, 0, 0, ENDLESS
        for x in flattened((*args, *kwargs.values())):
            if isinstance(x, torch.Tensor):
                tensors += 1
                if x.dtype not in _NOT_LOOKED_AT:
                    floats += 1
                    exponent = min(exponent, self._look(x).exponent)
            elif isinstance(x, float):
                numbers += 1
                exponent = min(exponent, self._scalar(x))
        if base in _WHOLE:
            return []
        if not floats:
            if rule is not None and (base in ("div", "mean") or kwargs.get("dtype") or numbers):
                raise Unproven("makes floating-point numbers of whole ones")
            return []
        changed = args[0] if known.in_place else kwargs.get("out")
        if isinstance(changed, torch.Tensor) and not changed.dtype.is_floating_point:
            return []
        if rule is not None:
            return rule(self, func, args, kwargs)
        if base == "copy" and not args[1].dtype.is_floating_point:
            return []
        if base == "_to_copy" and (
            not args[0].dtype.is_floating_point or kwargs.get("dtype", args[0].dtype) != torch.float64
        ):
            return []
        terms = self.mirror(func, args, kwargs)
        if base in _TAKE_WHOLE_NUMBERS or (base in ("cat", "stack", "where") and floats < tensors):
            exponent = min(exponent, 0)
        # Numbers among the arguments may be negative.
        return [(x.abs_() if isinstance(x, torch.Tensor) else x, exponent) for x in terms]

    def mirror(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """Execute the same operation on magnitudes, in place if it is in place."""
        result = func(*map(self._shadow, args), **{k: self._shadow(v) for k, v in kwargs.items()})
        return list(result) if isinstance(result, (list, tuple)) else [result]

    def _shadow(self, x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return self._look(x).of(x) if x.dtype == torch.float64 else x
        if isinstance(x, (list, tuple)) and any(isinstance(e, torch.Tensor) for e in x):
            return [self._shadow(e) for e in x]
        return x

    def terms(self, x: torch.Tensor | float) -> Terms:
        """Return the magnitude and the exponent of an operand, which is a tensor of any dtype or a number."""
        if not isinstance(x, torch.Tensor):
            return abs(x), exponent_of(float(x))  # type: ignore[return-value]  # wrapped by the operation
        if x.dtype == torch.float64:
            seen = self._look(x)
            return seen.of(x), seen.exponent
        return (x if x.dtype == torch.bool else x.abs()), 0

    def require(self, magnitude: torch.Tensor, exponent: int, factor: float = 1.0) -> None:
        """Require that sums up to ``magnitude`` times ``factor`` of multiples of ``2**exponent`` are representable.

        Errors: Unproven, which says what is missing.
        """
        top = float(magnitude.amax()) * factor if magnitude.numel() else 0.0
        if top == 0:
            return
        if not math.isfinite(top):
            raise Unproven("infinity, NaN, or sums beyond float64")
        half, above = math.frexp(top)
        # A power of two needs one bit less, except in float64, where it may be a larger number that was rounded.
        bits = above - exponent - (half == 0.5 and self._bits < 53) + self._spare
        if bits > self._bits:
            spare = f", {self._spare} of them spare" if self._spare else ""
            raise Unproven(f"partial sums need {bits} bits{spare}, {self._name} has {self._bits}")
        if math.ldexp(top, self._beyond) > self._most:
            beyond = f", and 2^{self._beyond} times that on ranks" if self._beyond else ""
            raise Unproven(f"partial sums may reach {top:g}{beyond}, {self._name} {self._most:g}")
        if exponent - self._beyond < self._least:
            raise Unproven(f"terms are multiples of 2^{exponent}, {self._name} goes down to 2^{self._least}")

    # The facts about every storage.

    def _look(self, x: torch.Tensor) -> _Watched:
        """Return the facts about a float64 tensor; those of a new one come from its whole storage.

        Errors: Unproven for another dtype.
        """
        if x.dtype != torch.float64:
            raise Unproven(f"has an operand of {str(x.dtype).removeprefix('torch.')} among those of float64")
        storage = x.untyped_storage()
        seen = self._watched.get(storage.data_ptr()) if x.numel() else _NOTHING
        if seen is None:
            values = x.detach().as_strided((storage.nbytes() // 8,), (1,), 0)
            self._representable("data that enters", x.detach())
            seen = self._watched[storage.data_ptr()] = _Watched(storage, values.abs(), _granularity(values))
        return seen

    def _note(self, name: str, output: torch.Tensor, terms: Terms | None, *, forget: bool) -> None:
        """Keep the facts about a result, which lies in an operand's storage if the operation was in place."""
        if output.dtype != torch.float64:
            return self._say(f"aten.{name}", f"gives {str(output.dtype).removeprefix('torch.')}, not float64")
        storage = output.untyped_storage()
        seen = self._watched.get(storage.data_ptr())
        if forget and seen is None:
            flat = torch.zeros(storage.nbytes() // 8, dtype=torch.float64)
            self._watched[storage.data_ptr()] = _Watched(storage, flat, ENDLESS)
            return None
        if terms is None or isinstance(output, nn.Parameter):
            values = output.detach()
            self._representable(f"aten.{name}", values)
            terms = values.abs(), _granularity(values)
        magnitude, exponent = terms
        if seen is None:
            size = storage.nbytes() // 8
            if size == magnitude.numel() and output.is_contiguous() and magnitude.is_contiguous():
                self._watched[storage.data_ptr()] = _Watched(storage, magnitude.view(-1), exponent)
                return None
            seen = _Watched(storage, torch.zeros(size, dtype=torch.float64), ENDLESS)
            self._watched[storage.data_ptr()] = seen
        mine = seen.of(output)
        if mine.data_ptr() != magnitude.data_ptr():
            mine.copy_(magnitude)
        seen.exponent = exponent if output.numel() == seen.magnitude.numel() else min(seen.exponent, exponent)
        return None

    def _representable(self, what: str, values: torch.Tensor) -> None:
        if torch.equal(values.to(self._dtype).double(), values) and math.isfinite(float(values.sum())):
            return
        if self._dtype == torch.float64:
            same = values.isfinite()
        else:
            same = (values.to(self._dtype).double() == values) & values.isfinite()
        if not bool(same.all()):
            self._say(what, f"{values[~same][0].item()!r} is not a number of {self._name}")

    def _scalar(self, x: float) -> int:
        """Return the exponent of a number's granularity.  Errors: Unproven for a number that the dtype lacks."""
        _, above = math.frexp(x)
        exponent = exponent_of(x)
        if not math.isfinite(x) or abs(x) > self._most or (x and (above - exponent > self._bits)):
            raise Unproven(f"takes {x!r}, which is not a number of {self._name}")
        if x and exponent < self._least:
            raise Unproven(f"takes {x!r}, which is too small for {self._name}")
        return exponent

    def _say(self, what: str, why: str) -> None:
        if len(self._said) < _MOST_SAID:
            self._said.setdefault(what, f"{what}: {why}"[:200])
        if self._stop:
            raise NotExact(self._said[what])


class NotExact(Exception):
    """The error that stops a computation that is not shown to be exact; it says why."""


class _Watched:
    """The facts about a float64 storage, which is kept alive so that its address is not reused."""

    __slots__ = ("exponent", "magnitude", "storage")

    def __init__(self, storage: torch.UntypedStorage | None, magnitude: torch.Tensor, exponent: int) -> None:
        self.storage, self.magnitude, self.exponent = storage, magnitude, exponent

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """Return the magnitudes of a tensor in this storage."""
        return self.magnitude.as_strided(x.size(), x.stride(), x.storage_offset()) if x.numel() else x.detach()


_NOTHING = _Watched(None, torch.zeros(0, dtype=torch.float64), ENDLESS)


def _granularity(x: torch.Tensor) -> int:
    """Return the exponent of the largest power of two that divides every element of float64[...]."""
    if not x.numel():
        return ENDLESS
    mantissa, exponent = np.frexp(x.reshape(-1).numpy())  # for so few elements, it takes a third of torch's time
    with np.errstate(invalid="ignore"):  # infinity and NaN are reported elsewhere
        whole = (mantissa * 2.0**53).astype(np.int64)
    lowest = np.frexp((whole & -whole).astype(np.float64))[1]  # k + 1 for 2**k, and 0 for zero
    exponents = np.where(lowest > 0, exponent + lowest, ENDLESS)
    return min(int(exponents.min()) - 54, ENDLESS)


def _tensors(x: Sequence[Any]) -> list[torch.Tensor]:
    return [each for each in flattened(x) if isinstance(each, torch.Tensor)]


class _Operation(NamedTuple):
    """What the proof needs to know about an operation."""

    name: str
    """Without the overload."""
    base: str
    """The name without the trailing underscore of operations in place."""
    in_place: bool
    listed: bool
    """Whether it is one of the _foreach operations."""
    ignored: bool
    """Whether it computes nothing: a view, or an operation of the profiler."""


@functools.cache
def _operation(func: Any) -> _Operation:
    name = str(func.__name__).partition(".")[0]
    base = name.removesuffix("_") if not name.endswith("__") else name
    view = func.namespace == "aten" and base in _VIEWS and func.__name__ not in _OTHERWISE
    return _Operation(
        name, base, name.endswith("_"), name.startswith("_foreach_"), view or func.namespace == "profiler"
    )


def _single(
    func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """Split a _foreach operation into an operation for each element.  Errors: Unproven."""
    one, kind = name.removeprefix("_foreach_"), func.__name__.split(".")[1]
    base = one.removesuffix("_")
    overload = {"add": "Tensor", "sub": "Tensor", "mul": "Tensor", "div": "Tensor"}.get(base, "default")
    if base not in ("add", "sub", "mul", "div", "neg", "zero", "copy", "addcmul", "clamp_min", "clamp_max"):
        raise Unproven("not known to be a sum of products")
    if base == "addcmul":
        if kind != "Scalar":
            raise Unproven("has a value for each tensor")
        args, kwargs = args[:3], {"value": args[3] if len(args) > 3 else kwargs.get("value", 1)}
    each = getattr(getattr(aten, one), overload)
    for i in range(len(args[0])):
        yield each, tuple(x[i] if isinstance(x, (list, tuple)) else x for x in args), kwargs


_EMPTY, _VIEWS, _WHOLE = followed("empty"), followed("view"), followed("whole")
_EXACT = _VIEWS | _WHOLE | followed("moves")
_TAKE_WHOLE_NUMBERS = frozenset(name for name, op in OPERATORS.items() if op.takes_numbers)
_OTHERWISE = {
    "mm.dtype", "bmm.dtype", "addmm.dtype", "baddbmm.dtype", "view.dtype", "round.decimals", "scatter.reduce",
    "scatter.value_reduce", "scatter_.reduce", "scatter_.value_reduce",
}  # fmt: skip
"""Overloads that do something else than the other overloads of their name."""
