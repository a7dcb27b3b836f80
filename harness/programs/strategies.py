"""Hypothesis strategies for programs.

Only programs that are legal on their stack are drawn. Comments say why others are left out. Every choice lists simple
values first, so that failures shrink to fewer ranks, layers and steps, and to plainer values.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from hypothesis import assume
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from harness.profiles.obeyed import in_force
from harness.programs.claimed import claimed_dtypes, fitting_sizes, offered, unclaimed
from harness.programs.drawing import EITHER, among
from harness.programs.options import casts_of
from harness.specs.program import (
    DTYPES,
    EXACT_ACTIVATIONS,
    HOOKS,
    SMOOTH_ACTIVATIONS,
    Activation,
    Attention,
    Branch,
    Checkpointed,
    Compile,
    Container,
    Conv,
    Embedding,
    Hooked,
    Layer,
    Layout,
    Linear,
    Mask,
    Model,
    Norm,
    Optimizer,
    Program,
    Residual,
    Scale,
    Step,
    Tied,
    Twice,
)
from harness.specs.shapes import Named, Shape, shape_after, walk, weight_shape
from harness.stacks import registry
from harness.stacks.drawing import Drawing, sharing, trainable
from harness.stacks.limit import Case, Limit, layer_alone, violated

WIDTHS = (2, 3, 4, 1, 5, 7, 8)
"""Widths of layers: few world sizes divide them, some are smaller than the world, and one is 1."""
LOW = ("bfloat16", "float16")
"""Dtypes that wider ones are cast to."""

# Building a strategy for each draw costs more than drawing from it, so these are built once, like those of cached
# functions.
_COUNTS, _FEW, _SEEDS = st.integers(1, 4), st.integers(1, 2), st.integers(0, 1000)


@dataclass(frozen=True)
class _Rules:
    """The rules for drawing programs for a stack."""

    limits: tuple[Limit, ...]
    """The limits in force."""
    layout: Layout
    """An empty layout of the stack."""
    smooth: bool
    """Whether to draw layers and optimizers whose results are rounded."""
    compiled: bool = False
    any_world: bool = False
    """Whether to draw only what means the same on any number of ranks and in any number of micro-batches."""

    def take(self, layer: Layer, dtype: str) -> bool:
        """Return whether the stack takes a layer, regardless of what is around it."""
        return not violated(self.limits, layer_alone(layer, self.layout, dtype=dtype, compiled=self.compiled))


@st.composite
def programs(
    draw: DrawFn,
    stack: str,
    worlds: Sequence[int] = (1, 2, 3, 4),
    *,
    smooth: bool | None = None,
    most_steps: int = 3,
    dtypes: Sequence[str] = DTYPES,
    any_world: bool = False,
    compiled: Sequence[str] = (),
) -> Program:
    """Draw programs for a stack on those of these world sizes that the machine and the profile allow.

    ``smooth``: False for programs whose results are likely to be representable, so that they are compared bit for bit;
    True for programs with norms, attention, smooth activations, AdamW and clipping; None for both.
    ``any_world``: draw only what means the same on any number of ranks and in any number of micro-batches, as laws need
    it; ``compiled``: the stacks that are compiled if ``stack`` is dynamo; () for all that can be.
    Errors: ValueError if there is no such stack, or if its limits forbid all dtypes.
    """
    rounded = draw(EITHER) if smooth is None else smooth
    world = draw(among(sorted(fitting_sizes(worlds))))
    outer = requested if (requested := registry.stack(stack)).over is not None else None
    under = registry.stack(draw(among(compiled or registry.compilable()))) if outer is not None else requested
    limits = under.in_force() + (outer.in_force() if outer is not None else ())
    rules = _Rules(limits, Layout(under.name, world=1), rounded, outer is not None, any_world)
    claims = in_force().claims
    fitting = [each for each in claimed_dtypes(dtypes) if not _violated_by((), rules, each)]
    if not fitting:
        raise ValueError(f"the stack {stack!r} takes none of the dtypes {', '.join(dtypes)}")
    dtype = draw(among(fitting))
    model = draw(_models(rules, dtype))
    named = tuple(walk(model))
    assume(any(trainable(n) for n in named))
    batch_norm = any(isinstance(n.layer, Norm) and n.layer.kind == "batch" for n in named)
    least = 2 if batch_norm else 1  # one row has no batch statistics
    tensor = draw(among(under.tensor_sizes(world)))
    case = Case(Layout(under.name, world, tensor), named, dtype=dtype, compiled=rules.compiled)
    # With more than one tensor-parallel rank, only one program in four does what is not possible with a plan, such as
    # clipping.
    calm = tensor > 1 and draw(among((True, True, True, False)))
    if calm:
        least = max(least, world // tensor)
    thaws = not any_world and not violated(limits, replace(case, steps=(Step(toggle=named[0].name),)))
    thawing = _thawing(named) if thaws else ()
    steps = tuple(draw(_schedules(rules, least, 2 * world + 1, thawing, calm, most_steps)))
    calmer = tuple(msgspec.structs.replace(s, rows=s.rows[:1], synced=(), zero="none") for s in steps)
    if _violated_by(steps, rules, dtype) - _violated_by(calmer, rules, dtype):
        steps = calmer
    optimizer = draw(_optimizers(rules, dtype, calm))
    drawing = Drawing(
        replace(case, steps=steps, optimizer=optimizer),
        limits,
        among=lambda values: draw(among(tuple(values))),
        some=lambda names: draw(st.sets(among(tuple(names)))) if names else set(),
        offers=lambda option: offered(under, option),
        any_world=any_world,
        same_data=batch_norm,
    )
    under.draw(drawing)
    if outer is not None and outer.over is not None:
        outer.over(drawing, draw(_compiles()))
    layout = drawing.case.layout
    assume(not violated(limits, drawing.case))
    plain = not {dtype, *casts_of(layout)} & set(LOW)
    program = Program(
        model=model,
        layout=layout,
        steps=steps,
        optimizer=optimizer,
        dtype=dtype,
        seed=draw(_SEEDS),
        # If results are rounded, draw numbers that don't cancel each other. Training that explodes would show nothing.
        span=0 if rounded else draw(among((1, 2, 3) if plain else (1,))),
        denominator=1 if rounded else draw(among((1, 2, 4) if plain else (1,))),
        sparse=not rounded and draw(among((False, False, True) if plain else (True, True, False))),
        # Ranks compute batch statistics of their parts, which are those of one device only if each rank has the whole
        # batch.
        same_data=batch_norm,
    )
    assume(not unclaimed(program, claims))
    return program


# models


@functools.cache
@st.composite
def _models(draw: DrawFn, rules: _Rules, dtype: str) -> Model:
    tokens = draw(among((0, 0, 5)))
    length = draw(among((0, 0, 3)))
    layers: list[Layer] = []
    if tokens:
        inputs: Shape = (length,) if length else (2,)
        layers.append(Embedding(draw(among(WIDTHS))))
    else:
        width = draw(among(WIDTHS))
        inputs = (length, width) if length else (width,)
        if length and draw(EITHER):
            inputs = (*inputs, 3)
    model = Model(inputs, tuple(layers), tokens)
    shape = (*inputs, layers[0].width) if layers and isinstance(layers[0], Embedding) else inputs
    for _ in range(draw(_COUNTS)):
        layer = draw(_layers(rules, dtype, model, shape))
        shape = shape_after(layer, shape, model)
        model = Model(inputs, (*model.layers, layer), tokens)
    return model


def _layers(rules: _Rules, dtype: str, model: Model, shape: Shape) -> SearchStrategy[Layer]:
    """Return a strategy for layers that can come next in a model."""
    return _layers_or_tied(rules, dtype, shape, _with_weights_for(model, shape) if rules.take(Tied(""), dtype) else ())


@functools.lru_cache(1000)
def _layers_or_tied(rules: _Rules, dtype: str, shape: Shape, names: tuple[str, ...]) -> SearchStrategy[Layer]:
    tied = [st.builds(Tied, among(names), EITHER)] if names else []
    return st.one_of([*_untied(rules, dtype, shape), *tied])


@functools.cache
def _untied(rules: _Rules, dtype: str, shape: Shape) -> list[SearchStrategy[Any]]:
    keeping = _keeping(rules, dtype, shape)
    choices: list[SearchStrategy[Any]] = [
        _linear(rules, dtype),
        keeping,
        st.builds(Residual, st.lists(keeping, min_size=1, max_size=2).map(tuple)),
        st.builds(Twice, _square(rules, shape)),
        _containers(rules, dtype, shape),
        st.builds(Branch, _square(rules, shape), among(("even", "odd", "never"))),
        st.builds(Checkpointed, _square(rules, shape)),
        st.builds(Hooked, _square(rules, shape), among(_hooks(rules, dtype))),
    ]
    if len(shape) in (2, 3) and min(shape):
        kernel = among([k for k in (1, 2) if k <= min(shape[1:])])
        choices.append(st.builds(Conv, among(WIDTHS), kernel, EITHER))
    return choices


def _hooks(rules: _Rules, dtype: str) -> list[str]:
    return [kind for kind in HOOKS if rules.take(Hooked(Linear(1), kind), dtype)]


@functools.cache
def _linear(rules: _Rules, dtype: str) -> SearchStrategy[Layer]:
    return st.builds(
        Linear,
        out=among([out for out in (*WIDTHS, 0) if rules.take(Linear(out), dtype)]),
        bias=among((True, False)),
        frozen=EITHER,
        dtype=_own_dtype(rules, dtype),
    )


def _own_dtype(rules: _Rules, dtype: str) -> SearchStrategy[str]:
    """Return a strategy for a layer's own dtype: "", or wider than the program's, as in mixed precision."""
    wider = {"bfloat16": "float32", "float16": "float32", "float32": "float64"}.get(dtype, "")
    return among(("", "", "", wider)) if wider and rules.take(Linear(1, dtype=wider), dtype) else st.just("")


@functools.cache
def _square(rules: _Rules, shape: Shape) -> SearchStrategy[Layer]:
    """Return a strategy for linear layers that keep the shape."""
    return st.builds(Linear, out=st.just(shape[-1]), bias=among((True, False)))


@functools.cache
def _keeping(rules: _Rules, dtype: str, shape: Shape) -> SearchStrategy[Layer]:
    """Return a strategy for layers that keep the shape and have no layers inside."""
    kinds = EXACT_ACTIVATIONS if not rules.smooth else SMOOTH_ACTIVATIONS  # no kink that rounding errors could cross
    choices: list[SearchStrategy[Any]] = [
        st.builds(Activation, among(kinds)),
        _square(rules, shape),
        st.just(Mask()),
        st.builds(Scale, among(("plain", "rebound", "per_rank")[: 3 - rules.any_world])),
    ]
    if rules.smooth:
        norms = ("layer", "rms", "batch") if len(shape) < 3 and shape[0] else ("layer", "rms")
        if shape[-1] > 1:  # of a single number, at most the sign would be left
            choices.append(st.builds(Norm, among(norms)))
        if len(shape) == 2 and shape[1]:
            heads = among([h for h in (1, 2) if shape[1] % h == 0])
            choices.append(st.builds(Attention, heads))
    return st.one_of(choices)


@functools.cache
def _inside(rules: _Rules, dtype: str, shape: Shape) -> SearchStrategy[Layer]:
    """Return a strategy for layers in the body of a container."""
    return st.one_of(_linear(rules, dtype), _keeping(rules, dtype, shape))


@functools.cache
@st.composite
def _containers(draw: DrawFn, rules: _Rules, dtype: str, shape: Shape) -> Layer:
    body: list[Layer] = []
    for _ in range(draw(_FEW)):
        layer = draw(_inside(rules, dtype, shape))
        shape = shape_after(layer, shape, Model(shape, ()))
        body.append(layer)
    return Container(draw(among(("sequential", "list", "dict"))), tuple(body))


def _with_weights_for(model: Model, shape: Shape) -> tuple[str, ...]:
    """Return the names of layers whose weight another layer can share."""
    return tuple(
        n.name
        for n in walk(model)
        if (weight_shape(n, model) or (0, -1))[1] == shape[-1] and not n.optional and not n.dtype
    )


# schedules


@functools.cache
def _schedules(
    rules: _Rules, least: int, most: int, thawing: tuple[str, ...], calm: bool, most_steps: int
) -> SearchStrategy[list[Step]]:
    return st.lists(_steps(rules, least, most, thawing, calm), min_size=1, max_size=most_steps)


@functools.cache
def _rows(least: int, most: int) -> SearchStrategy[list[int]]:
    return st.lists(st.integers(least, most), min_size=1, max_size=3)


@functools.cache
@st.composite
def _steps(draw: DrawFn, rules: _Rules, least: int, most: int, thawing: Sequence[str], calm: bool) -> Step:
    """Draw a step. ``thawing``: layers that may be frozen or thawed; ``calm``: whether nothing is clipped or saved."""
    rows = tuple(draw(_rows(least, most)))
    return Step(
        rows=rows,
        synced=tuple(draw(EITHER) for _ in rows[:-1]),
        zero=draw(among(("none", "zero", "keep"))),
        clip=draw(among((0.0, 1.0, 1000.0))) if rules.smooth and not calm else 0.0,
        clip_values=draw(among((0.0, 0.0, 0.25 if rules.smooth else 1.0))) if not calm else 0.0,
        abandoned=draw(among(("", "", "", "loss", "layer"))),
        averaged=draw(among((False, False, False, False, True))),
        evaluate=draw(EITHER),
        toggle=draw(among(("", "", *thawing))),
        reload=not calm and draw(EITHER),
    )


def _violated_by(steps: tuple[Step, ...], rules: _Rules, dtype: str) -> frozenset[Limit]:
    """Return the limits that a schedule violates with any layout and model."""
    return violated(rules.limits, Case(rules.layout, steps=steps, dtype=dtype, compiled=rules.compiled))


def _thawing(named: Sequence[Named]) -> tuple[str, ...]:
    """Return the layers that may be frozen and thawed, which leaves at least one other that always trains."""
    linear = [n for n in named if isinstance(n.layer, Linear) and not n.optional]
    if not linear or not linear[0].trains:
        return ()
    shared = sharing(named)
    return tuple(n.name for n in linear[1:] if n.name not in shared)


@functools.cache
def _optimizers(rules: _Rules, dtype: str, calm: bool) -> SearchStrategy[Optimizer]:
    decay = among((0.0, 0.0, 0.0, 0.5))
    sgd = st.builds(
        Optimizer,
        kind=st.just("sgd"),
        rate=among((0.0625, 0.25)),
        momentum=among((0.0, 0.5)),
        weight_decay=among((0.0, 0.0, 0.5)),
        decay=decay,
        form=_forms(rules, dtype, "sgd", calm),
    )
    adamw = st.builds(
        Optimizer,
        kind=st.just("adamw"),
        rate=st.just(0.01),
        weight_decay=among((0.0, 0.1)),
        decay=decay,
        form=_forms(rules, dtype, "adamw", calm),
    )
    return st.one_of(sgd, adamw) if rules.smooth else sgd


def _forms(rules: _Rules, dtype: str, kind: str, calm: bool) -> SearchStrategy[str]:
    forms = ["each", "foreach"]
    optimizer = Optimizer(kind, form="fused")
    case = Case(rules.layout, optimizer=optimizer, dtype=dtype, compiled=rules.compiled)
    # With a plan, parameters are DTensors, which fused SGD does not take.
    if not (calm and kind == "sgd") and not violated(rules.limits, case):
        forms.append("fused")
    return among(forms)


@functools.cache
def _compiles() -> SearchStrategy[Compile]:
    common = {"backend": among(("eager", "aot_eager")), "dynamic": EITHER}
    return st.one_of(
        st.builds(Compile, in_place=EITHER, **common),
        # Hooks of the stacks break graphs, but a plain model is one graph.
        st.builds(Compile, first=st.just(True), fullgraph=EITHER, **common),
    )


__all__ = ["WIDTHS", "programs"]
