"""The ``tp_extension`` stack: FSDP1 over tensor-parallel modules, joined by ``DTensorExtensions``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import torch
from msgspec import Meta
from torch import nn
from torch._dynamo.exc import Unsupported
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.api import load_with_process_group
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import full as sharded_full
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec
from torch.distributed._shard.sharding_spec.chunk_sharding_spec import ChunkShardingSpec
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._common_utils import _FSDPDeviceHandle
from torch.distributed.fsdp._common_utils import _is_fsdp_flattened as is_flattened
from torch.distributed.remote_device import _remote_device
from torch.distributed.tensor import Replicate
from torch.distributed.tensor._utils import ExplicitRedistributionContext, compute_local_shape_and_global_offset
from torch.distributed.tensor.experimental._attention import context_parallel_unshard as unsharded_context
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform as ready_for_ddp
from torch.distributed.tensor.parallel.fsdp import DTensorExtensions
from torch.distributed.tensor.parallel.fsdp import _rewrite_spec_if_needed as rewrite_spec
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

from harness.oracles.baseline import Tensors
from harness.specs.limits import RANKS
from harness.specs.program import Data, Layout, Option, one_of
from harness.stacks.limit import Case
from harness.stacks.replicate_fsdp import whole
from harness.stacks.stack import Dtype, Options, Promises, Stack, averages_apart
from harness.stacks.tp_extension.drawing import draw, tensor_sizes
from harness.stacks.tp_extension.limits import HYBRID, LIMITS, RESUMING
from harness.stacks.tp_extension.training import Fsdp1, on_tp_extension
from harness.worlds.rank import Rank

__all__ = [
    "MODULE",
    "PLAN",
    "STACK",
    "STYLES",
    "AsyncCollectiveTensor",
    "DTensorExtensions",
    "ExplicitRedistributionContext",
    "StridedShard",
    "Unsupported",
    "apply",
    "chunk_spec",
    "compute_local_shape_and_global_offset",
    "default_hooks",
    "device_count",
    "extensions",
    "filled_shards",
    "gradients",
    "group_of",
    "is_flattened",
    "joined_shards",
    "listed_spec",
    "load_with_process_group",
    "mesh_shape",
    "parameters",
    "parts",
    "ready_for_ddp",
    "rewrite_spec",
    "unsharded_context",
]

STYLES: Mapping[str, Callable[[], ParallelStyle]] = {
    "columns": ColwiseParallel,
    "rows": RowwiseParallel,
    "replicated_columns": lambda: ColwiseParallel(output_layouts=Replicate()),
}

MODULE = "torch.distributed.tensor.parallel.fsdp"

PLAN: Mapping[str, str] = {"first": "columns", "second": "rows"}


def mesh_shape(size: int) -> tuple[int, int]:
    """Return (data parallel, tensor parallel) sizes of a world.

    The second is two in even worlds of four or more ranks, and one in others.
    """
    return (size // 2, 2) if size >= 4 and size % 2 == 0 else (size, 1)


def apply(
    module: nn.Module,
    rank: Rank,
    *,
    plan: Mapping[str, str] = PLAN,
    shape: tuple[int, int] | None = None,
    **options: Any,
) -> nn.Module:
    """Shard a module in two dimensions: tensor parallel by ``plan``, and FSDP over the rest.

    ``plan``: a name in ``STYLES`` for each child's name; ``shape``: the number of ranks in each dimension, (data
    parallel, tensor parallel), by default of the whole world. ``options`` go to FullyShardedDataParallel.
    """
    data, tensor = shape or mesh_shape(rank.size)
    mesh = rank.mesh(data, tensor, names=("dp", "tp"))
    styles: dict[str, ParallelStyle] = {name: STYLES[how]() for name, how in plan.items()}
    module = parallelize_module(module.to(rank.device), mesh["tp"], styles)
    # With one data-parallel rank, FSDP1 does not shard at all, and then can't keep original parameters that are
    # DTensors.
    options.setdefault("use_orig_params", data > 1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FSDP is switching to use `NO_SHARD`")
        warnings.filterwarnings("ignore", category=FutureWarning)
        return FullyShardedDataParallel(module, device_mesh=mesh["dp"], device_id=rank.device, **options)


def extensions(rank: Rank | None = None) -> DTensorExtensions:
    """Return the object that FSDP1 asks how to flatten, save and load tensor-parallel parameters.

    Its device is the rank's, or the host without a rank.
    """
    return DTensorExtensions(_FSDPDeviceHandle.from_device(rank.device if rank else torch.device("cpu")))


def foreach(name: str) -> Callable[..., Any]:
    """Return torch's function of lists of tensors by the name of the one for tensors, such as ``mul_``."""
    function: Callable[..., Any] = getattr(torch, f"_foreach_{name}")
    return function


def device_count(rank: Rank) -> int:
    """Return the number of devices of a machine, as FSDP1 counts them for sharded tensors.

    FSDP1 assumes that rank r is on device r modulo this number, which is true of the ranks of ``exclusive`` worlds.
    """
    return int(_FSDPDeviceHandle.from_device(rank.device).device_count())


def group_of(tensor: ShardedTensor) -> ProcessGroup:
    """Return the group over which a sharded tensor is sharded."""
    return tensor._process_group


def chunk_spec(dim: int, placements: Sequence[str]) -> ChunkShardingSpec:
    """Return the spec of a tensor that is sharded in one dimension. Placements are strings such as ``rank:0/cpu``."""
    return ChunkShardingSpec(dim, [_remote_device(p) for p in placements])


def listed_spec(shards: Sequence[tuple[Sequence[int], Sequence[int], str]]) -> EnumerableShardingSpec:
    """Return the spec of a tensor with these shards, each given as offsets, sizes and a placement."""
    return EnumerableShardingSpec([ShardMetadata([*offsets], [*sizes], at) for offsets, sizes, at in shards])


def joined_shards(
    rank: int, shards: Sequence[tuple[torch.Tensor, Sequence[int]]], size: Sequence[int], **options: Any
) -> ShardedTensor:
    """Return a tensor of a size, of which this rank has shards, each given as a tensor and its offsets."""
    own = [LocalShard.from_tensor_and_offsets(tensor, [*offsets], rank) for tensor, offsets in shards]
    return init_from_local_shards(own, *size, **options)


def filled_shards(spec: ChunkShardingSpec, size: Sequence[int], value: float) -> ShardedTensor:
    """Return a tensor of a size that is sharded by a spec and has one value."""
    filled: ShardedTensor = sharded_full(spec, [*size], value)
    return filled


def parts(size: int) -> list[int]:
    """Return each rank's part of the batch: the ranks of a tensor-parallel group share one."""
    _, tensor = mesh_shape(size)
    return [i // tensor for i in range(size)]


def gradients(module: nn.Module) -> Tensors | None:
    """Return whole gradients by parameter name; None if FSDP1 keeps them in flat parameters."""
    assert isinstance(module, FullyShardedDataParallel)
    if not module._use_orig_params:
        return None
    with FullyShardedDataParallel.summon_full_params(module, writeback=False, with_grads=True):
        return {n: whole(p.grad) for n, p in module.module.named_parameters() if p.grad is not None}


def parameters(module: nn.Module) -> Tensors:
    """Return whole parameters by name."""
    assert isinstance(module, FullyShardedDataParallel)
    with FullyShardedDataParallel.summon_full_params(module, writeback=False):
        return {n: whole(p) for n, p in module.module.named_parameters()}


# for programs

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", *HYBRID)
"""Names of ``torch.distributed.fsdp.ShardingStrategy``."""


class TpExtensionOptions(Data, frozen=True):
    """Options of :func:`~harness.stacks.tp_extension.training.on_tp_extension`."""

    use_orig_params: bool = True
    strategy: Annotated[str, one_of(*STRATEGIES)] = "FULL_SHARD"
    replicas: Annotated[int, Meta(ge=0, le=RANKS)] = 0
    param_dtype: Dtype = ""
    reduce_dtype: Dtype = ""


def _arguments(layout: Layout) -> tuple[list[str], dict[str, Any]]:
    return list(layout.wrapped), {"tensor": layout.tensor, "plan": dict(layout.plan)}


def _check(layout: Layout, options: TpExtensionOptions) -> None:
    data = layout.world // layout.tensor
    if options.replicas and data % options.replicas:
        raise ValueError(f"{data} data-parallel ranks can't be divided into {options.replicas} replicas")


def _casts(options: Options) -> set[str]:
    return {str(options[name]) for name in ("param_dtype", "reduce_dtype") if options.get(name)}


def _output_dtype(options: Options) -> str:
    return str(options.get("param_dtype") or "")


def _claims(options: Options) -> Sequence[str]:
    return ["hybrid"] if options.get("strategy") == "HYBRID_SHARD" else []


def _promises(layout: Layout) -> Promises:
    options = dict(layout.options)
    resharded = options.get("strategy") in ("FULL_SHARD", "HYBRID_SHARD")
    return Promises(
        gradients=options.get("use_orig_params") is not False,
        states=False,  # states are those of flat parameters
        zeros_for_unused=True,
        whole_parameters=False,  # flat parameters replace them
        unsynced_collectives=len(layout.wrapped) if resharded else 0,  # gathers again what was resharded
        frees_groups=False,  # docs/findings/tp_memory.py
    )


def _spanning(options: Options, changes: Options) -> dict[str, Option]:
    merged = {**options, **changes}
    if merged.get("strategy") in HYBRID and "strategy" not in changes:
        merged["strategy"] = "FULL_SHARD"  # the number of replicas may not fit
    if merged.get("strategy") not in HYBRID:
        merged.pop("replicas", None)
    return merged


def _alone(case: Case) -> Options | None:
    if case.clips or averages_apart(case) is None:
        return None  # the norm adds up squares in the order of flat parameters
    # Without original parameters, parameters are flattened without gaps, and the bits of a product depend on whether
    # its factors lie at multiples of 16 bytes.
    return {"use_orig_params": True}


STACK = Stack(
    "tp_extension",
    on_tp_extension,
    options=TpExtensionOptions,
    arguments=_arguments,
    check=_check,
    tensor_parallel=True,
    casts=_casts,
    output_dtype=_output_dtype,
    promises=_promises,
    handle=Fsdp1,
    limits=LIMITS,
    claims=_claims,
    draw=draw,
    tensor_sizes=tensor_sizes,
    compilable=True,
    flat=({"strategy": "FULL_SHARD"}, {"strategy": "HYBRID_SHARD", "replicas": 2}),
    spanning=_spanning,
    alone=_alone,
    resuming=RESUMING,
)
