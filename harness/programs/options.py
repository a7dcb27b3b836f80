"""What each stack may be asked for in a layout's options: names, and types of values.

These are the keyword arguments of ``on_<stack>`` in :mod:`harness.stacks.training`.  A name that is not here is not
written into a program's source.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from harness.programs import limits
from harness.programs.spec import DTYPES, Data, LayerName, Layout, one_of

HOOKS = ("allreduce_hook", "bf16_compress_hook", "fp16_compress_hook")
"""Of ``torch.distributed.algorithms.ddp_comm_hooks.default_hooks``."""
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
"""Of ``torch.distributed.fsdp.ShardingStrategy``."""
UNDER_COMPILED = ("replicate", "replicate_fsdp", "tp_extension")
"""Stacks that are compiled on the stack ``dynamo``, by its option ``inner``."""

_Dtype: TypeAlias = Annotated[str, one_of("", *DTYPES)]
_Layers: TypeAlias = Annotated[tuple[LayerName, ...], Meta(max_length=limits.NAMES)]
_Mesh: TypeAlias = Annotated[str, Meta(pattern=r"^([1-9][0-9]{0,3}(x[1-9][0-9]{0,3}){0,7})?\Z")]
"""Such as ``2x1x2``; empty for none."""


class Replicate(Data, frozen=True):
    """Of composable DDP; the last five are DistributedDataParallel's own."""

    hook: Annotated[str, one_of("", *HOOKS)] = ""
    mesh: _Mesh = ""
    ignored: _Layers = ()
    recast: bool = False
    static_graph: bool = False
    find_unused_parameters: bool = False
    gradient_as_bucket_view: bool = False
    bucket_cap_mb: Annotated[float, Meta(ge=0, le=1024)] = 25.0
    broadcast_buffers: bool = True


class ReplicateFsdp(Data, frozen=True):
    """Of replication on FSDP2's machinery."""

    offload: bool = False
    mesh: _Mesh = ""
    param_dtype: _Dtype = ""
    reduce_dtype: _Dtype = ""
    output_dtype: _Dtype = ""
    divide: Annotated[float, Meta(ge=0, le=1 << 20)] = 0.0
    sums: bool = False
    ignored: _Layers = ()
    recast: bool = False


class TpExtension(Data, frozen=True):
    """Of FSDP1 over tensor parallelism."""

    use_orig_params: bool = True
    strategy: Annotated[str, one_of(*STRATEGIES)] = "FULL_SHARD"
    replicas: Annotated[int, Meta(ge=0, le=limits.RANKS)] = 0
    param_dtype: _Dtype = ""
    reduce_dtype: _Dtype = ""


Options: TypeAlias = Replicate | ReplicateFsdp | TpExtension

OPTIONS: dict[str, type[Options]] = {
    "replicate": Replicate,
    "replicate_fsdp": ReplicateFsdp,
    "tp_extension": TpExtension,
}
"""By the stack that puts the model on ranks."""


def options_of(layout: Layout) -> Options:
    """The options of a layout as the type of its stack.

    Errors: ValueError for an option that the stack has not, for a value of another type, and for an option twice.
    """
    options = dict(layout.options)
    if len(options) < len(layout.options):
        names = [name for name, _ in layout.options]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"layout.options: {twice!r} twice")
    if layout.stack == "dynamo" and options.pop("inner", "replicate") not in UNDER_COMPILED:
        raise ValueError(f"there is no stack {layout.under!r} to compile")
    if unknown := [name for name in options if name not in _names(layout.under)]:
        there = ", ".join(sorted(_names(layout.under)))
        raise ValueError(f"layout.options: {layout.under} has no option {unknown[0]!r}; it has {there}")
    try:
        return msgspec.convert(options, OPTIONS[layout.under])
    except msgspec.ValidationError as e:
        raise ValueError(f"layout.options: {e}") from e


def _names(stack: str) -> tuple[str, ...]:
    return OPTIONS[stack].__struct_fields__
