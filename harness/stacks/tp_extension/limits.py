"""The limits of FSDP1 over tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from harness.specs.program import (
    Branch,
    Checkpointed,
    Conv,
    Embedding,
    Hooked,
    Layer,
    Linear,
    Norm,
    Scale,
    Step,
    Tied,
    children,
)
from harness.specs.shapes import Named
from harness.stacks.limit import FUSED_SGD, STAYS_FROZEN, Case, Limit, defect, fused_sgd

HYBRID = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
"""Strategies that shard among some ranks and replicate among others."""


def hybrid(case: Case) -> bool:
    """Return whether shards are replicated."""
    return case.options.get("strategy") in HYBRID


def sharded(case: Case) -> bool:
    """Return whether several ranks share a flat parameter."""
    return case.data > 1 and case.options.get("strategy") != "NO_SHARD"


def original(case: Case) -> bool:
    """Return whether the wrapped model shows its original parameters."""
    return case.options.get("use_orig_params", True) is not False


def _planned(forbids: Callable[[Case, Named, str], bool]) -> Callable[[Case], bool]:
    """Return a condition on cases: ``forbids`` holds for some layer of the plan and its style."""

    def any_layer(case: Case) -> bool:
        if not case.layout.plan:
            return False
        by_name = {n.name: n for n in case.named}
        return any(name in by_name and forbids(case, by_name[name], style) for name, style in case.layout.plan)

    return any_layer


def _divided(n: Named, style: str) -> int:
    """Return the extent that is divided among tensor-parallel ranks."""
    if not isinstance(n.layer, Linear):
        return 0
    return n.layer.out if style == "columns" else n.before[-1]


def _reloads(case: Case) -> bool:
    return any(step.reload for step in case.steps)


def _stateful(case: Case) -> bool:
    return bool(case.optimizer.momentum) or case.optimizer.kind != "sgd"


def _leaves_a_rank_out(case: Case, n: Named, style: str) -> bool:
    extent = _divided(n, style)
    most = -(-extent // case.layout.tensor)
    return not most or -(-extent // most) != case.layout.tensor


def _few_rows(case: Case, n: Named, style: str) -> bool:
    return len(n.before) > 1 and any(min(step.rows) < case.data for step in case.steps)


def _inexact_bias(case: Case, n: Named, style: str) -> bool:
    biased = isinstance(n.layer, Linear) and n.layer.bias
    return style == "rows" and biased and case.layout.tensor & (case.layout.tensor - 1) != 0


def _outside(case: Case, n: Named) -> list[Layer]:
    """Return the layers that have a layer inside."""
    return [m.layer for m in case.named if n.name.startswith(f"{m.name}.")]


def _inside_backward_hook(case: Case, n: Named, style: str) -> bool:
    return style == "rows" and any(isinstance(m, Hooked) and m.kind == "backward" for m in _outside(case, n))


def _checkpointed_and_compiled(case: Case, n: Named, style: str) -> bool:
    return case.compiled and any(isinstance(m, Checkpointed) for m in _outside(case, n))


def _made_anew(steps: Sequence[Step]) -> bool:
    """Return whether every backward makes new gradients and never adds to existing ones."""
    return all(len(step.rows) == 1 and step.zero == "none" for step in steps)


def _unit(n: Named, wrapped: Sequence[str]) -> str:
    """Return the wrapped layer with which a layer's parameters are flattened; "" for the whole model."""
    return next((name for name in wrapped if n.name == name or n.name.startswith(f"{name}.")), "")


def _idle_unit(case: Case) -> bool:
    """Return whether some backward may leave out everything that was flattened together."""
    wrapped = case.layout.wrapped
    reached = {_unit(n, wrapped) for n in case.named if not n.optional and n.trains}
    return any(_unit(n, wrapped) not in reached for n in case.named if n.trains or isinstance(n.layer, Linear))


def _gradients_everywhere(case: Case) -> bool:
    """Return whether every rank is sure to have gradients in its shard of each flat parameter."""
    for n in case.named:
        if isinstance(n.layer, Branch) or (isinstance(n.layer, Linear) and (n.layer.frozen or n.optional)):
            return False
    # Parameters are padded to 16 bytes between each other, and at the end to as many elements as there are ranks.
    enough = case.data * (16 // getattr(torch, case.dtype).itemsize + case.data)
    return all(size >= enough for unit, size in _least_sizes(case).items() if unit or size)


def _least_sizes(case: Case) -> Mapping[str, int]:
    """Return the least number of elements that a rank has of each flat parameter, by the wrapped layer's name."""
    sizes, styles = dict.fromkeys((*case.layout.wrapped, ""), 0), dict(case.layout.plan)
    for n in case.named:
        sizes[_unit(n, case.layout.wrapped)] += _least_elements(n, case.layout.tensor, styles.get(n.name, ""))
    return sizes


def _least_elements(n: Named, tensor: int, style: str) -> int:
    """Return the least number of elements that a rank has of a layer's own weight.

    ``style``: how tensor-parallel ranks share the weight.
    """
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


SUPPORTED: tuple[Limit, ...] = (
    STAYS_FROZEN,
    Limit("A plan is of linear layers.", _planned(lambda case, n, style: not isinstance(n.layer, Linear))),
    Limit("Parameters are not shared.", lambda case: any(isinstance(n.layer, Tied) for n in case.named)),
    Limit("What is flattened together has one dtype.", lambda case: case.own_dtypes),
    Limit(
        "What is flattened together requires gradients alike, unless original parameters are used.",
        lambda case: case.freezes and not original(case),
    ),
    Limit(
        "An exception leaves behind the collective of a tensor-parallel layer whose result nothing has used.",
        lambda case: bool(case.layout.plan) and case.abandons("layer"),
    ),
    Limit(
        "Nothing waits for the collective that a compiled model's recomputation of a tensor-parallel layer ends with.",
        _planned(_checkpointed_and_compiled),
    ),
    Limit("Fused SGD takes no DTensors.", lambda case: bool(case.layout.plan) and fused_sgd(case)),
    Limit("torch.compile takes original parameters alone.", lambda case: case.compiled and not original(case)),
    Limit(
        "What nothing has used has a gradient of zeros in a flat parameter, on which a stateful optimizer acts.",
        lambda case: (_stateful(case) or bool(case.optimizer.weight_decay)) and case.optional,
    ),
    Limit("Every rank adds its share of the bias, and a third is not representable.", _planned(_inexact_bias)),
    Limit(
        "A backward hook reads the gradient of a layer's input before the collective that makes it is waited for.",
        _planned(_inside_backward_hook),
    ),
    Limit(
        "Only float32 is cast, and buffers with it, for good.",
        lambda case: (
            bool(case.options.get("param_dtype"))
            and (case.dtype != "float32" or any(isinstance(n.layer, (Scale, Norm)) for n in case.named))
        ),
    ),
    Limit("Only gradients of float32 are cast.", lambda case: _reduces(case) and case.dtype != "float32"),
    Limit(
        "Compiled models are not cast.",
        lambda case: case.compiled and (_reduces(case) or bool(case.options.get("param_dtype"))),
    ),
)
"""Limits of what the stack supports, or of what the oracles can judge."""


def _reduces(case: Case) -> bool:
    return bool(case.options.get("reduce_dtype"))


DEFECTS: tuple[Limit, ...] = (
    FUSED_SGD,
    defect(
        "fsdp_no_elements",
        "The backward of a parameter without elements fails.",
        lambda case: any(isinstance(n.layer, Linear) and not n.layer.out for n in case.named),
    ),
    defect(
        "tp_frozen",
        "Frozen parameters of tensor-parallel layers are trained.",
        _planned(lambda case, n, style: isinstance(n.layer, Linear) and n.layer.frozen),
    ),
    defect(
        "tp_optimizer_state",
        "States of optimizers over tensor-parallel layers come back wrong, or not at all.",
        lambda case: bool(case.layout.plan) and case.layout.tensor > 1 and _reloads(case) and _stateful(case),
    ),
    defect(
        "tp_clipping",
        "Each tensor-parallel rank clips by another norm.",
        lambda case: bool(case.layout.plan) and case.layout.tensor > 1 and case.clips,
    ),
    defect("tp_empty_sequences", "A rank without rows of sequences fails or hangs.", _planned(_few_rows)),
    defect(
        "tp_one_feature",
        "A column-wise layer with one feature has no gradient of its bias.",
        _planned(lambda case, n, style: style == "columns" and _divided(n, style) <= 1),
    ),
    defect(
        "tp_one_column",
        "A row-wise layer with one feature fails on sequences of one.",
        _planned(lambda case, n, style: style == "rows" and _divided(n, style) <= 1),
    ),
    defect(
        "tp_empty_shard", "A tensor-parallel rank that has nothing of a layer is refused.", _planned(_leaves_a_rank_out)
    ),
    defect(
        "tp_uneven_state",
        "Sharded state dicts of unevenly divided layers abort.",
        _planned(lambda case, n, style: _reloads(case) and _divided(n, style) % case.layout.tensor != 0),
    ),
    defect(
        "tp_clip_float64",
        "clip_grad_norm_ refuses float64.",
        lambda case: case.dtype == "float64" and case.clips and case.options.get("strategy") != "NO_SHARD",
    ),
    defect(
        "tp_idle_unit",
        "Without shards, what a backward leaves out is missing from state dicts.",
        lambda case: not sharded(case) and _idle_unit(case),
    ),
    defect(
        "tp_idle_gradient",
        "Accumulated gradients are lost where a backward leaves out all that was flattened together.",
        lambda case: not _made_anew(case.steps) and _idle_unit(case),
    ),
    defect(
        "tp_one_element",
        "Gradients of a sharded flat parameter of one element do not add up.",
        lambda case: sharded(case) and not _made_anew(case.steps) and 1 in _least_sizes(case).values(),
    ),
    defect(
        "tp_gradient_dtype",
        "A rank without gradients of its own gathers float32, whatever the others gather.",
        lambda case: original(case) and sharded(case) and case.dtype != "float32" and not _gradients_everywhere(case),
    ),
    defect(
        "tp_no_sync",
        "Original parameters over tensor-parallel layers fail in the forward after an unsynchronized backward.",
        lambda case: original(case) and bool(case.layout.plan) and case.accumulates,
    ),
    defect(
        "tp_no_shard",
        "Original parameters over tensor-parallel layers fail without shards.",
        lambda case: original(case) and bool(case.layout.plan) and not sharded(case),
    ),
    defect(
        "tp_abandoned_forward",
        "With mixed precision, gradients are not reduced after a forward that no backward followed.",
        lambda case: bool(case.options.get("param_dtype")) and case.abandons(),
    ),
    defect(
        "tp_interrupted_forward",
        "Without shards, original parameters are no parameters any more after an exception in a forward.",
        lambda case: original(case) and not sharded(case) and case.abandons("layer"),
    ),
    defect(
        "tp_one_shard",
        "Replicas of a single shard are never averaged.",
        lambda case: hybrid(case) and case.data == case.options.get("replicas", 0) != 1,
    ),
    defect(
        "compiled_gradients",
        "FSDP1 can't be compiled again while there are gradients.",
        lambda case: case.compiled and (not _made_anew(case.steps) or any(step.averaged for step in case.steps)),
    ),
)
"""Limits that are due to defects of PyTorch."""

LIMITS = SUPPORTED + DEFECTS

RESUMING: tuple[Limit, ...] = (
    Limit(
        "Whole state dicts are not those of one device over a plan, and fail on several tensor-parallel ranks.",
        lambda case: case.layout.tensor > 1 or bool(case.layout.plan),
    ),
)
