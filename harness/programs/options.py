"""What a layout's stack says about a program: its typed options, dtypes, promises, and whether it is within limits."""

from __future__ import annotations

import msgspec

from harness.results import Setting
from harness.specs.program import Data, Layout, Option, Program
from harness.specs.shapes import walk
from harness.stacks.limit import Case, Limit
from harness.stacks.registry import parted, stack_of
from harness.stacks.stack import Promises


def options_of(layout: Layout) -> Data:
    """Return the options of a layout as its stack's type.

    Errors: ValueError for an option that the stack does not have, for a value of another type, and for a duplicate
    option.
    """
    names = [name for name, _ in layout.options]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"layout.options: {twice[0]!r} twice")
    stack, _, options = parted(layout)
    if unknown := [name for name in options if name not in stack.option_names]:
        there = ", ".join(sorted(stack.option_names)) or "none"
        raise ValueError(f"layout.options: {stack.name} has no option {unknown[0]!r}; it has {there}")
    try:
        return msgspec.convert(dict(options), stack.options)
    except msgspec.ValidationError as e:
        raise ValueError(f"layout.options: {e}") from e


def casts_of(layout: Layout) -> set[str]:
    """Return the dtypes to which the stack casts parameters, gradients, or what it sends."""
    stack, _, options = parted(layout)
    return stack.casts(options)


def output_dtype_of(layout: Layout) -> str:
    """Return the dtype to which the stack casts outputs of the model; empty if it does not cast them."""
    stack, _, options = parted(layout)
    return stack.output_dtype(options)


def dtypes_of(program: Program) -> set[str]:
    """Return every dtype in which something is stored or sent."""
    return program.stored_dtypes | casts_of(program.layout)


def promises_of(program: Program) -> Promises:
    """Return what the stack promises for a program."""
    return stack_of(program.layout).promises(program.layout)


def limits_of(layout: Layout) -> tuple[Limit, ...]:
    """Return the limits that apply to a layout: those of its stack, and of the stack over it, if any."""
    stack, outer, _ = parted(layout)
    return stack.in_force() + (outer.in_force() if outer is not None else ())


def case_of(program: Program) -> Case:
    """Return what limits look at in a program."""
    p = program
    return Case(p.layout, tuple(walk(p.model)), p.steps, p.optimizer, p.dtype, p.layout.compiled is not None)


def takes(program: Program) -> bool:
    """Return whether no limit of its stack forbids a program."""
    case = case_of(program)
    return not any(limit.forbids(case) for limit in limits_of(program.layout))


def settings_of(program: Program) -> list[Setting]:
    """Return what results keep of a program: every option of its stack, and its dtype, each with its value.

    Of a compiled program, these are the arguments of ``torch.compile``, and the stack that is compiled.
    """
    layout = program.layout
    under, outer, _ = parted(layout)
    values: dict[str, Option] = {"dtype": program.dtype}
    if outer is None:
        values |= msgspec.structs.asdict(options_of(layout))
        if under.tensor_parallel:
            values["tensor"] = layout.tensor
    else:
        values |= {"stack": under.name, **(msgspec.structs.asdict(layout.compiled) if layout.compiled else {})}
    return [Setting(layout.stack, name, _said(value)) for name, value in values.items()]


def _said(value: Option) -> str:
    """Return the value of an option in a word."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return "some" if value else "none"
    return f"{value:g}" if isinstance(value, (int, float)) else value or "none"
