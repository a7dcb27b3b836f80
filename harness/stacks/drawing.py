"""How a stack draws a layout: the layout so far, what it is drawn for, and choices among what limits take.

Nothing here imports Hypothesis, which ranks have no use for: choices are made by two functions that are given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec

from harness.specs.program import (
    Attention,
    Branch,
    Container,
    Conv,
    Embedding,
    Hooked,
    Layout,
    Linear,
    Norm,
    Option,
    Residual,
    Tied,
    Twice,
    children,
)
from harness.specs.shapes import Named
from harness.stacks.limit import Case, Limit, violated

T = TypeVar("T")


@dataclass
class Drawing:
    """A layout that is being drawn."""

    case: Case
    """The layout so far, and the model, schedule and optimizer that it is for."""
    limits: tuple[Limit, ...]
    """Those in force."""
    among: Callable[[Sequence[Any]], Any]
    """Draws one of several values, the simplest first."""
    some: Callable[[Sequence[str]], set[str]]
    """Draws a set of names."""
    offers: Callable[[str], bool]
    """Whether the profile in force claims the feature that an option is."""
    any_world: bool = False
    """Whether only that is drawn which means the same on any number of ranks and in any micro-batches."""
    same_data: bool = False
    """Whether every rank has the whole batch."""

    def either(self) -> bool:
        """Draw False or True."""
        return bool(self.among((False, True)))

    def with_layout(self, **changes: Any) -> Case:
        """The case with other fields of its layout."""
        return replace(self.case, layout=msgspec.structs.replace(self.case.layout, **changes))

    def with_options(self, **changes: Option) -> Case:
        """The case with other options; its own stay in their order."""
        return self.with_layout(options=tuple({**self.case.options, **changes}.items()))

    def fits(self, case: Case) -> bool:
        """Whether a case violates no limit that the case so far does not."""
        return violated(self.limits, case) <= violated(self.limits, self.case)

    def become(self, case: Case) -> None:
        """Let a case be the one so far."""
        self.case = case

    def set(self, **options: Option) -> None:
        """Set options."""
        self.become(self.with_options(**options))

    def option(self, name: str, values: Sequence[Option], *, default: Option | None = None) -> None:
        """Draw an option among those of some values that fit, each as often as it is there; a default is not set."""
        fitting = [value for value in values if value == default or self.fits(self.with_options(**{name: value}))]
        value = self.among(fitting) if fitting else default
        if value is not None and value != default:
            self.set(**{name: value})

    def settle(self, nearest: Iterable[Case]) -> bool:
        """Become the first case that no limit forbids; whether there is one."""
        for case in nearest:
            if not violated(self.limits, case):
                self.become(case)
                return True
        return False


def draw_nothing(d: Drawing) -> None:
    """The whole model in one piece, without options."""


# what may be wrapped


def trainable(n: Named) -> bool:
    """Whether a layer has parameters of its own that every backward reaches."""
    return n.trains and not n.optional


def has_parameters(n: Named) -> bool:
    """Whether a layer, or one inside it, has parameters."""
    if isinstance(n.layer, (Residual, Container, Twice, Branch, Hooked)):
        return any(isinstance(inner, (Linear, Conv, Attention, Norm)) for inner in children(n.layer))
    return isinstance(n.layer, (Linear, Conv, Attention, Norm, Embedding))


def wrappable(n: Named) -> bool:
    """Whether a module can be wrapped on its own: it has a forward, and parameters."""
    callable_ = not (isinstance(n.layer, Container) and n.layer.kind in ("list", "dict"))
    return callable_ and has_parameters(n)


def within(n: Named, named: Iterable[Named]) -> set[str]:
    """Names of a layer and of those inside it."""
    return {m.name for m in named if m.name == n.name or m.name.startswith(f"{n.name}.")}


def sharing(named: Iterable[Named]) -> set[str]:
    """Names of layers whose parameters are shared."""
    found: set[str] = set()
    for n in named:
        if isinstance(n.layer, Tied):
            found |= {n.name, n.layer.of}
    return found


# options that several stacks have


def meshes(world: int) -> tuple[str, ...]:
    """Meshes of one, two and three dimensions, with and without dimensions of one, for :func:`training.line_mesh`."""
    found = [f"{world}", f"{world}x1", f"1x{world}", f"1x{world}x1"]
    if world == 4:
        found += ["2x2", "2x1x2"]
    return tuple(found)


def several_dimensions(layout: Layout) -> bool:
    """Whether ranks are in a mesh of which several dimensions have more than one: it is flattened."""
    mesh = str(dict(layout.options).get("mesh", ""))
    return sum(size != "1" for size in mesh.split("x")) > 1


def draw_mesh(d: Drawing) -> None:
    """Draw the option ``mesh``, in one of three layouts."""
    if not d.any_world and d.among((False, False, True)):
        d.set(mesh=d.among(meshes(d.case.layout.world)))


def draw_recast(d: Drawing) -> None:
    """Draw the option ``recast``, in one of four layouts, where all of a model has one dtype that is not the widest."""
    if not d.case.own_dtypes and d.case.dtype != "float64" and d.among((False, False, False, True)):
        d.set(recast=True)


def draw_ignored(d: Drawing) -> None:
    """Draw the option ``ignored``: no layer, or one.

    A layer that is ignored trains on its rank's part alone, which is right if that is everything, or it is frozen.
    """
    named = d.case.named
    tied = sharing(named) | {step.toggle for step in d.case.steps}
    able = [n for n in named if _ignorable(n, d.same_data) and n.name not in tied]
    if len([n for n in named if trainable(n)]) < 2:
        able = [n for n in able if not n.trains]
    fitting = [(n.name,) for n in able if d.fits(d.with_options(ignored=(n.name,)))]
    if chosen := d.among(((), *fitting)):
        d.set(ignored=chosen)


def _ignorable(n: Named, same_data: bool) -> bool:
    return isinstance(n.layer, Linear) and not n.optional and (n.layer.frozen or same_data)
