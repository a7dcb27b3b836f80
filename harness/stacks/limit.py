"""Limits of a stack: what its layouts, schedules and models must not be, as data.

Drawing keeps to the limits of a stack, and so do the programs that laws make of others.  A limit that is due to a
defect of PyTorch names the finding, and the versions of torch that have the defect: in another version it does not
apply, and the region behind it is drawn.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from packaging.specifiers import SpecifierSet

from harness.specs.program import Layer, Layout, Linear, Optimizer, Option, Step
from harness.specs.shapes import Named

OLDEST = ">=2.11"
"""The versions of torch that Concord supports: the defect has been seen in one, and no version is known without it."""


_SGD = Optimizer()


@dataclass(frozen=True)
class Case:
    """What a limit looks at: a layout, and all that it may depend on.  While a program is drawn, parts are missing."""

    layout: Layout
    named: tuple[Named, ...] = ()
    """Layers of the model."""
    steps: tuple[Step, ...] = ()
    optimizer: Optimizer = _SGD
    dtype: str = "float64"
    compiled: bool = False
    """Whether the model is compiled."""

    @functools.cached_property
    def options(self) -> Mapping[str, Option]:
        """Options of the layout."""
        return dict(self.layout.options)

    @property
    def data(self) -> int:
        """How many parts the batch has."""
        return self.layout.world // self.layout.tensor

    @property
    def own_dtypes(self) -> bool:
        """Whether a layer has a dtype of its own."""
        return any(n.dtype for n in self.named)

    @property
    def optional(self) -> bool:
        """Whether a micro-batch may leave out a layer."""
        return any(n.optional for n in self.named)

    @property
    def accumulates(self) -> bool:
        """Whether some micro-batch is not averaged at once."""
        return any(step.accumulates for step in self.steps)

    @property
    def clips(self) -> bool:
        """Whether gradients are clipped."""
        return any(step.clip for step in self.steps)

    @property
    def toggles(self) -> bool:
        """Whether parameters stop, or begin again, to require gradients."""
        return any(step.toggle for step in self.steps)

    @property
    def freezes(self) -> bool:
        """Whether a layer is frozen from the beginning."""
        return any(isinstance(n.layer, Linear) and n.layer.frozen for n in self.named)


Forbids = Callable[[Case], bool]


@dataclass(frozen=True, eq=False)
class Limit:
    """A region that programs of a stack keep out of."""

    why: str
    """One sentence."""
    forbids: Forbids
    """Whether a case is in the region."""
    finding: str = ""
    """The script in ``docs/findings/`` (or what a package calls its own) that shows the defect.  Empty where the region
    is outside of what the stack supports: the limit always applies."""
    torch: str = ""
    """The versions of torch that have the defect, as a PEP 440 specifier."""

    def __post_init__(self) -> None:
        SpecifierSet(self.torch)
        if bool(self.finding) != bool(self.torch):
            raise ValueError(f"a limit has both a finding and versions of torch, or neither: {self.why}")

    def applies(self, version: str = "") -> bool:
        """Whether it counts in a version of torch: the running one, unless given."""
        return not self.torch or _within(self.torch, version or running())


def running() -> str:
    """The version of torch that is running."""
    return torch.__version__


@functools.cache
def _within(specifier: str, version: str) -> bool:
    return SpecifierSet(specifier).contains(version, prereleases=True)


def defect(finding: str, why: str, forbids: Forbids, *, torch: str = OLDEST) -> Limit:
    """A limit that is due to a defect of PyTorch."""
    return Limit(why, forbids, finding, torch)


def violated(limits: Iterable[Limit], case: Case) -> frozenset[Limit]:
    """The limits whose region a case is in."""
    return frozenset(limit for limit in limits if limit.forbids(case))


def layer_alone(layer: Layer, layout: Layout, *, dtype: str, compiled: bool) -> Case:
    """The case of a model of one layer, for what a stack takes whatever is around it."""
    return Case(layout, (Named("layer0", layer, (1,), (1,)),), dtype=dtype, compiled=compiled)


STAYS_FROZEN = Limit(
    "Parameters require gradients, or do not, before the model is put on ranks, and stay so.", lambda case: case.toggles
)
"""Of stacks that look at what requires gradients once."""
