"""Limits of a stack as data: the layouts, schedules and models that it can't take.

Drawing respects a stack's limits, and so do laws when they change programs. A limit that is due to a defect of PyTorch
names the finding and the versions of torch that have the defect. It does not apply to other versions, for which such
programs are drawn.
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
"""The versions of torch that Concord supports: for defects seen in one of them and not known to be fixed in any."""


_SGD = Optimizer()


@dataclass(frozen=True)
class Case:
    """What a limit looks at: a layout, and all that it may depend on. Parts are missing while a program is drawn."""

    layout: Layout
    named: tuple[Named, ...] = ()
    """The layers of the model."""
    steps: tuple[Step, ...] = ()
    optimizer: Optimizer = _SGD
    dtype: str = "float64"
    compiled: bool = False
    """Whether the model is compiled."""

    @functools.cached_property
    def options(self) -> Mapping[str, Option]:
        """The options of the layout."""
        return dict(self.layout.options)

    @property
    def data(self) -> int:
        """The number of parts of the batch."""
        return self.layout.world // self.layout.tensor

    @property
    def own_dtypes(self) -> bool:
        """Whether a layer has its own dtype."""
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
        """Whether gradients are clipped together, by their norm."""
        return any(step.clip for step in self.steps)

    def abandons(self, where: str = "") -> bool:
        """Return whether a batch is given up: at its ``loss``, in a ``layer``, or anywhere."""
        return any(step.abandoned and where in ("", step.abandoned) for step in self.steps)

    @property
    def toggles(self) -> bool:
        """Whether requires_grad of some parameters is toggled."""
        return any(step.toggle for step in self.steps)

    @property
    def freezes(self) -> bool:
        """Whether a layer is frozen from the beginning."""
        return any(isinstance(n.layer, Linear) and n.layer.frozen for n in self.named)


Forbids = Callable[[Case], bool]


@dataclass(frozen=True, eq=False)
class Limit:
    """A region that programs of a stack avoid."""

    why: str
    """The reason, in one sentence."""
    forbids: Forbids
    """Returns whether a case is in the region."""
    finding: str = ""
    """The script in ``docs/findings/`` that shows the defect, or a package's own name for it.

    Empty if the stack does not support the region at all: the limit then always applies.
    """
    torch: str = ""
    """The versions of torch that have the defect, as a PEP 440 specifier."""

    def __post_init__(self) -> None:
        SpecifierSet(self.torch)
        if bool(self.finding) != bool(self.torch):
            raise ValueError(f"a limit has both a finding and versions of torch, or neither: {self.why}")

    def applies(self, version: str = "") -> bool:
        """Return whether the limit applies to a version of torch, by default the running one."""
        return not self.torch or runs_with(self.torch, version)


def running() -> str:
    """Return the running version of torch."""
    return torch.__version__


def runs_with(specifier: str, version: str = "") -> bool:
    """Return whether a version of torch, by default the running one, is within a PEP 440 specifier."""
    return _within(specifier, version or running())


@functools.cache
def _within(specifier: str, version: str) -> bool:
    return SpecifierSet(specifier).contains(version, prereleases=True)


def defect(finding: str, why: str, forbids: Forbids, *, torch: str = OLDEST) -> Limit:
    """Return a limit that is due to a defect of PyTorch."""
    return Limit(why, forbids, finding, torch)


def violated(limits: Iterable[Limit], case: Case) -> frozenset[Limit]:
    """Return the limits whose region a case is in."""
    return frozenset(limit for limit in limits if limit.forbids(case))


def layer_alone(layer: Layer, layout: Layout, *, dtype: str, compiled: bool) -> Case:
    """Return the case of a model of one layer, for what a stack takes regardless of the layers around it."""
    return Case(layout, (Named("layer0", layer, (1,), (1,)),), dtype=dtype, compiled=compiled)


def fused_sgd(case: Case) -> bool:
    """Return whether the optimizer is SGD with one operation for all parameters."""
    return case.optimizer.form == "fused" and case.optimizer.kind == "sgd"


FUSED_SGD = defect(
    "fused_sgd",
    "On a CPU, fused SGD leaves most parameters of 16 bits as they are.",
    lambda case: fused_sgd(case) and case.dtype in ("bfloat16", "float16"),
    torch=">=2.11,<2.14",
)
STAYS_FROZEN = Limit(
    "Parameters require gradients, or do not, before the model is put on ranks, and stay so.", lambda case: case.toggles
)
"""A limit of stacks that check only once which parameters require gradients."""
