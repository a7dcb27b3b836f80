"""A stack as programs see it: how it puts a layout on ranks, its options and promises, and how layouts are drawn.

The file of each stack has a :class:`Stack` named ``STACK``, and the functions that it refers to.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, TypeAlias

from msgspec import Meta
from torch import nn

from harness.specs import limits
from harness.specs.program import DTYPES, Compile, Data, LayerName, Layout, Option, one_of
from harness.stacks.drawing import Drawing, draw_nothing
from harness.stacks.limit import Case, Limit, violated
from harness.stacks.training import Handle

Options = Mapping[str, Option]
NONE: Options = MappingProxyType({})


Dtype: TypeAlias = Annotated[str, one_of("", *DTYPES)]
"""The name of a dtype, or ""."""
Layers: TypeAlias = Annotated[tuple[LayerName, ...], Meta(max_length=limits.NAMES)]
Mesh: TypeAlias = Annotated[str, Meta(pattern=r"^([1-9][0-9]{0,3}(x[1-9][0-9]{0,3}){0,7})?\Z")]
"""The shape of a mesh, such as ``2x1x2``; empty for none."""


class NoOptions(Data, frozen=True):
    """The options of a stack that has none."""


@dataclass(frozen=True)
class Promises:
    """What a stack shows of a run, and how it behaves apart from the numbers."""

    gradients: bool = True
    """Whether whole gradients can be read after a synchronized backward."""
    states: bool = True
    """Whether whole states of the optimizer can be read."""
    zeros_for_unused: bool = False
    """Whether a parameter that no micro-batch has used may have a gradient of zeros."""
    whole_parameters: bool = True
    """Whether the model's own parameters keep their shapes, and gradients stay in them."""
    unsynced_collectives: int = 0
    """The maximum number of collectives over data-parallel ranks in a backward without synchronization."""
    frees_model: bool = True
    """Whether nothing keeps the model in memory after a run."""
    frees_groups: bool = True
    """Whether process groups are destroyed along with the model, and with them their backend's threads."""


def _promises(layout: Layout) -> Promises:
    return Promises()


def _wrapped(layout: Layout) -> tuple[list[str], dict[str, Any]]:
    return [*layout.wrapped, ""], {}


def _taken(layout: Layout, options: Any) -> None:
    return None


def _no_casts(options: Options) -> set[str]:
    return set()


def _uncast(options: Options) -> str:
    return ""


def _merged(options: Options, changed: Options) -> dict[str, Option]:
    return {**options, **changed}


def _whole_world(world: int) -> Sequence[int]:
    return (1,)


def require_ranks(mesh: str, world: int) -> None:
    """Require that a mesh, if one is given, has all ranks. Errors: ValueError."""
    if mesh and math.prod(map(int, mesh.split("x"))) != world:
        raise ValueError(f"a mesh of {mesh} has not {world} ranks")


def averages_apart(case: Case) -> Options | None:
    """Return options with which one rank has the bits of torch alone; None if the schedule adds up in another order.

    For stacks that accumulate averaged gradients separately from others.
    """
    every = not case.accumulates
    last = all(sum(step.averages) == 1 and step.zero != "keep" for step in case.steps)
    return NONE if every or last else None


@dataclass(frozen=True, eq=False)
class Stack:
    """A stack. Only ``name`` and ``apply`` have no default."""

    name: str
    apply: Callable[..., nn.Module]
    """Puts a model on ranks: ``apply(party, model, wrapped, **options)`` returns what is called instead of the model.
    It is a function ``on_<name>`` at the top level of its module. A reproducer contains it and everything in its module
    that it uses, so from Concord it imports only names of :mod:`harness.stacks.training`."""
    options: type[Data] = NoOptions
    """Options of layouts: names of keyword arguments of ``apply``, with the types of their values and defaults."""
    layers: tuple[str, ...] = ()
    """The options that name layers."""
    arguments: Callable[[Layout], tuple[list[str], dict[str, Any]]] = _wrapped
    """Returns the layers that ``apply`` wraps, and keyword arguments that are not options of the layout."""
    check: Callable[[Layout, Any], None] = _taken
    """Raises ValueError if a layout and its typed options do not fit together."""
    tensor_parallel: bool = False
    """Whether layouts have ``tensor`` and ``plan``."""
    casts: Callable[[Options], set[str]] = _no_casts
    """Returns the dtypes to which options cast parameters, gradients, or what is sent."""
    output_dtype: Callable[[Options], str] = _uncast
    """Returns the dtype to which outputs of the model are cast; empty if they are not."""
    promises: Callable[[Layout], Promises] = _promises
    handle: type[Handle] = Handle
    """The type of the handle that ``apply`` gives to the party."""

    limits: tuple[Limit, ...] = ()
    features: Options = field(default_factory=dict)
    """The features in a profile's claims, by the options that belong to them."""
    claims: Callable[[Options], Sequence[str]] = field(default=lambda options: ())
    """Returns more features, which depend on the options' values."""
    draw: Callable[[Drawing], None] = draw_nothing
    """Draws layout and options."""
    tensor_sizes: Callable[[int], Sequence[int]] = _whole_world
    """Returns the numbers of ranks that may share a layer in a world of some size, to draw from."""
    compilable: bool = False
    """Whether ``dynamo`` draws this stack, compiled."""
    over: Callable[[Drawing, Compile], None] | None = None
    """For a stack that is put over another, which its option ``inner`` names: puts it over a layout that was drawn."""

    flat: tuple[Options, Options] | None = None
    """The options of two layouts on four ranks that must give the same run (the law ``flattened``)."""
    spanning: Callable[[Options, Options], dict[str, Option]] = _merged
    """Returns the options for another number of ranks, with changes."""
    alone: Callable[[Case], Options | None] = averages_apart
    """Returns changes of options with which one rank has the bits of torch alone (the law ``single``), or None."""
    resuming: tuple[Limit, ...] = ()
    """Limits on programs that are finished in another world (the law ``resumed``)."""

    def __post_init__(self) -> None:
        if not self.name.isidentifier() or self.apply.__name__ != f"on_{self.name}":
            raise ValueError(f"the function of the stack {self.name!r} is on_{self.name}, not {self.apply.__name__}")

    def in_force(self) -> tuple[Limit, ...]:
        """Return the limits that apply to the running torch."""
        return tuple(limit for limit in self.limits if limit.applies())

    def takes(self, case: Case) -> bool:
        """Return whether no limit forbids a case."""
        return not violated(self.in_force(), case)

    @functools.cached_property
    def option_names(self) -> tuple[str, ...]:
        """The names of the options."""
        return self.options.__struct_fields__
