"""An upper estimate of what a program costs on one device, computed without executing it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from harness.specs.program import Attention, Checkpointed, Conv, Embedding, Linear, Model, Norm, Program, Step, Twice
from harness.specs.shapes import Named, walk


@dataclass(frozen=True)
class Cost:
    """The cost of a whole run on one device."""

    calls: int
    """Calls of layers, in all forwards together."""
    elements: int
    """Numbers that are computed, or kept for comparison."""
    products: int
    """Multiplications, in forwards and backwards."""


@dataclass(frozen=True)
class _Layers:
    """Sums over the layers of a model. ``computed`` and ``products`` are for one row."""

    calls: int
    parameters: int
    computed: int
    products: int
    inputs: int
    outputs: int


def cost(program: Program) -> Cost:
    """Estimate the cost of a whole run. Errors: ValueError if a layer can't be where it is."""
    layers = _layers(program.model)
    calls = elements = products = 0
    for step in program.steps:
        rows, drawn = _rows(step)
        forwards = len(step.rows) + step.evaluate + step.averaged + bool(step.abandoned)
        # After each micro-batch, whole gradients are kept. After each step and each reload, parameters and two states
        # of the optimizer are kept.
        kept = layers.parameters * (len(step.rows) + 3 * (1 + step.reload) + 2 * step.averaged)
        calls += forwards * layers.calls
        elements += rows * layers.computed + drawn * (layers.inputs + layers.outputs) + kept
        products += 3 * rows * layers.products + kept
    return Cost(calls, elements + layers.parameters, products)


def _rows(step: Step) -> tuple[int, int]:
    """Return how many rows pass through the model in a step, and how many rows of data are made.

    Each slice of a joint batch makes all of its rows.
    """
    rows = sum(step.rows)
    evaluated = step.rows[0] * (step.evaluate + step.averaged + bool(step.abandoned))
    return rows + evaluated, (rows * len(step.rows) if step.joint else rows) + evaluated


def _layers(model: Model) -> _Layers:
    calls = parameters = computed = products = 0
    times: dict[str, int] = {}
    shape = model.inputs
    for n in walk(model):
        above = n.name.rpartition(".")[0]
        outer = times.get(above, 1)
        times[n.name] = 2 * outer if isinstance(n.layer, (Twice, Checkpointed)) else outer
        own, made, multiplied = _of(n, model)
        parameters += own
        calls += outer
        computed += outer * made
        products += outer * multiplied
        if not above:
            shape = n.after
    return _Layers(calls, parameters, computed, products, math.prod(model.inputs), math.prod(shape))


def _of(n: Named, model: Model) -> tuple[int, int, int]:
    """Return a layer's numbers of own parameters and, for one row, of computed values and of multiplications."""
    layer, before, after = n.layer, math.prod(n.before), math.prod(n.after)
    if isinstance(layer, Linear):
        return (n.before[-1] + 1) * layer.out, after, before * layer.out
    if isinstance(layer, Conv):
        weight = n.before[0] * layer.kernel ** (len(n.before) - 1)
        return (weight + 1) * layer.out, after, after * weight
    if isinstance(layer, Embedding):
        return model.tokens * layer.width, after, after
    if isinstance(layer, Attention):
        length, width = n.before
        pairs = length * length
        computed = 5 * after + 3 * layer.heads * pairs
        return 4 * (width + 1) * width, computed, 4 * before * width + 2 * pairs * width
    own = 2 * max(n.before) if isinstance(layer, Norm) else 0
    # A tied layer multiplies like the layer that has its weight. All other functions are elementwise.
    return own, max(before, after), before * (n.after[-1] if n.after else 1)
