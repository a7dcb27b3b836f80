"""What the stack of a program's layout says of it: typed options, dtypes, promises, and whether it is within limits."""

from __future__ import annotations

import msgspec

from harness.specs.program import Data, Layout, Program
from harness.specs.shapes import walk
from harness.stacks.limit import Case, Limit
from harness.stacks.registry import parted, stack_of
from harness.stacks.stack import Promises


def options_of(layout: Layout) -> Data:
    """The options of a layout as the type of its stack.

    Errors: ValueError for an option that the stack has not, for a value of another type, and for an option twice.
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
    """The dtypes to which the stack casts parameters, gradients, or what it sends."""
    stack, _, options = parted(layout)
    return stack.casts(options)


def output_dtype_of(layout: Layout) -> str:
    """The dtype to which the stack casts outputs of the model; empty for none."""
    stack, _, options = parted(layout)
    return stack.output_dtype(options)


def dtypes_of(program: Program) -> set[str]:
    """Every dtype in which something is stored or sent."""
    return program.stored_dtypes | casts_of(program.layout)


def promises_of(program: Program) -> Promises:
    """What the stack promises of a program."""
    return stack_of(program.layout).promises(program.layout)


def limits_of(layout: Layout) -> tuple[Limit, ...]:
    """The limits that apply to a layout: of its stack, and of the one that is put over it."""
    stack, outer, _ = parted(layout)
    return stack.in_force() + (outer.in_force() if outer is not None else ())


def case_of(program: Program) -> Case:
    """What limits look at of a program."""
    p = program
    return Case(p.layout, tuple(walk(p.model)), p.steps, p.optimizer, p.dtype, p.layout.compiled is not None)


def takes(program: Program) -> bool:
    """Whether no limit of its stack forbids a program."""
    case = case_of(program)
    return not any(limit.forbids(case) for limit in limits_of(program.layout))
