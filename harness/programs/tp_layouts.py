"""Layouts for FSDP1 over tensor parallelism.  Every limit that is kept is said here; those that are defects of PyTorch
are in ``docs/findings.md``, and the name of the script there is given."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import assume
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from harness.programs.drawing import among
from harness.programs.shapes import Named
from harness.programs.spec import (
    Branch,
    Conv,
    Embedding,
    Hooked,
    Layout,
    Linear,
    Norm,
    Optimizer,
    Option,
    Scale,
    Step,
    children,
)

HYBRID = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
"""Strategies that shard among some ranks, and replicate among others."""


def tensor_parallel(world: int) -> SearchStrategy[int]:
    """How many ranks share a layer; often fewer than there are, so that others share the batch."""
    divided = [t for t in (2, 3) if world % t == 0 and t < world]
    return among(sorted([1, *2 * divided, world]))


@st.composite
def tp_layouts(
    draw: DrawFn,
    world: int,
    tensor: int,
    named: Sequence[Named],
    able: Sequence[str],
    steps: Sequence[Step],
    optimizer: Optimizer,
    dtype: str,
    *,
    compiled: bool = False,
) -> Layout:
    """``tensor``: how many ranks share a layer; ``able``: names of the layers that can be wrapped on their own."""
    data = world // tensor
    strategy = draw(among(("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", *HYBRID)))
    chosen = draw(st.sets(among(list(able)))) if able else set()
    wrapped = tuple(n.name for n in reversed(named) if n.name in chosen)
    plan: list[tuple[str, str]] = []
    for n in named:
        styles = _styles(n, tensor, data, steps, optimizer, dtype)
        if _inward(n, named):  # nobody reads the gradient of its input, or waits for the collective that makes it
            styles = tuple(style for style in styles if style != "rows")
        if len(styles) > 1 and (style := draw(among(styles))):
            plan.append((n.name, style))

    if dtype == "float64" and any(step.clip for step in steps):
        strategy = "NO_SHARD"  # tp_clip_float64.py: norms are computed in float32 and no wider gradients are taken
    # tp_idle_unit.py, tp_idle_gradient.py: what was flattened together loses its gradients, or its parameters, where a
    # backward leaves all of it out.
    once = _once(steps)
    if _idle_units(named, wrapped) and not (once and strategy != "NO_SHARD" and data > 1):
        wrapped = ()

    if not once and _one_element(named, plan, wrapped, tensor):
        strategy = "NO_SHARD"  # tp_one_element.py: gradients do not add up where all of them are one number

    # Without original parameters FSDP1 flattens only what requires gradients alike.
    frozen = any(isinstance(n.layer, Linear) and n.layer.frozen for n in named)
    original = frozen or compiled or draw(among((True, False)))  # torch.compile needs them
    sharded = data > 1 and strategy != "NO_SHARD"
    if (
        original
        and sharded
        and dtype != "float32"
        and not _gradients_everywhere(named, plan, wrapped, tensor, data, dtype)
    ):
        # tp_gradient_dtype.py: a rank without gradients of its own gathers float32.
        strategy, original, sharded = ("NO_SHARD", True, False) if frozen or compiled else (strategy, False, sharded)
        if not sharded and _idle_units(named, wrapped):
            wrapped = ()  # tp_idle_unit.py: now nothing is sharded
    accumulated = any(step.accumulates for step in steps)
    if original and plan and (accumulated or not sharded):
        # tp_no_sync.py, tp_no_shard.py: with tensor-parallel layers that takes flat parameters.
        plan, original = ([], True) if frozen or compiled else (plan, False)
    # A flat parameter has gradients for all of it or none: what nothing used has zeros, and optimizers act on zeros.
    acts = optimizer.kind != "sgd" or optimizer.momentum or optimizer.weight_decay
    assume(not (acts and any(n.optional for n in named)))
    options: dict[str, Option] = {"use_orig_params": original, "strategy": strategy}
    if strategy in HYBRID:
        # tp_one_shard.py: replicas of a single shard are never averaged.
        options["replicas"] = draw(among([r for r in (1, 2) if data % r == 0 and (data > r or r == 1)]))
    # FSDP1's CPUOffload pins memory, which takes an accelerator.
    if dtype == "float32" and not compiled:
        # Buffers are cast as well, and stay so.
        if not any(isinstance(n.layer, (Scale, Norm)) for n in named) and draw(among((False, False, True))):
            options["param_dtype"] = draw(among(("bfloat16", "float16")))
        if draw(among((False, False, True))):
            options["reduce_dtype"] = draw(among(("bfloat16", "float16", "float32")))
    return Layout(
        stack="tp_extension",
        world=world,
        tensor=tensor,
        wrapped=wrapped,
        plan=tuple(plan),
        options=tuple(options.items()),
    )


def takes(layout: Layout, named: Sequence[Named], steps: Sequence[Step], optimizer: Optimizer, dtype: str) -> bool:
    """Whether such a layout could have been drawn: laws make programs of others, and must keep to the same limits."""
    data = layout.world // layout.tensor
    options = dict(layout.options)
    original = bool(options.get("use_orig_params", True))
    sharded = data > 1 and options.get("strategy") != "NO_SHARD"
    by_name = {n.name: n for n in named}
    if any(
        how not in _styles(by_name[name], layout.tensor, data, steps, optimizer, dtype) for name, how in layout.plan
    ):
        return False
    if dtype == "float64" and any(step.clip for step in steps) and options.get("strategy") != "NO_SHARD":
        return False
    once = _once(steps)
    if _idle_units(named, layout.wrapped) and not (once and sharded):
        return False
    if sharded and not once and _one_element(named, layout.plan, layout.wrapped, layout.tensor):
        return False
    if not original:
        return not any(isinstance(n.layer, Linear) and n.layer.frozen for n in named)
    everywhere = _gradients_everywhere(named, layout.plan, layout.wrapped, layout.tensor, data, dtype)
    if sharded and dtype != "float32" and not everywhere:
        return False
    accumulated = any(step.accumulates for step in steps)
    return not (layout.plan and (accumulated or not sharded))


def _styles(
    n: Named, tensor: int, data: int, steps: Sequence[Step], optimizer: Optimizer, dtype: str
) -> tuple[str, ...]:
    """The styles that a layer may have; "" leaves it whole."""
    if not isinstance(n.layer, Linear) or n.layer.frozen:  # tp_frozen.py: it would be trained
        return ("",)
    reloaded = any(step.reload for step in steps)
    if tensor > 1 and reloaded and (optimizer.momentum or optimizer.kind != "sgd"):
        return ("",)  # tp_optimizer_state.py: states come back wrong, or not at all
    if tensor > 1 and any(step.clip for step in steps):
        return ("",)  # tp_clipping.py: each rank clips by another norm
    least = min(min(step.rows) for step in steps)
    if len(n.before) > 1 and least < data:
        return ("",)  # tp_empty_sequences.py: a rank without rows fails or hangs
    found = []
    if _takes(n.layer.out, tensor, reloaded) and n.layer.out > 1:  # tp_one_feature.py: no gradient of the bias
        found.append("columns")
    # Every rank adds its share of the bias, and a third is not representable.
    extent = n.before[-1]
    if extent > 1 and _takes(extent, tensor, reloaded) and (tensor & (tensor - 1) == 0 or not n.layer.bias):
        found.append("rows")
    return (*found, "")


def _inward(n: Named, named: Sequence[Named]) -> bool:
    """Whether a layer has a backward hook, which the gradient of its input is made for."""
    hooked = (m for m in named if isinstance(m.layer, Hooked) and m.layer.kind == "backward")
    return any(n.name.startswith(f"{outer.name}.") for outer in hooked)


def _takes(extent: int, tensor: int, reloaded: bool) -> bool:
    """Whether a dimension of this extent can be divided among ``tensor`` ranks."""
    most = -(-extent // tensor)
    # tp_empty_shard.py: every rank must have something.  tp_uneven_state.py: for state dicts all must have as much.
    return -(-extent // most) == tensor and (extent % tensor == 0 or not reloaded)


def _unit(n: Named, wrapped: Sequence[str]) -> str:
    """The wrapped layer that a layer's parameters are flattened with; "" for the whole model's."""
    return next((name for name in wrapped if n.name == name or n.name.startswith(f"{name}.")), "")


def _once(steps: Sequence[Step]) -> bool:
    """Whether gradients are made anew by every backward, and never added to."""
    return all(len(step.rows) == 1 and step.zero == "none" for step in steps)


def _idle_units(named: Sequence[Named], wrapped: Sequence[str]) -> bool:
    """Whether some backward may leave out all that was flattened together."""
    reached = {_unit(n, wrapped) for n in named if not n.optional and n.trains}
    return any(_unit(n, wrapped) not in reached for n in named if n.trains or isinstance(n.layer, Linear))


def _gradients_everywhere(
    named: Sequence[Named],
    plan: Sequence[tuple[str, str]],
    wrapped: Sequence[str],
    tensor: int,
    data: int,
    dtype: str,
) -> bool:
    """Whether every rank is sure to have gradients in its shard of each flat parameter."""
    for n in named:
        if isinstance(n.layer, Branch) or (isinstance(n.layer, Linear) and (n.layer.frozen or n.optional)):
            return False
    sizes = _least_sizes(named, plan, wrapped, tensor)
    # Between parameters there is padding to 16 bytes, at the end to as many elements as there are ranks.
    enough = data * (16 // getattr(torch, dtype).itemsize + data)
    return all(size >= enough for unit, size in sizes.items() if unit or size)


def _least_sizes(
    named: Sequence[Named], plan: Sequence[tuple[str, str]], wrapped: Sequence[str], tensor: int
) -> dict[str, int]:
    """How many elements a rank has at least of what is flattened together, by the wrapped layer's name."""
    sizes, styles = dict.fromkeys((*wrapped, ""), 0), dict(plan)
    for n in named:
        sizes[_unit(n, wrapped)] += _least_elements(n, tensor, styles.get(n.name, ""))
    return sizes


def _one_element(named: Sequence[Named], plan: Sequence[tuple[str, str]], wrapped: Sequence[str], tensor: int) -> bool:
    """Whether all that is flattened together may be one number."""
    return 1 in _least_sizes(named, plan, wrapped, tensor).values()


def _least_elements(n: Named, tensor: int, style: str) -> int:
    """How many elements a rank has at least of a layer's own weight; ``style``: how tensor-parallel ranks share it."""
    if children(n.layer):
        return 0
    if isinstance(n.layer, Linear):
        outputs, inputs = n.layer.out, n.before[-1]
        return outputs // (tensor if style == "columns" else 1) * (inputs // (tensor if style == "rows" else 1))
    if isinstance(n.layer, Conv):
        return n.layer.out * n.before[0]
    if isinstance(n.layer, Norm):
        return n.before[0 if n.layer.kind == "batch" else -1]
    return n.layer.width if isinstance(n.layer, Embedding) else 0
