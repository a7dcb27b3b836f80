"""How much a program asks of one device, estimated from above without executing anything."""

from __future__ import annotations

import math
from dataclasses import dataclass

from harness.specs.program import Attention, Conv, Embedding, Linear, Model, Norm, Program, Step, Twice
from harness.specs.shapes import Named, walk


@dataclass(frozen=True)
class Cost:
    """What one device does in a whole run."""

    calls: int
    """Of layers, in all forwards together."""
    elements: int
    """Numbers that are computed, and kept for comparison."""
    products: int
    """Multiplications, forward and backward."""


@dataclass(frozen=True)
class _Layers:
    """The layers of a model, added up; ``computed`` and ``products`` for one row."""

    calls: int
    parameters: int
    computed: int
    products: int
    inputs: int
    outputs: int


def cost(program: Program) -> Cost:
    """Estimate what a whole run costs.  Errors: ValueError where a layer can't stand where it is."""
    one = _layers(program.model)
    calls = elements = products = 0
    for step in program.steps:
        rows, drawn = _rows(step)
        forwards = len(step.rows) + step.evaluate
        # Whole gradients are kept after each micro-batch; parameters, two states of the optimizer after each step.
        kept = one.parameters * (len(step.rows) + 3 * (1 + step.reload))
        calls += forwards * one.calls
        elements += rows * one.computed + drawn * (one.inputs + one.outputs) + kept
        products += 3 * rows * one.products + kept
    return Cost(calls, elements + one.parameters, products)


def _rows(step: Step) -> tuple[int, int]:
    """How many rows go through the model in a step, and for how many data is made: slices are made from all rows."""
    rows = sum(step.rows)
    evaluated = step.rows[0] if step.evaluate else 0
    return rows + evaluated, (rows * len(step.rows) if step.joint else rows) + evaluated


def _layers(model: Model) -> _Layers:
    calls = parameters = computed = products = 0
    times: dict[str, int] = {}
    shape = model.inputs
    for n in walk(model):
        above = n.name.rpartition(".")[0]
        outer = times.get(above, 1)
        times[n.name] = 2 * outer if isinstance(n.layer, Twice) else outer
        own, made, multiplied = _of(n, model)
        parameters += own
        calls += outer
        computed += outer * made
        products += outer * multiplied
        if not above:
            shape = n.after
    return _Layers(calls, parameters, computed, products, math.prod(model.inputs), math.prod(shape))


def _of(n: Named, model: Model) -> tuple[int, int, int]:
    """A layer's own parameters; and for one row, the numbers that it computes, and its multiplications."""
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
    # What is tied multiplies as the layer does whose weight it has; every other function is of each element.
    return own, max(before, after), before * (n.after[-1] if n.after else 1)
