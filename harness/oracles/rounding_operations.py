"""The operations that :mod:`harness.oracles.rounding` records: their kinds, and how they are executed again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from harness.oracles.operators import OPERATORS, Operator

_UNKNOWN = Operator()
_RANDOM = ("rand", "bernoulli", "normal", "uniform", "exponential", "multinomial", "log_normal", "geometric", "cauchy")


class Operation(NamedTuple):
    """What the tape needs to know about an operation."""

    kind: str
    """view, exact, pointwise, reduction, random, made (no tensors as inputs), list (a _foreach operation), read
    (returns no tensor) or unknown."""
    name: str
    """The name without the trailing underscore of operations that write to their first argument."""
    writes: bool


@cache
def operation_of(func: Any) -> Operation:
    """Return what the tape needs to know about an operation, from its schema, its tags and the table of operators."""
    schema = func._schema
    full = schema.name.removeprefix("aten::")
    name = full.removesuffix("_")
    writes = [i for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
    if full.startswith("_foreach_"):
        return Operation("list", name.removeprefix("_foreach_") + full[len(name) :], bool(writes))
    if not any("Tensor" in str(r.type) for r in schema.returns):
        return Operation("unknown" if writes else "read", name, bool(writes))
    tensors_in = any("Tensor" in str(a.type) for a in schema.arguments)
    if writes and (writes != [0] or torch.Tag.inplace_view in func.tags or name in ("set", "resize", "resize_as")):
        kind = "unknown"
    elif not tensors_in:
        kind = "made"
    elif torch.Tag.nondeterministic_seeded in func.tags and name.startswith(_RANDOM):
        kind = "random"
    elif not writes and any(r.alias_info is not None for r in schema.returns):
        kind = "view"
    elif not OPERATORS.get(name, _UNKNOWN).rounds:
        kind = "exact"
    else:
        kind = "pointwise" if torch.Tag.pointwise in func.tags else "reduction"
    return Operation(kind, name, bool(writes))


def without_writing(func: Any, name: str) -> Callable[..., Any]:
    """Return an operation whose result is what ``func`` writes to its first argument."""
    if name == "copy":
        return lambda target, source, non_blocking=False: source.to(target.dtype).expand(target.shape)
    if name == "zero":
        return torch.zeros_like
    # vmap has no rule for these, and would execute them one sample at a time.
    if name == "lerp":
        return lambda start, end, weight: start + weight * (end - start)
    if name == "addcdiv":
        return lambda start, a, b, value=1: torch.add(start, a / b, alpha=value)
    packet = getattr(torch.ops.aten, name)
    return getattr(packet, func._overloadname)  # type: ignore[no-any-return]


def one_by_one(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Execute a _foreach operation as one operation on each tensor."""
    call = getattr(torch.ops.aten, "linalg_vector_norm" if name == "norm" else name)
    count = len(args[0])
    if name.removesuffix("_") in ("addcmul", "addcdiv") and len(args) > 3:  # single ones take it by name alone
        args, kwargs = args[:3], {**kwargs, "value": args[3]}

    def item(value: Any, i: int) -> Any:
        return value[i] if isinstance(value, (list, tuple)) and len(value) == count else value

    results = [
        call(*[item(a, i) for a in args], **{key: item(value, i) for key, value in kwargs.items()})
        for i in range(count)
    ]
    return None if name.endswith("_") else results


def length_of(name: str, args: tuple[Any, ...], results: Sequence[Any]) -> int:
    """Estimate how many terms the sums inside an operation have."""
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    if name in ("mm", "bmm", "addmm", "baddbmm"):
        return int(args[-1 if name in ("mm", "bmm") else 2].shape[-2])
    if name == "convolution":
        return int(args[1].numel() // max(1, args[1].shape[0]))
    most = max((t.numel() for t in tensors), default=1)
    least = min((t.numel() for t in results if isinstance(t, torch.Tensor)), default=1)
    last = max((t.shape[-1] for t in tensors if t.dim()), default=1)
    return max(1, last, most // max(1, least))
