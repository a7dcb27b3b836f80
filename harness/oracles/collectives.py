"""The exact model of collectives: the inputs of every rank, and what it must hold afterwards, bit for bit.

These are pure functions of a :class:`Case` that need no process and no group. ``member`` is a rank in the case's group,
from 0. ``call`` counts the calls of a repeated case. Each call has data of its own, so a call cannot pass with the data
of another one.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import torch

REDUCTIONS = ("SUM", "PRODUCT", "MIN", "MAX", "AVG", "BAND", "BOR", "BXOR", "PREMUL_SUM")
"""Reductions, by their names in ``torch.distributed.ReduceOp``."""

PREMULTIPLIER = 2.0
"""The factor by which PREMUL_SUM multiplies every contribution."""

REDUCING = frozenset({"all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor"})
IN_PLACE = frozenset({"all_reduce", "reduce", "broadcast"})
ROOTED = frozenset({"reduce", "broadcast", "gather", "scatter"})
COLLECTIVES = (
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
)
LAYOUTS = ("contiguous", "offset", "column", "transposed", "expanded", "conjugate", "negative")
"""Layouts of a tensor in memory; see :func:`lay`."""

FORMS = ("sync", "async", "functional", "coalesced")

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)

_SIGNED_SPAN = {
    torch.int8: 25,
    torch.int16: 6_000,
    torch.int32: 1 << 28,
    torch.int64: 1 << 60,
    torch.float16: 400,
    torch.bfloat16: 50,
    torch.float32: 1 << 21,
    torch.float64: 1 << 50,
    torch.complex64: 1 << 21,
    torch.complex128: 1 << 50,
}
"""The sum of five whole numbers up to this size, one from each rank, is representable in the dtype."""


@dataclass(frozen=True)
class Case:
    """A call of a collective, with everything that its result may depend on."""

    collective: str
    op: str = "SUM"
    dtype: torch.dtype = torch.float32
    shape: tuple[int, ...] = (7,)
    """The shape of what one rank sends to another.  If splits are uneven, 0, 1 or 2 rows replace the first extent."""
    layout: str = "contiguous"
    """The layout of inputs, and of tensors that are input and output."""
    out_layout: str = "contiguous"
    group: tuple[int, ...] | None = None
    """Global ranks, as passed to new_group, which sorts them; None for the default group."""
    root: int = 0
    """The root's rank in the group."""
    root_as: str = "global"
    """Whether the root is passed as its ``global`` rank or as its rank in the ``group``."""
    form: str = "sync"
    repeats: int = 1
    uneven: bool = False
    stacked: bool = False
    """Whether all_gather_into_tensor and reduce_scatter_tensor use a new leading dimension of the group's size
    (stacked) rather than a longer first dimension (concatenated)."""
    requires_grad: bool = False

    def __post_init__(self) -> None:
        for name, value, known in (
            ("collective", self.collective, COLLECTIVES),
            ("op", self.op, REDUCTIONS),
            ("layout", self.layout, LAYOUTS),
            ("out_layout", self.out_layout, LAYOUTS[:4]),
            ("form", self.form, FORMS),
            ("root_as", self.root_as, ("global", "group")),
        ):
            if value not in known:
                raise ValueError(f"{name}={value!r}: one of {', '.join(known)}")
        if self.layout == "expanded" and self.collective in IN_PLACE:
            raise ValueError(f"{self.collective} writes into its input, which can't be expanded")

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        words = [f"{self.collective}({kind}{list(self.shape)}"]
        words += [f", {self.op}"] if self.collective in REDUCING else []
        words += [f", root {self.root} ({self.root_as})"] if self.collective in ROOTED else []
        words += [f", group {list(self.group)}"] if self.group is not None else []
        words += [f", input {self.layout}"] if self.layout != "contiguous" else []
        words += [f", output {self.out_layout}"] if self.out_layout != "contiguous" else []
        words += [", uneven"] if self.uneven else []
        words += [", stacked"] if self.stacked else []
        words += [f", {self.form}"] if self.form != "sync" else []
        return "".join(words) + ")"

    def ranks(self, world: int) -> list[int]:
        """Return the global ranks of the group in the group's order, which is ascending because new_group sorts."""
        return list(range(world)) if self.group is None else sorted(self.group)


# values


def _hash(count: int, *key: object) -> torch.Tensor:
    """Return int64[count] of 64 pseudo-random bits each.  The same key gives the same numbers everywhere."""
    seed = zlib.crc32(repr(key).encode())
    x = (torch.arange(count, dtype=torch.int64) + (seed << 20)) * -7046029254386353131
    x = (x ^ ((x >> 29) & 0x7FFFFFFFF)) * -4658895280553007687
    return x ^ ((x >> 32) & 0xFFFFFFFF)


def _patterns(count: int, dtype: torch.dtype, *key: object) -> torch.Tensor:
    """Return dtype[count] of bit patterns.  Neighbors differ, and none is a NaN or an infinity."""
    if dtype == torch.bool:
        return (_hash(count, *key) >> 9) & 1 == 1
    if dtype.is_complex:
        part = torch.float32 if dtype == torch.complex64 else torch.float64
        return _patterns(2 * count, part, *key).view(dtype)
    bits = 8 * dtype.itemsize
    offset = zlib.crc32(repr(key).encode())
    x = (torch.arange(count, dtype=torch.int64) + offset) * 0x9E3779B1
    if bits == 64:
        x = x * -7046029254386353131
    if dtype.is_floating_point:
        x = x & ~(1 << (bits - 2))
    whole = {8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}[bits]
    x = x & ((1 << bits) - 1) if bits < 64 else x
    return x.to(whole).view(dtype)


def _contribution(count: int, dtype: torch.dtype, op: str, size: int, *key: object) -> torch.Tensor:
    """Return dtype[count] of values for which ``op`` over ``size`` ranks is exact in any order."""
    x = _hash(count, op, *key)
    if dtype == torch.bool:  # the value that decides the result is rare, or one rank of five would hardly ever matter
        rare = (x >> 11) & 3 == 0
        return (x >> 11) & 1 == 1 if op == "BXOR" else ~rare if op in ("PRODUCT", "MIN", "BAND") else rare
    if op in ("BAND", "BOR", "BXOR"):
        other = _hash(count, "more", *key)
        return {"BAND": x | other, "BOR": x & other, "BXOR": x}[op].to(dtype)
    if op in ("MIN", "MAX"):
        return _extremes(x, dtype)
    if op == "PRODUCT":
        most = 2 if dtype == torch.int8 else 3
        magnitude = 1 + (x & 0xFFFF) % most
        return (magnitude if dtype == torch.uint8 else magnitude * (1 - 2 * ((x >> 20) & 1))).to(dtype)
    if dtype == torch.uint8:
        return ((x & 0xFFFF) % (20 if op == "PREMUL_SUM" else 50)).to(dtype)
    span = _SIGNED_SPAN[dtype] * 5 // max(size, 5)
    if op == "PREMUL_SUM":
        span //= 2
    if op == "AVG":  # multiples of the size, so that the average is a whole number
        span = max(1, span // size)
    numbers = ((x & (2**62 - 1)) % (2 * span + 1) - span) * (size if op == "AVG" else 1)
    if dtype.is_complex:
        other = (_hash(count, "imaginary", op, *key) & (2**62 - 1)) % (2 * span + 1) - span
        return torch.complex(numbers.double(), other.mul(size if op == "AVG" else 1).double()).to(dtype)
    return numbers.to(dtype)


def _extremes(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return signed values of every magnitude, including -1 and the extremes of the dtype; no zero for floats."""
    if dtype.is_floating_point:
        most = torch.finfo(dtype).max
        values = (((x & 0xFFFF) % 127 + 1) * (1 - 2 * ((x >> 20) & 1))).to(dtype)
        special = torch.tensor([-1.0, most, -most, torch.finfo(dtype).tiny], dtype=dtype)
    else:
        info = torch.iinfo(dtype)
        values = x.to(dtype)
        special = torch.tensor([-1 if info.min else 1, info.max, info.min, 1], dtype=torch.int64).to(dtype)
    return torch.where((x >> 30) % 7 == 0, special[(x >> 40) & 3], values)


def reduce_exactly(op: str, tensors: list[torch.Tensor]) -> torch.Tensor:
    """Reduce tensors of one dtype and shape.

    Booleans are one-bit numbers that saturate: SUM and MAX are *or*, PRODUCT and MIN are *and*.
    Errors: AssertionError if the result is not representable in the dtype, which is a mistake of the model.
    """
    first, dtype = tensors[0], tensors[0].dtype
    if dtype == torch.bool:
        op = {"SUM": "BOR", "MAX": "BOR", "PRODUCT": "BAND", "MIN": "BAND"}.get(op, op)
    pair = {
        "MIN": torch.minimum,
        "MAX": torch.maximum,
        "BAND": torch.bitwise_and,
        "BOR": torch.bitwise_or,
        "BXOR": torch.bitwise_xor,
    }.get(op)
    if pair is not None:
        for tensor in tensors[1:]:
            first = pair(first, tensor)
        return first.clone()
    wide = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64
    stack = torch.stack([t.to(wide) for t in tensors])
    total = stack.prod(0) if op == "PRODUCT" else stack.sum(0)
    if op == "AVG":
        total = total / len(tensors) if wide != torch.int64 else total // len(tensors)
    elif op == "PREMUL_SUM":
        total = total * PREMULTIPLIER if wide != torch.int64 else total * int(PREMULTIPLIER)
    answer = total.to(dtype)
    assert torch.equal(answer.to(wide), total), f"{op} of these values can't be represented in {dtype}"
    return answer


# inputs and outputs


def rows(case: Case, sender: int, receiver: int, call: int) -> int:
    """Return how many rows one rank sends to another if splits are uneven: 0, 1 or 2."""
    return (sender + 2 * receiver + call) % 3


def piece(case: Case, size: int, member: int, slot: int, call: int) -> torch.Tensor:
    """Return what ``member`` sends to receiver ``slot``: dtype[shape], contiguous."""
    shape = case.shape
    if case.uneven:
        shape = (rows(case, member, slot, call), *case.shape[1:])
    return _value(case, shape, size, member, slot, call)


def _value(case: Case, shape: tuple[int, ...], size: int, member: int, slot: int, call: int) -> torch.Tensor:
    expanded = case.layout == "expanded" and len(shape) > 0 and shape[0] > 0
    drawn = (1, *shape[1:]) if expanded else shape
    count = 1
    for extent in drawn:
        count *= extent
    key = (member, slot, call, case.collective)
    if case.collective in REDUCING:
        value = _contribution(count, case.dtype, case.op, size, *key)
    else:
        value = _patterns(count, case.dtype, *key)
    return value.reshape(drawn).expand(shape).contiguous()


def inputs(case: Case, size: int, member: int, call: int = 0) -> list[torch.Tensor]:
    """Return the inputs of a member, in order; [] if it has none (in scatter, every rank but the root)."""
    kind = case.collective
    if kind in ("all_to_all", "reduce_scatter"):
        return [piece(case, size, member, slot, call) for slot in range(size)]
    if kind in ("all_to_all_single", "reduce_scatter_tensor"):
        if case.layout == "expanded":
            return [_value(case, (size * case.shape[0], *case.shape[1:]), size, member, 0, call)]
        return [_join([piece(case, size, member, slot, call) for slot in range(size)], case.stacked)]
    if kind == "scatter":
        return [piece(case, size, member, slot, call) for slot in range(size)] if member == case.root else []
    return [piece(case, size, member, 0, call)]


def _join(pieces: list[torch.Tensor], stacked: bool) -> torch.Tensor:
    return torch.stack(pieces) if stacked else torch.cat(pieces)


def _for_receiver(case: Case, size: int, sender: int, receiver: int, call: int) -> torch.Tensor:
    """Return the part of a sender's input that goes to a receiver."""
    if case.layout == "expanded" and case.collective in ("all_to_all_single", "reduce_scatter_tensor"):
        return inputs(case, size, sender, call)[0][receiver * case.shape[0] : (receiver + 1) * case.shape[0]]
    return piece(case, size, sender, receiver, call)  # the same as in inputs(), without the parts of other receivers


def outputs(case: Case, size: int, member: int, call: int = 0) -> list[torch.Tensor]:
    """Return what a member must hold afterwards, in order.

    The list is empty if nothing is promised: in reduce and gather, for every rank but the root.
    """
    kind = case.collective
    if kind in ("reduce", "gather") and member != case.root:
        return []
    everyone = range(size)
    if kind in REDUCING:
        return [reduce_exactly(case.op, _contributions(case, size, member, call))]
    if kind == "broadcast":
        return inputs(case, size, case.root, call)
    if kind in ("all_gather", "gather"):
        return [inputs(case, size, m, call)[0] for m in everyone]
    if kind == "all_gather_into_tensor":
        return [_join([inputs(case, size, m, call)[0] for m in everyone], case.stacked)]
    if kind == "scatter":
        return [piece(case, size, case.root, member, call)]
    received = [_for_receiver(case, size, m, member, call) for m in everyone]
    return received if kind == "all_to_all" else [torch.cat(received)]


def _contributions(case: Case, size: int, member: int, call: int) -> list[torch.Tensor]:
    """Return what is reduced into a member's output, in the order of the members that give it."""
    if case.collective in ("all_reduce", "reduce"):
        return [inputs(case, size, m, call)[0] for m in range(size)]
    return [_for_receiver(case, size, m, member, call) for m in range(size)]


def settled(case: Case, size: int, member: int, call: int, expected: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """Return what was found, with the expected number for each average that differs from it by rounding alone.

    ``torch.distributed.ReduceOp.AVG`` "divides values by the world size before summing": a library may multiply by the
    reciprocal, which floating-point numbers have exactly for powers of two alone.  The reciprocal, each product and
    each of size - 1 sums is then rounded, each time by at most half the dtype's epsilon of what is rounded.

    found: on the CPU, of the dtype and shape of ``expected``; others are returned as they are.
    """
    reciprocal_is_exact = size & (size - 1) == 0
    floating = expected.dtype.is_floating_point or expected.dtype.is_complex
    if case.op != "AVG" or case.collective not in REDUCING or reciprocal_is_exact or not floating:
        return found
    if (found.dtype, found.shape) != (expected.dtype, expected.shape) or torch.equal(found, expected):
        return found
    wide = torch.complex128 if expected.dtype.is_complex else torch.float64
    magnitudes = sum(each.to(wide).abs() for each in _contributions(case, size, member, call))
    allowed = (size + 1) / 2 * torch.finfo(expected.dtype).eps * magnitudes / size
    near = (found.to(wide) - expected.to(wide)).abs() <= allowed
    return torch.where(near, expected, found)


# memory


def poison(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return dtype[shape] of values that no case produces, for outputs and for the elements between strides."""
    count = 1
    for extent in shape:
        count *= extent
    return _patterns(count, dtype, "poison").reshape(shape)


def lay(value: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a tensor of the same value in a given layout, and the whole buffer of which it is a view.

    ``offset``: contiguous, in the middle of a buffer.  ``column``: every third element.  ``transposed``: dense, with
    strides in reverse order.  ``expanded``: stride 0 in the first dimension, along which all values must be the same.
    ``conjugate``, ``negative``: a lazy view of the opposite value (only for complex, and only for real numbers).
    """
    shape, dtype = value.shape, value.dtype
    if layout == "offset":
        buffer = poison((value.numel() + 8,), dtype).to(value.device)
        view = buffer[3 : 3 + value.numel()].view(shape)
    elif layout == "column":
        buffer = poison((*shape, 3), dtype).to(value.device)
        view = buffer[..., 1]
    elif layout == "transposed":
        buffer = poison(tuple(reversed(shape)), dtype).to(value.device)
        view = buffer.permute(*reversed(range(len(shape))))
    elif layout == "expanded" and shape and shape[0] > 0:
        buffer = value[:1].clone()
        return buffer.expand(shape), buffer
    elif layout == "conjugate":
        buffer = value.conj().resolve_conj().clone()
        return buffer.conj(), buffer
    elif layout == "negative":
        part = value.neg()
        both = torch.complex(torch.zeros_like(part), part)
        return both.conj().imag, torch.view_as_real(both)
    else:
        buffer = value.clone()
        view = buffer
    view.copy_(value)
    return view, buffer


def gaps(view: torch.Tensor, buffer: torch.Tensor) -> Any:
    """Return the elements of a buffer outside a view: a copy of the buffer, with the view's elements set to zero."""
    copy = buffer.detach().clone()
    blank = copy.as_strided(view.shape, view.stride(), view.storage_offset())
    blank.copy_(torch.zeros_like(blank))
    return copy
