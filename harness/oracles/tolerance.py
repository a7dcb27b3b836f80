"""The bounded oracle, which compares a run with the same program in float64.

It executes the float64 run again with rounding errors in every operation. The results show how far from the truth a
healthy run in another precision may be. docs/tolerances.md has the derivation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from typing import Generic, TypeVar

import torch

from harness.oracles.exact import Difference, Element, kind, kind_of
from harness.oracles.rounding import UNIT, Tape

Key = TypeVar("Key", bound=Hashable)
"""The keys of a run's tensors, such as their names."""

SAMPLES = 64
MARGIN = 1.5
"""A tolerance is this many times the largest error of any sample."""
FLOOR = 0.75
"""A tolerance that is not zero is at least this share of the root mean square of its tensor's tolerances."""

_TRUE = torch.float64
_MOST_SHOWN = 3


class Bounded(Generic[Key]):
    """The bounds on the results of a healthy run in ``dtype`` on ``world`` ranks, element by element.

    ``run`` executes the program alone, on the CPU, with float64 tensors, and returns named tensors.  It is called once.
    The operations that it executed are then executed again, ``samples`` times, with random rounding errors from
    ``seed``.  Numbers that the program reads out of tensors (``item()``) and random numbers are the same in every
    sample.

    Errors: ValueError for a dtype without a known unit roundoff, and for a world or a number of samples below 1;
    NotImplementedError for an operation that cannot be executed again; RuntimeError if the run has other results when
    it is executed again without errors.
    """

    truth: dict[Key, torch.Tensor]
    """The results of ``run``: float64, or the dtype that they have."""
    tolerance: dict[Key, torch.Tensor]
    """The largest absolute difference that rounding explains: float64, in the shape of ``truth``.  It is infinite where
    a run in this dtype may overflow or divide by zero."""

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
            results = dict(run())
        self.truth = {name: tensor.detach().clone() for name, tensor in results.items()}
        moved = tape.replay([tensor.detach() for tensor in results.values()], samples, seed)
        rounded = {name: of for name, of in zip(self.truth, moved, strict=True) if of.dtype == _TRUE}
        self.tolerance = {name: torch.zeros(truth.shape, dtype=_TRUE) for name, truth in self.truth.items()}
        if rounded:
            # The sample without errors still underflows in float16, in the same direction everywhere, which random
            # errors do not.
            half = dtype == torch.float16
            self.tolerance |= _tolerances({name: self.truth[name] for name in rounded}, rounded, counted_first=half)

    @property
    def loose(self) -> float:
        """The share of elements whose tolerance exceeds their magnitude, so that not even their sign is known."""
        total = sum(truth.numel() for truth in self.truth.values())
        unknown = (_unknown(truth, self.tolerance[name]) for name, truth in self.truth.items())
        return sum(unknown) / total if total else 0.0

    def compare(
        self, name: Key, found: torch.Tensor, *, dtype: torch.dtype | None = None, part: tuple[int, int] = (0, 1)
    ) -> Difference | None:
        """Return how ``found`` differs from the truth by more than rounding explains; None if it does not.

        ``dtype``: the dtype that ``found`` must have, if it is not the run's dtype, which still sets the tolerance.
        ``part``: (index, count) if ``found`` is one part of the truth, split along the first dimension.
        Errors: KeyError if the run returned no tensor of that name.
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
            # A NaN is wrong here.  An element may be anything if the samples could not bound it.
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
        """Describe the difference that :meth:`compare` finds; empty if there is none."""
        difference = self.compare(name, found, dtype=dtype, part=part)
        return "" if difference is None else f"{name}: {difference}"


def _unknown(truth: torch.Tensor, allowed: torch.Tensor) -> int:
    """Count the elements whose tolerance exceeds their magnitude."""
    return int((allowed > truth.to(_TRUE).abs()).sum())


def _tolerances(
    truths: Mapping[Key, torch.Tensor], sampled: Mapping[Key, torch.Tensor], *, counted_first: bool
) -> dict[Key, torch.Tensor]:
    """Compute the tolerance of every element from its distances to the truth in the samples.

    All tensors are processed at once, because they are many and small.
    ``sampled``: float64[1 + samples, *shape]; ``counted_first``: whether the first sample, which has no random errors,
    counts like the others.
    Errors: RuntimeError if the first sample should equal the truth and does not.
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
        # A later operation, such as a ReLU, may hide a NaN, so nothing is known about later tensors of such a sample.
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
    """Widen tolerances by those of other elements of the same tensor.

    A rare event, such as a flipped sign, may occur in no sample of one element and in samples of its neighbors.
    ``size``: the magnitudes of the truth's elements; ``of``: the index of each element's tensor, below ``count``.
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
