"""The ``replicate`` stack: composable DDP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import torch
import torch.distributed as dist
from msgspec import Meta
from torch import nn
from torch.distributed._composable.replicate import DDP, replicate
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward as optimize_in_backward
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _BufferCommHookLocation as HookLocation
from torch.nn.parallel.distributed import _MixedPrecision as MixedPrecision

from harness.oracles.baseline import plain_gradients as gradients
from harness.oracles.baseline import plain_parameters as parameters
from harness.specs.program import Branch, Data, Layout, Scale, one_of
from harness.specs.shapes import Named
from harness.stacks.drawing import (
    Drawing,
    draw_ignored,
    draw_mesh,
    draw_recast,
    has_parameters,
    several_dimensions,
    sharing,
    trainable,
    within,
    wrappable,
)
from harness.stacks.limit import FUSED_SGD, STAYS_FROZEN, Case, Limit, defect
from harness.stacks.stack import NONE, Layers, Mesh, Options, Promises, Stack, require_ranks
from harness.stacks.training import Party, counted, line_mesh
from harness.worlds.rank import Rank

__all__ = [
    "DDP",
    "STACK",
    "HookLocation",
    "MixedPrecision",
    "apply",
    "buckets_of",
    "gradients",
    "leave_alone",
    "log_every",
    "logged",
    "make_static",
    "names",
    "optimize_buckets",
    "optimize_in_backward",
    "parameters",
    "parts",
    "register_buffer_hook",
    "register_builtin_hook",
    "replicate",
    "update_group",
]


# for tests of the stack


def apply(module: nn.Module, rank: Rank, **options: Any) -> nn.Module:
    """Replicate a module over the world; ``options`` go to ``replicate``."""
    return replicate(module.to(rank.device), **options)


def names(module: nn.Module) -> list[str]:
    """Return the names of the parameters that are averaged, from DDP's state for debugging. Call the module before."""
    return list(replicate.state(module)._param_names)


def buckets_of(parameters: Sequence[torch.Tensor], limit: int) -> list[int]:
    """Return the bytes of the buckets into which DDP puts gradients that are ready in the reverse order of parameters.

    ``limit``: bytes of a bucket, from which on the next one begins.  The first bucket has a limit of its own.
    """
    ready = list(parameters)[::-1]
    first = min(limit, dist._DEFAULT_FIRST_BUCKET_BYTES)  # type: ignore[attr-defined]
    sparse = [False] * len(ready)
    buckets, _ = dist._compute_bucket_assignment_by_size(ready, [first, limit], sparse)  # type: ignore[attr-defined]
    return [sum(ready[i].nbytes for i in bucket) for bucket in buckets]


def register_buffer_hook(model: DistributedDataParallel, state: Any, hook: Any, where: HookLocation | None) -> None:
    """Let a hook synchronize buffers, before or after the forward; None: where PyTorch's default is."""
    more = () if where is None else (where,)
    model._register_buffer_comm_hook(state, hook, *more)


def leave_alone(module: nn.Module, names: Sequence[str]) -> None:
    """Have a later DistributedDataParallel of the module ignore parameters and buffers."""
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, list(names))  # type: ignore[no-untyped-call]


def update_group(model: DistributedDataParallel, group: Any) -> None:
    """Let a module average its gradients over another group from now on, if the rank is in it."""
    model._update_process_group(group)  # type: ignore[no-untyped-call]


def optimize_buckets(
    model: DistributedDataParallel, kind: type, *arguments: Any, parameters: Any = None, **options: Any
) -> None:
    """Let an optimizer update the parameters of each bucket once it is reduced; ``parameters``: these alone."""
    model._register_fused_optim(kind, *arguments, optim_params=parameters, **options)


def logged(model: DistributedDataParallel) -> dict[str, Any]:
    """Return what DDP logs about a module and its latest step."""
    return dict(model._get_ddp_logging_data())  # type: ignore[no-untyped-call]


def log_every(model: DistributedDataParallel, rate: int) -> None:
    """Have DDP log only every step that the rate divides, after the first ten."""
    model._set_ddp_runtime_logging_sample_rate(rate)  # type: ignore[no-untyped-call]


def make_static(model: DistributedDataParallel) -> None:
    """Say that the graph of a module is static, after it was made."""
    model._set_static_graph()  # type: ignore[no-untyped-call]


def register_builtin_hook(model: DistributedDataParallel, kind: str) -> None:
    """Let a hook that is part of DDP's reducer communicate gradients: ALLREDUCE or FP16_COMPRESS."""
    kinds = dist.BuiltinCommHookType  # type: ignore[attr-defined]
    model._register_builtin_comm_hook(getattr(kinds, kind))  # type: ignore[no-untyped-call]


def parts(size: int) -> list[int]:
    """Return each rank's part of the batch: every rank has its own."""
    return list(range(size))


# for programs


def on_replicate(
    party: Party,
    model: nn.Module,
    wrapped: Sequence[str],
    *,
    hook: str = "",
    mesh: str = "",
    ignored: Sequence[str] = (),
    recast: bool = False,
    **options: Any,
) -> nn.Module:
    """Put a model on ranks with composable DDP: each ``wrapped`` submodule on its own, or the whole model for [""].

    ``mesh``: see :func:`line_mesh`; ``ignored``: submodules that are left alone; ``recast``: use float64 while
    wrapping.
    """
    if recast:
        model.to(torch.float64)
    if mesh:
        options["device_mesh"] = line_mesh(party, mesh)
    if ignored:
        options["ignored_modules"] = [model.get_submodule(name) for name in ignored]
    for name in wrapped:
        module: Any = model.get_submodule(name)
        replicate(module, **options)
        if hook:
            module.register_comm_hook(None, counted(party, name, getattr(default_hooks, hook)))
    if recast:
        model.to(party.dtype)
    party.model = model
    return model


HOOKS = {"allreduce_hook": "", "bf16_compress_hook": "bfloat16", "fp16_compress_hook": "float16"}
"""Hooks of ``torch.distributed.algorithms.ddp_comm_hooks.default_hooks``, and the dtype that each casts to, or ""."""


class ReplicateOptions(Data, frozen=True):
    """Options of :func:`on_replicate`. The last five are DistributedDataParallel's own."""

    hook: Annotated[str, one_of("", *HOOKS)] = ""
    mesh: Mesh = ""
    ignored: Layers = ()
    recast: bool = False
    static_graph: bool = False
    find_unused_parameters: bool = False
    gradient_as_bucket_view: bool = False
    bucket_cap_mb: Annotated[float, Meta(ge=0, le=1024)] = 25.0
    broadcast_buffers: bool = True


def _arguments(layout: Layout) -> tuple[list[str], dict[str, Any]]:
    return list(layout.wrapped) or [""], {}


def _check(layout: Layout, options: ReplicateOptions) -> None:
    require_ranks(options.mesh, layout.world)


def _casts(options: Options) -> set[str]:
    return {HOOKS.get(str(options.get("hook", "")), "")} - {""}


def _promises(layout: Layout) -> Promises:
    # For a flattened mesh, DTensor keeps the groups of the original mesh until it sees another mesh.
    return Promises(frees_groups=not several_dimensions(layout))


def _alone(case: Case) -> Options:
    return NONE  # gradients are averaged where they accumulate


def _branches(case: Case) -> set[str]:
    return {n.layer.when for n in case.named if isinstance(n.layer, Branch)}


def _per_rank(case: Case) -> bool:
    return any(isinstance(n.layer, Scale) and n.layer.kind == "per_rank" for n in case.named)


LIMITS: tuple[Limit, ...] = (
    STAYS_FROZEN,
    FUSED_SGD,
    Limit(
        "A static graph is the same in every micro-batch.",
        lambda case: bool(case.options.get("static_graph")) and not _branches(case) <= {"never"},
    ),
    Limit(
        "A layer that a micro-batch leaves out has to be looked for, unless the graph is static.",
        lambda case: (
            bool(_branches(case))
            and not (case.options.get("find_unused_parameters") or case.options.get("static_graph"))
        ),
    ),
    defect(
        "replicate_static_unsynced",
        "With a static graph, a first backward that is not synchronized is an internal assertion.",
        lambda case: bool(case.options.get("static_graph")) and case.accumulates,
    ),
    defect(
        "replicate_static_buckets",
        "With a static graph, communication hooks are told the wrong numbers of buckets.",
        lambda case: bool(case.options.get("static_graph") and case.options.get("hook")),
    ),
    defect(
        "compiled_small_buckets",
        "Dynamo's DDPOptimizer refuses buckets below 1 MiB.",
        lambda case: case.compiled and float(case.options.get("bucket_cap_mb", 25.0)) < 1,  # type: ignore[arg-type]
    ),
    defect(
        "compiled_replicated_layers",
        "Nothing is compiled of a model whose layers are replicated one by one.",
        lambda case: case.compiled and bool(case.layout.wrapped),
    ),
)


def draw(d: Drawing) -> None:
    """Draw a layout: the whole model, or its layers one by one, with options of replicate() and of DDP."""
    draw_mesh(d)
    draw_recast(d)
    draw_ignored(d)
    branches = _branches(d.case)
    if not d.any_world and d.offers("static_graph"):
        d.option("static_graph", (False, False, False, True), default=False)
    if "static_graph" not in d.case.options and (
        branches or (d.offers("find_unused_parameters") and d.among((False, False, True)))
    ):
        d.set(find_unused_parameters=True)
    if d.either():
        d.set(gradient_as_bucket_view=True)
    d.option("bucket_cap_mb", (25.0, 0.0001), default=25.0)  # about a hundred bytes: a bucket for every other parameter
    if d.offers("hook"):
        d.option("hook", ("", "", "allreduce_hook", "fp16_compress_hook"), default="")
    # By default DDP sends rank 0's buffers. PyTorch's replicate() never does (docs/findings.md), so nothing may rely on
    # it.
    if _per_rank(d.case):
        d.set(broadcast_buffers=False)
    pieces = _pieces(d.case.named)
    alone = pieces and not sharing(d.case.named) and "ignored" not in d.case.options
    if alone and d.fits(case := d.with_layout(wrapped=pieces)) and d.among((False, False, True)):
        d.become(case)


def _pieces(named: Sequence[Named]) -> tuple[str, ...]:
    """Return the top-level layers with parameters, if each can be replicated on its own; otherwise ()."""
    top = [n for n in named if "." not in n.name and has_parameters(n)]
    if not all(wrappable(n) for n in top):
        return ()
    training = {n.name for n in named if trainable(n)}
    return tuple(n.name for n in top) if all(training & within(n, named) for n in top) else ()


STACK = Stack(
    "replicate",
    on_replicate,
    options=ReplicateOptions,
    layers=("ignored",),
    arguments=_arguments,
    check=_check,
    casts=_casts,
    promises=_promises,
    limits=LIMITS,
    features={
        "static_graph": "static_graph",
        "hook": "comm_hooks",
        "find_unused_parameters": "unused_parameters",
    },
    draw=draw,
    compilable=True,
    flat=(NONE, {"mesh": "2x2"}),
    alone=_alone,
)
