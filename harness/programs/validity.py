"""Validate programs: the types of their fields, whether they fit together, and whether a program is small enough."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from harness.programs.cost import Cost, cost
from harness.programs.options import options_of
from harness.specs import limits
from harness.specs.program import Data, Layout, Program, every
from harness.specs.shapes import walk
from harness.stacks.registry import stack_of


def check_types(program: Program) -> Data:
    """Require that every field, and every option of the stack, has its type. Returns the typed options.

    Python does not enforce the types of a program's fields; only decoding from JSON does.
    Errors: ValueError.
    """
    if sum(1 for _ in zip(every(program.model.layers), range(limits.LAYERS + 1), strict=False)) > limits.LAYERS:
        raise ValueError(f"more than {limits.LAYERS} layers")
    try:
        msgspec.convert(msgspec.to_builtins(program), Program)
    except (msgspec.ValidationError, TypeError, OverflowError, RecursionError) as e:
        raise ValueError(str(e)) from e
    return options_of(program.layout)


def check(program: Program) -> None:
    """Check what a stored program must satisfy beyond the types of its fields.

    Errors: ValueError.
    """
    options = check_types(program)
    layers = {n.name for n in walk(program.model)}
    for what, names in _meant(program, options):
        _require_names(what, names, layers)
    _check_world(program.layout, options)
    _require_small(cost(program))


def _meant(program: Program, options: Data) -> Iterable[tuple[str, tuple[str, ...]]]:
    """Yield each field that lists layers: what to call it in a message, and the names of the layers."""
    layout = program.layout
    yield "layout.wrapped", layout.wrapped
    yield "layout.plan", tuple(name for name, _ in layout.plan)
    for option in stack_of(layout).layers:
        yield f"layout.options: {option}", getattr(options, option)
    for number, step in enumerate(program.steps):
        yield f"steps[{number}].toggle", (step.toggle,) if step.toggle else ()


def _require_names(what: str, names: tuple[str, ...], layers: set[str]) -> None:
    for name in names:
        if name not in layers:
            shown = ", ".join(sorted(layers)[:10]) + (", …" if len(layers) > 10 else "")
            raise ValueError(f"{what}: there is no layer {name!r} among {shown}")
    if len(set(names)) < len(names):
        raise ValueError(f"{what}: a layer is named twice")


def _check_world(layout: Layout, options: Data) -> None:
    world, tensor = layout.world, layout.tensor
    if world % tensor:
        raise ValueError(f"{world} ranks can't be divided into groups of {tensor}")
    stack = stack_of(layout)
    if not stack.tensor_parallel and (tensor > 1 or layout.plan):
        raise ValueError(f"{stack.name} has no tensor parallelism: layout.tensor is 1, and layout.plan empty")
    stack.check(layout, options)


def _require_small(found: Cost) -> None:
    bounds = (
        (found.calls, limits.CALLS, "calls of layers"),
        (found.elements, limits.ELEMENTS, "numbers to compute and keep"),
        (found.products, limits.PRODUCTS, "multiplications"),
    )
    for count, most, what in bounds:
        if count > most:
            raise ValueError(f"it is too large: about {count:,} {what}; at most {most:,}")
