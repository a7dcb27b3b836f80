"""The bounded oracle: a float64 run says what is true, and the same run with rounding errors put into every operation
says how far a healthy run in another precision may be from it.  The derivation is in docs/tolerances.md."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from typing import Generic, TypeVar

import torch

from harness.oracles.exact import Difference, Element, kind, kind_of
from harness.oracles.rounding import UNIT, Tape

Key = TypeVar("Key", bound=Hashable)
"""What tensors are known by: their names, or whatever else a run gives them."""

SAMPLES = 64
MARGIN = 1.5
"""A tolerance is this many times the largest error that a sample made."""
FLOOR = 0.75
"""A tolerance is never below this share of its tensor's (their root mean square), unless it is zero."""

_TRUE = torch.float64
_MOST_SHOWN = 3


class Bounded(Generic[Key]):
    """What a healthy run in ``dtype`` on ``world`` ranks may give, element by element.

    ``run`` executes the program alone, on the CPU, with float64 tensors, and returns named tensors.  It is called once;
    the operations that it executed are then executed again, ``samples`` times, with random rounding errors.  What
    it reads out of tensors (``item()``), and random numbers, are the same in every sample.

    Errors: ValueError for a dtype that has no unit roundoff here, and for a world or a number of samples below 1;
    NotImplementedError for an operation that cannot be executed again; RuntimeError where the run, executed again
    without errors, gives something else.
    """

    truth: dict[Key, torch.Tensor]
    """What ``run`` returned: float64, or whatever dtype it has."""
    tolerance: dict[Key, torch.Tensor]
    """The largest absolute difference that rounding explains: float64, in the shape of ``truth``; infinite where a run
    in this dtype may overflow or divide by a number that is zero."""

    def __init__(
        self,
        run: Callable[[], Mapping[Key, torch.Tensor]],
        dtype: torch.dtype,
        *,
        world: int = 1,
        samples: int = SAMPLES,
        seed: int = 0,
    ) -> None:
        if dtype not in UNIT:
            raise ValueError(f"dtype must be one of {', '.join(map(_short, UNIT))}, not {dtype}")
        if world < 1 or samples < 1:
            raise ValueError(f"world and samples must be at least 1, not {world} and {samples}")
        self.dtype = dtype
        tape = Tape(dtype, world)
        with tape:
            found = dict(run())
        self.truth = {name: tensor.detach().clone() for name, tensor in found.items()}
        moved = tape.replay([tensor.detach() for tensor in found.values()], samples, seed)
        rounded = {name: of for name, of in zip(self.truth, moved, strict=True) if of.dtype == _TRUE}
        self.tolerance = {name: torch.zeros(truth.shape, dtype=_TRUE) for name, truth in self.truth.items()}
        if rounded:
            # Without errors, float16 still underflows: everywhere in the same direction, as random errors do not.
            half = dtype == torch.float16
            self.tolerance |= _tolerances({name: self.truth[name] for name in rounded}, rounded, counted_first=half)

    @property
    def loose(self) -> float:
        """Share of elements whose tolerance is larger than their own size: of these, not even the sign is known."""
        total = sum(truth.numel() for truth in self.truth.values())
        unknown = (_unknown(truth, self.tolerance[name]) for name, truth in self.truth.items())
        return sum(unknown) / total if total else 0.0

    def compare(
        self, name: Key, found: torch.Tensor, *, dtype: torch.dtype | None = None, part: tuple[int, int] = (0, 1)
    ) -> Difference | None:
        """How ``found`` differs from the truth by more than rounding explains; None where it does not.

        ``dtype``: what it must have where that is another than the run's, which says what is allowed; ``part``: which
        part of how many it is, along the first dimension.
        Errors: KeyError where the run returned nothing of that name.
        """
        truth, allowed = self.truth[name], self.tolerance[name]
        if part[1] > 1:
            truth, allowed = truth.tensor_split(part[1])[part[0]], allowed.tensor_split(part[1])[part[0]]
        dtype = (dtype or self.dtype) if truth.dtype == _TRUE else truth.dtype
        expected = kind_of(dtype, truth.shape)
        if found.dtype != dtype or found.shape != truth.shape:
            return Difference(expected, kind(found))
        value = found.detach().cpu().to(truth.dtype)
        near = (value - truth).abs() <= allowed if truth.dtype == _TRUE else value == truth
        if bool(near.all()):
            return None
        if truth.dtype == _TRUE:
            # Written so that NaN is wrong; what the samples could not bound is allowed to be anything.
            wrong = ~(near | (value == truth) | allowed.isinf())
        else:
            wrong = ~(near | ((value != value) & (truth != truth)))
        if not bool(wrong.any()):
            return None
        places = [tuple(index) for index in wrong.nonzero()[:_MOST_SHOWN].tolist()]
        elements = tuple(Element(at, truth[at].item(), value[at].item(), allowed[at].item()) for at in places)
        return Difference(expected, kind(found), int(wrong.sum()), truth.numel(), elements, _unknown(truth, allowed))

    def differs(
        self, name: Key, found: torch.Tensor, *, dtype: torch.dtype | None = None, part: tuple[int, int] = (0, 1)
    ) -> str:
        """Say how ``found`` differs, as :meth:`compare` has it; empty where it does not."""
        difference = self.compare(name, found, dtype=dtype, part=part)
        return "" if difference is None else f"{name}: {difference}"


def _unknown(truth: torch.Tensor, allowed: torch.Tensor) -> int:
    """How many elements are allowed more than their own size."""
    return int((allowed > truth.to(_TRUE).abs()).sum())


def _tolerances(
    truths: Mapping[Key, torch.Tensor], sampled: Mapping[Key, torch.Tensor], *, counted_first: bool
) -> dict[Key, torch.Tensor]:
    """Of every element, how far samples were from the truth, and more; all tensors at once, which are many and small.

    ``sampled``: float64[1 + samples, *shape]; ``counted_first``: whether the first, without errors, is one of them.
    Errors: RuntimeError where the first is no run of the same.
    """
    shapes = [truth.shape for truth in truths.values()]
    sizes = [shape.numel() for shape in shapes]
    of = torch.repeat_interleave(torch.tensor(sizes))
    truth = torch.cat([tensor.reshape(-1) for tensor in truths.values()])
    all_sampled = torch.cat(
        [tensor.flatten(1) if tensor.dim() > 1 else tensor[:, None] for tensor in sampled.values()], dim=1
    )
    far = (all_sampled - truth).abs_().nan_to_num_(nan=math.inf)
    lost = far.isinf() & truth.isfinite()
    if bool(lost.any()):
        # NaN may be hidden by what comes later, such as a ReLU: of such a sample nothing more is known.
        each = torch.stack([tensor.any(dim=1) for tensor in lost.split_with_sizes(sizes, dim=1)], dim=1).long()
        far = far.masked_fill((each.cumsum(dim=1) > each)[:, of], math.inf)
    size = truth.abs()
    allowed = _pooled(MARGIN * far[0 if counted_first else 1 :].amax(dim=0), size, of, len(sizes))
    if not counted_first:
        largest = torch.zeros(len(sizes), dtype=_TRUE).scatter_reduce(0, of, size, "amax")
        other = far[0] > 1e3 * allowed + 1e-9 * largest[of]
        if bool(other.any()):
            name = list(truths)[int(of[other][0])]
            raise RuntimeError(f"{name}: executed again, the run gave something else; is it random?")
    return {n: part.view(s) for n, part, s in zip(truths, allowed.split_with_sizes(sizes), shapes, strict=True)}


def _pooled(tolerance: torch.Tensor, size: torch.Tensor, of: torch.Tensor, count: int) -> torch.Tensor:
    """An event that is rare, such as a sign that flips, may be in no sample of one element, and in those of others.

    ``size``: of the elements of the truth; ``of``: which of the ``count`` tensors each belongs to.
    """
    finite = tolerance.isfinite() & (tolerance > 0)
    unknown = finite & (tolerance > size)
    most = torch.zeros(count, dtype=_TRUE).scatter_reduce(0, of, tolerance.where(unknown, 0), "amax")
    tolerance = torch.where(unknown, MARGIN * most[of], tolerance)
    squares, counts = torch.zeros(2, count, dtype=_TRUE)
    squares = squares.index_add(0, of, tolerance.where(finite, 0).square())
    counts = counts.index_add(0, of, finite.to(_TRUE))
    floor = FLOOR * (squares / counts.clamp(min=1)).sqrt()
    return torch.where(tolerance > 0, tolerance.maximum(floor[of]), tolerance)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
