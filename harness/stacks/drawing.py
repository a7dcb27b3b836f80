"""Draw a stack's layout: the state of the drawing, and choices among values that fit the limits.

Nothing here imports Hypothesis, which ranks don't need: two functions that are passed in make the choices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec

from harness.specs.program import (
    Attention,
    Branch,
    Checkpointed,
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
    """The limits in force."""
    among: Callable[[Sequence[Any]], Any]
    """Draws one of several values, the simplest first."""
    some: Callable[[Sequence[str]], set[str]]
    """Draws a set of names."""
    offers: Callable[[str], bool]
    """Returns whether the profile in force claims the feature that an option belongs to."""
    any_world: bool = False
    """Whether to draw only what means the same on any number of ranks and in any number of micro-batches."""
    same_data: bool = False
    """Whether every rank has the whole batch."""

    def either(self) -> bool:
        """Draw False or True."""
        return bool(self.among((False, True)))

    def with_layout(self, **changes: Any) -> Case:
        """Return the case with changed fields of its layout."""
        return replace(self.case, layout=msgspec.structs.replace(self.case.layout, **changes))

    def with_options(self, **changes: Option) -> Case:
        """Return the case with changed options. Existing options keep their order."""
        return self.with_layout(options=tuple({**self.case.options, **changes}.items()))

    def fits(self, case: Case) -> bool:
        """Return whether a case violates no limit beyond those that the current case violates."""
        return violated(self.limits, case) <= violated(self.limits, self.case)

    def become(self, case: Case) -> None:
        """Replace the current case."""
        self.case = case

    def set(self, **options: Option) -> None:
        """Set options of the layout."""
        self.become(self.with_options(**options))

    def option(self, name: str, values: Sequence[Option], *, default: Option | None = None) -> None:
        """Draw an option from those of the values that fit.

        A value that is listed twice is twice as likely. The default is not set.
        """
        fitting = [value for value in values if value == default or self.fits(self.with_options(**{name: value}))]
        value = self.among(fitting) if fitting else default
        if value is not None and value != default:
            self.set(**{name: value})

    def settle(self, nearest: Iterable[Case]) -> bool:
        """Become the first case that no limit forbids, and return whether there is one."""
        for case in nearest:
            if not violated(self.limits, case):
                self.become(case)
                return True
        return False


def draw_nothing(d: Drawing) -> None:
    """Draw nothing: the layout is the whole model in one piece, without options."""


# what may be wrapped


def trainable(n: Named) -> bool:
    """Return whether a layer has parameters of its own that every backward reaches."""
    return n.trains and not n.optional


def has_parameters(n: Named) -> bool:
    """Return whether a layer, or a layer directly inside it, has parameters."""
    if isinstance(n.layer, (Residual, Container, Twice, Branch, Hooked, Checkpointed)):
        return any(isinstance(inner, (Linear, Conv, Attention, Norm)) for inner in children(n.layer))
    return isinstance(n.layer, (Linear, Conv, Attention, Norm, Embedding))


def wrappable(n: Named) -> bool:
    """Return whether a module can be wrapped on its own: it has a forward, and parameters."""
    callable_ = not (isinstance(n.layer, Container) and n.layer.kind in ("list", "dict"))
    return callable_ and has_parameters(n)


def within(n: Named, named: Iterable[Named]) -> set[str]:
    """Return the names of a layer and of those inside it."""
    return {m.name for m in named if m.name == n.name or m.name.startswith(f"{n.name}.")}


def sharing(named: Iterable[Named]) -> set[str]:
    """Return the names of layers whose parameters are shared."""
    shared: set[str] = set()
    for n in named:
        if isinstance(n.layer, Tied):
            shared |= {n.name, n.layer.of}
    return shared


# options that several stacks have


def meshes(world: int) -> tuple[str, ...]:
    """Return meshes of one to three dimensions, with and without dimensions of one, for :func:`training.line_mesh`."""
    shapes = [f"{world}", f"{world}x1", f"1x{world}", f"1x{world}x1"]
    if world == 4:
        shapes += ["2x2", "2x1x2"]
    return tuple(shapes)


def mesh_sizes(layout: Layout) -> list[str]:
    """Return the sizes of the dimensions of the layout's mesh, or ``[""]`` if it has no option ``mesh``."""
    return str(dict(layout.options).get("mesh", "")).split("x")


def several_dimensions(layout: Layout) -> bool:
    """Return whether several dimensions of the layout's mesh have more than one rank, so that the mesh is flattened."""
    return sum(size != "1" for size in mesh_sizes(layout)) > 1


def draw_mesh(d: Drawing) -> None:
    """Draw the option ``mesh`` in one of three layouts."""
    if not d.any_world and d.among((False, False, True)):
        d.set(mesh=d.among(meshes(d.case.layout.world)))


def draw_recast(d: Drawing) -> None:
    """Draw the option ``recast`` in one of four layouts, if the whole model has one dtype that is not the widest."""
    if not d.case.own_dtypes and d.case.dtype != "float64" and d.among((False, False, False, True)):
        d.set(recast=True)


def draw_ignored(d: Drawing) -> None:
    """Draw the option ``ignored``: no layer, or one.

    An ignored layer trains only on its rank's part of the batch. This is right if the part is the whole batch, or if
    the layer is frozen.
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
