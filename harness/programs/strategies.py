"""Hypothesis strategies for programs.  What is drawn is legal on its stack; why something is left out is said here.

Simple comes first in every choice, so that failures shrink to fewer ranks, layers, steps and plainer values.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from hypothesis import assume
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from harness.profiles.obeyed import in_force
from harness.programs.claimed import claimed_dtypes, offered, unclaimed
from harness.programs.drawing import EITHER, among
from harness.programs.shapes import Named, Shape, shape_after, walk, weight_shape
from harness.programs.spec import (
    DTYPES,
    EXACT_ACTIVATIONS,
    SMOOTH_ACTIVATIONS,
    Activation,
    Attention,
    Branch,
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
    Option,
    Program,
    Residual,
    Scale,
    Step,
    Tied,
    Twice,
    children,
)
from harness.programs.tp_layouts import tensor_parallel, tp_layouts

WIDTHS = (2, 3, 4, 1, 5, 7, 8)
"""Of layers: divided by few worlds, smaller than some, and one."""
LOW = ("bfloat16", "float16")
"""Dtypes that wider ones are cast to."""

# Strategies that are made anew for each draw cost more than the drawing: these are not, nor those of cached functions.
_COUNTS, _FEW, _SEEDS = st.integers(1, 4), st.integers(1, 2), st.integers(0, 1000)


@dataclass(frozen=True)
class _Rules:
    """What a stack takes."""

    stack: str
    smooth: bool
    """Whether layers and optimizers whose results are rounded are drawn."""
    compiled: bool = False
    any_world: bool = False
    """Whether only that is drawn which means the same on any number of ranks and in any micro-batches."""

    @property
    def tied(self) -> bool:
        return self.stack != "tp_extension"

    @property
    def mixed_dtypes(self) -> bool:
        # FSDP1 flattens parameters of one dtype; FSDP2 wraps each dtype on its own, which a compiled model is spared.
        return self.stack != "tp_extension" and not self.compiled

    @property
    def widths(self) -> tuple[int, ...]:
        """Of linear layers.  FSDP takes no parameters without elements (fsdp_no_elements.py)."""
        return (*WIDTHS, 0) if self.stack == "replicate" else WIDTHS


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
    compiled: Sequence[str] = ("replicate", "replicate_fsdp", "tp_extension"),
) -> Program:
    """Programs for a stack on worlds of these sizes.

    ``smooth``: False for programs whose every result has a good chance to be representable, so that they are compared
    bit for bit; True for those with norms, attention, smooth activations, AdamW and clipping; None for both.
    ``any_world``: only what means the same on any number of ranks, and in any number of micro-batches, as laws need it;
    ``compiled``: the stacks that are compiled, where ``stack`` is dynamo.
    """
    rounded = draw(EITHER) if smooth is None else smooth
    world = draw(among(sorted(worlds)))
    inner = draw(among(compiled)) if stack == "dynamo" else stack
    rules = _Rules(inner, rounded, stack == "dynamo", any_world)
    claims = in_force().claims
    dtype = draw(among(claimed_dtypes(dtypes)))
    model = draw(_models(rules, dtype))
    named = list(walk(model))
    assume(any(_trainable(n) for n in named))
    batch_norm = any(isinstance(n.layer, Norm) and n.layer.kind == "batch" for n in named)
    least = 2 if batch_norm else 1  # there are no statistics of one
    tensor = draw(tensor_parallel(world)) if inner == "tp_extension" else 1
    # What FSDP1 can't do with a plan of more than one tensor-parallel rank is drawn in one of four programs.
    calm = tensor > 1 and draw(among((True, True, True, False)))
    if calm:
        least = max(least, world // tensor)
    thawing = _thawing(named) if inner == "replicate_fsdp" and not any_world else ()
    steps = tuple(draw(_schedules(rules, least, 2 * world + 1, thawing, calm, most_steps)))
    if rules.compiled and inner == "tp_extension":  # compiled_gradients.py: it can't be compiled while it has gradients
        steps = tuple(msgspec.structs.replace(s, rows=s.rows[:1], synced=(), zero="none") for s in steps)
    optimizer = draw(_optimizers(rules, calm))
    if inner == "tp_extension":
        able = [n.name for n in named[rules.compiled :] if _wrappable(n) and "." not in n.name]
        layout = draw(tp_layouts(world, tensor, named, able, steps, optimizer, dtype, compiled=rules.compiled))
    else:
        layout = draw(_layouts(inner, world, named, rules, dtype, steps, same_data=batch_norm))
    if rules.compiled:
        layout = _compiled(layout, draw(_compiles()))
    plain = not {dtype, *layout.dtypes} & set(LOW)
    program = Program(
        model=model,
        layout=layout,
        steps=steps,
        optimizer=optimizer,
        dtype=dtype,
        seed=draw(_SEEDS),
        # Where rounding counts, numbers that don't cancel; training that explodes would show nothing.
        span=0 if rounded else draw(among((1, 2, 3) if plain else (1,))),
        denominator=1 if rounded else draw(among((1, 2, 4) if plain else (1,))),
        sparse=not rounded and draw(among((False, False, True) if plain else (True, True, False))),
        # Batch statistics are those of a part; only where each rank has the whole batch are they those of one device.
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
    """A layer that can stand next in a model."""
    return _layers_or_tied(rules, dtype, shape, _with_weights_for(model, shape) if rules.tied else ())


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
        # torch.compile leaves a module with backward hooks as it is.
        st.builds(Hooked, _square(rules, shape), among(("forward", "before", "backward")[: 3 - rules.compiled])),
    ]
    if len(shape) in (2, 3) and min(shape):
        kernel = among([k for k in (1, 2) if k <= min(shape[1:])])
        choices.append(st.builds(Conv, among(WIDTHS), kernel, EITHER))
    return choices


@functools.cache
def _linear(rules: _Rules, dtype: str) -> SearchStrategy[Layer]:
    return st.builds(
        Linear,
        out=among(rules.widths),
        bias=among((True, False)),
        frozen=EITHER,
        dtype=_own_dtype(rules, dtype),
    )


def _own_dtype(rules: _Rules, dtype: str) -> SearchStrategy[str]:
    """A layer's own dtype where it is not the program's: a wider one, as mixed-precision models have for some."""
    wider = {"bfloat16": "float32", "float16": "float32", "float32": "float64"}.get(dtype, "")
    return among(("", "", "", wider)) if rules.mixed_dtypes else st.just("")


@functools.cache
def _square(rules: _Rules, shape: Shape) -> SearchStrategy[Layer]:
    """A linear layer that keeps the shape."""
    return st.builds(Linear, out=st.just(shape[-1]), bias=among((True, False)))


@functools.cache
def _keeping(rules: _Rules, dtype: str, shape: Shape) -> SearchStrategy[Layer]:
    """A layer without layers inside that keeps the shape."""
    kinds = EXACT_ACTIVATIONS if not rules.smooth else SMOOTH_ACTIVATIONS  # the smooth have no kink to round across
    choices: list[SearchStrategy[Any]] = [
        st.builds(Activation, among(kinds)),
        _square(rules, shape),
        st.just(Mask()),
        st.builds(Scale, among(("plain", "rebound", "per_rank")[: 3 - rules.any_world])),
    ]
    if rules.smooth:
        norms = ("layer", "rms", "batch") if len(shape) < 3 and shape[0] else ("layer", "rms")
        if shape[-1] > 1:  # of one number, only its sign would be left
            choices.append(st.builds(Norm, among(norms)))
        if len(shape) == 2 and shape[1]:
            heads = among([h for h in (1, 2) if shape[1] % h == 0])
            choices.append(st.builds(Attention, heads))
    return st.one_of(choices)


@functools.cache
def _inside(rules: _Rules, dtype: str, shape: Shape) -> SearchStrategy[Layer]:
    """A layer of a container."""
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
    """Layers whose weight another layer can share."""
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
    """``thawing``: layers that may stop, or begin again, to be trained; ``calm``: nothing is clipped or saved."""
    rows = tuple(draw(_rows(least, most)))
    return Step(
        rows=rows,
        synced=tuple(draw(EITHER) for _ in rows[:-1]),
        zero=draw(among(("none", "zero", "keep"))),
        clip=draw(among((0.0, 1.0, 1000.0))) if rules.smooth and not calm else 0.0,
        evaluate=draw(EITHER),
        toggle=draw(among(("", "", *thawing))),
        reload=not calm and draw(EITHER),
    )


def _thawing(named: list[Named]) -> tuple[str, ...]:
    """Layers that may be frozen and thawed: at least one other always trains."""
    linear = [n for n in named if isinstance(n.layer, Linear) and not n.optional]
    if not linear or not linear[0].trains:
        return ()
    shared = _sharing(named)
    return tuple(n.name for n in linear[1:] if n.name not in shared)


@functools.cache
def _optimizers(rules: _Rules, calm: bool) -> SearchStrategy[Optimizer]:
    sgd = st.builds(
        Optimizer,
        kind=st.just("sgd"),
        rate=among((0.0625, 0.25)),
        momentum=among((0.0, 0.5)),
        weight_decay=among((0.0, 0.0, 0.5)),
    )
    adamw = st.builds(Optimizer, kind=st.just("adamw"), rate=st.just(0.01), weight_decay=among((0.0, 0.1)))
    return st.one_of(sgd, adamw) if rules.smooth else sgd


# layouts


@st.composite
def _layouts(
    draw: DrawFn,
    inner: str,
    world: int,
    named: list[Named],
    rules: _Rules,
    dtype: str,
    steps: Sequence[Step],
    same_data: bool,
) -> Layout:
    wrapped: tuple[str, ...] = ()
    tied = _sharing(named)
    own = {n.name for n in named if n.dtype}
    options: dict[str, Option] = {}
    if not rules.any_world and draw(among((False, False, True))):
        options["mesh"] = draw(among(_meshes(world)))
    if not own and dtype != "float64" and draw(among((False, False, False, True))):
        options["recast"] = True
    # A layer that is ignored trains on its rank's part alone, which is right if that is everything, or it is frozen.
    toggled = {step.toggle for step in steps}
    ignorable = [n.name for n in named if _ignorable(n, same_data) and n.name not in tied | toggled]
    # Of an ignored layer's gradients, which are plain, and DTensors clip_grad_norm_ takes no mixture.
    mixed = inner == "replicate_fsdp" and any(step.clip for step in steps)
    if mixed or len([n for n in named if _trainable(n)]) < 2:
        ignorable = [n.name for n in named if n.name in ignorable and not n.trains]
    ignored = draw(among(((), *((name,) for name in ignorable))))
    if ignored:
        options["ignored"] = ignored
    if inner == "replicate":
        options |= draw(_ddp_options(named, rules, steps))
        pieces = _pieces(named)
        # A compiled model whose layers are replicated one by one compiles nothing (docs/findings.md).
        if not rules.compiled and pieces and not tied and not ignored and draw(among((False, False, True))):
            wrapped = pieces
    else:
        uncast = bool(ignored) or any(isinstance(n.layer, Scale) for n in named)
        options |= draw(_fsdp_options(named, world, dtype, steps, bool(own), uncast, same_data or rules.any_world))
        # Parameters of two dtypes can't be in one group; shared ones must be.
        able = [n.name for n in named if _wrappable(n) and not (tied | set(ignored)) & _within(n, named)]
        chosen = draw(st.sets(among(able))) if able else set()
        if rules.compiled:  # hooks break graphs: what is wrapped is not in the root's, and something must be
            chosen -= _within(named[0], named)
        wrapped = tuple(n.name for n in reversed(named) if n.name in chosen | (own - set(ignored)))
    return Layout(stack=inner, world=world, wrapped=wrapped, options=tuple(options.items()))


def _compiled(layout: Layout, how: Compile) -> Layout:
    how = msgspec.structs.replace(
        how,
        dynamic=how.dynamic and not layout.plan,  # compiled_dynamic.py: endless recursion
        fullgraph=how.fullgraph and not layout.wrapped,  # their hooks break the graph
    )
    options = (*layout.options, ("inner", layout.stack))
    return msgspec.structs.replace(layout, stack="dynamo", options=options, compiled=how)


def _meshes(world: int) -> tuple[str, ...]:
    """Meshes of one, two and three dimensions, with and without dimensions of one."""
    found = [f"{world}", f"{world}x1", f"1x{world}", f"1x{world}x1"]
    if world == 4:
        found += ["2x2", "2x1x2"]
    return tuple(found)


def _ignorable(n: Named, same_data: bool) -> bool:
    return isinstance(n.layer, Linear) and not n.optional and (n.layer.frozen or same_data)


@st.composite
def _ddp_options(draw: DrawFn, named: list[Named], rules: _Rules, steps: Sequence[Step]) -> dict[str, Option]:
    found: dict[str, Option] = {}
    branches = {n.layer.when for n in named if isinstance(n.layer, Branch)}
    # replicate_static_unsynced.py: a static graph takes no accumulation without synchronisation.
    accumulated = any(step.accumulates for step in steps)
    static = not accumulated and branches <= {"never"} and not rules.any_world and offered("replicate", "static_graph")
    unused = offered("replicate", "find_unused_parameters")
    if static and draw(among((False, False, False, True))):
        found["static_graph"] = True
    elif bool(branches) or (unused and draw(among((False, False, True)))):
        found["find_unused_parameters"] = True
    if draw(EITHER):
        found["gradient_as_bucket_view"] = True
    # Dynamo's DDPOptimizer refuses buckets below 1 MiB (docs/findings.md).
    if not rules.compiled and draw(EITHER):
        found["bucket_cap_mb"] = 0.0001  # about a hundred bytes: a bucket for every other parameter
    hook = draw(among(("", "", "allreduce_hook", "fp16_compress_hook"))) if offered("replicate", "hook") else ""
    if hook and "static_graph" not in found:  # replicate_static_buckets.py: hooks are told the wrong buckets
        found["hook"] = hook
    # DDP's default is to send rank 0's; PyTorch's replicate() never does (docs/findings.md), and must not be relied on.
    if any(isinstance(n.layer, Scale) and n.layer.kind == "per_rank" for n in named):
        found["broadcast_buffers"] = False
    return found


@st.composite
def _fsdp_options(
    draw: DrawFn,
    named: list[Named],
    world: int,
    dtype: str,
    steps: Sequence[Step],
    own_dtypes: bool,
    uncast: bool,
    same_data: bool,
) -> dict[str, Option]:
    """``uncast``: whether something in the model keeps its dtype when parameters and inputs are cast."""
    found: dict[str, Option] = {}
    if draw(among((False, False, True))):
        found["offload"] = True
    thawed = any(step.toggle for step in steps)
    # fsdp_thawed.py: the dtypes of a group that has been frozen at first are forgotten.
    # fsdp_accumulated_dtype.py: what was not used when others accumulated has another dtype.
    mixed = any(n.optional for n in named) and any(step.accumulates for step in steps)
    castable = dtype in ("float64", "float32") and not own_dtypes and not thawed and not mixed
    castable = castable and offered("replicate_fsdp", "param_dtype")
    if castable and draw(among((False, False, True))):
        # Buffers and ignored layers keep theirs: a product with float32 is no input for a layer of bfloat16.
        if not uncast and not same_data:
            found["param_dtype"] = draw(among(LOW))
            if draw(EITHER):
                found["output_dtype"] = draw(among(("float32", "float64")))
        if draw(EITHER):
            found["reduce_dtype"] = draw(among(("float32", *LOW)))
    reduced = found.get("reduce_dtype") or found.get("param_dtype") or dtype
    own_factor = draw(among(("", "", "", "divide", "sums")))
    if own_factor == "sums":
        found["sums"] = True
    elif own_factor and not same_data and reduced in ("float32", "bfloat16") and not own_dtypes:
        # fsdp_divided_twice.py: in other dtypes, and where sums are forced, it is divided by twice.
        found["divide"] = draw(among((1.0, 2.0, 0.5, float(world))))
    return found


@functools.cache
def _compiles() -> SearchStrategy[Compile]:
    common = {"backend": among(("eager", "aot_eager")), "dynamic": EITHER}
    return st.one_of(
        st.builds(Compile, in_place=EITHER, **common),
        # Hooks of the stacks break graphs; a plain model is one graph.
        st.builds(Compile, first=st.just(True), fullgraph=EITHER, **common),
    )


def _trainable(n: Named) -> bool:
    """Whether a layer has parameters of its own that every backward reaches."""
    return n.trains and not n.optional


def _has_parameters(n: Named) -> bool:
    if isinstance(n.layer, (Residual, Container, Twice, Branch, Hooked)):
        return any(isinstance(inner, (Linear, Conv, Attention, Norm)) for inner in children(n.layer))
    return isinstance(n.layer, (Linear, Conv, Attention, Norm, Embedding))


def _wrappable(n: Named) -> bool:
    """Whether a module can be wrapped on its own: it has a forward, and parameters."""
    callable_ = not (isinstance(n.layer, Container) and n.layer.kind in ("list", "dict"))
    return callable_ and _has_parameters(n)


def _pieces(named: list[Named]) -> tuple[str, ...]:
    """The top-level layers with parameters, if each can be replicated on its own; else ()."""
    top = [n for n in named if "." not in n.name and _has_parameters(n)]
    if not all(_wrappable(n) for n in top):
        return ()
    training = {n.name for n in named if _trainable(n)}
    return tuple(n.name for n in top) if all(training & _within(n, named) for n in top) else ()


def _sharing(named: list[Named]) -> set[str]:
    """Names of layers whose parameters are shared."""
    found: set[str] = set()
    for n in named:
        if isinstance(n.layer, Tied):
            found |= {n.name, n.layer.of}
    return found


def _within(n: Named, named: list[Named]) -> set[str]:
    return {m.name for m in named if m.name == n.name or m.name.startswith(f"{n.name}.")}


__all__ = ["WIDTHS", "programs"]
