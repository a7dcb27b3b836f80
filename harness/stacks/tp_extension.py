"""The ``tp_extension`` stack: FSDP1 over tensor-parallel modules, joined by ``DTensorExtensions``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import Unsupported
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec
from torch.distributed._shard.sharding_spec.chunk_sharding_spec import ChunkShardingSpec
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._common_utils import _FSDPDeviceHandle
from torch.distributed.fsdp._common_utils import _is_fsdp_flattened as is_flattened
from torch.distributed.remote_device import _remote_device
from torch.distributed.tensor import Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.fsdp import DTensorExtensions
from torch.distributed.tensor.parallel.fsdp import _rewrite_spec_if_needed as rewrite_spec
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

from harness.oracles.baseline import Tensors
from harness.stacks.replicate_fsdp import whole
from harness.worlds.rank import Rank

__all__ = [
    "MODULE",
    "PLAN",
    "STYLES",
    "AsyncCollectiveTensor",
    "DTensorExtensions",
    "StridedShard",
    "Unsupported",
    "apply",
    "chunk_spec",
    "compute_local_shape_and_global_offset",
    "device_count",
    "extensions",
    "gradients",
    "group_of",
    "is_flattened",
    "listed_spec",
    "mesh_shape",
    "parameters",
    "parts",
    "rewrite_spec",
]

STYLES: Mapping[str, Callable[[], ParallelStyle]] = {
    "columns": ColwiseParallel,
    "rows": RowwiseParallel,
    "replicated_columns": lambda: ColwiseParallel(output_layouts=Replicate()),
}

MODULE = "torch.distributed.tensor.parallel.fsdp"

PLAN: Mapping[str, str] = {"first": "columns", "second": "rows"}


def mesh_shape(size: int) -> tuple[int, int]:
    """(data parallel, tensor parallel) for a world of a size: tensor parallel in pairs from four ranks on."""
    return (size // 2, 2) if size >= 4 and size % 2 == 0 else (size, 1)


def apply(
    module: nn.Module,
    rank: Rank,
    *,
    plan: Mapping[str, str] = PLAN,
    shape: tuple[int, int] | None = None,
    **options: Any,
) -> nn.Module:
    """Shard a module in two dimensions: tensor parallel by ``plan`` (child name to a name in ``STYLES``), FSDP over the
    rest.  ``shape``: ranks in each, (data parallel, tensor parallel), of all in the world unless given.  ``options`` go
    to FullyShardedDataParallel.
    """
    data, tensor = shape or mesh_shape(rank.size)
    mesh = rank.mesh(data, tensor, names=("dp", "tp"))
    styles: dict[str, ParallelStyle] = {name: STYLES[how]() for name, how in plan.items()}
    module = parallelize_module(module.to(rank.device), mesh["tp"], styles)
    # With one data-parallel rank FSDP1 does not shard at all, and can't keep original DTensor parameters then.
    options.setdefault("use_orig_params", data > 1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FSDP is switching to use `NO_SHARD`")
        warnings.filterwarnings("ignore", category=FutureWarning)
        return FullyShardedDataParallel(module, device_mesh=mesh["dp"], device_id=rank.device, **options)


def extensions(rank: Rank | None = None) -> DTensorExtensions:
    """What FSDP1 asks how parameters that are tensor parallel are flattened, saved and loaded (on the host)."""
    return DTensorExtensions(_FSDPDeviceHandle.from_device(rank.device if rank else torch.device("cpu")))


def device_count(rank: Rank) -> int:
    """The devices of a machine as FSDP1 counts them for sharded tensors: rank r is taken to be on device r modulo them.

    Ranks of ``exclusive`` worlds are.
    """
    return int(_FSDPDeviceHandle.from_device(rank.device).device_count())


def group_of(tensor: ShardedTensor) -> ProcessGroup:
    """The group that a sharded tensor is sharded over."""
    return tensor._process_group


def chunk_spec(dim: int, placements: Sequence[str]) -> ChunkShardingSpec:
    """Sharded in a dimension, by placements as in ``rank:0/cpu``."""
    return ChunkShardingSpec(dim, [_remote_device(p) for p in placements])


def listed_spec(shards: Sequence[tuple[Sequence[int], Sequence[int], str]]) -> EnumerableShardingSpec:
    """In shards, each of offsets, sizes and a placement."""
    return EnumerableShardingSpec([ShardMetadata([*offsets], [*sizes], at) for offsets, sizes, at in shards])


def parts(size: int) -> list[int]:
    """Ranks of one tensor-parallel group share a part of the batch."""
    _, tensor = mesh_shape(size)
    return [i // tensor for i in range(size)]


def gradients(module: nn.Module) -> Tensors | None:
    """Whole gradients by parameter name; None where FSDP1 keeps them in flat parameters."""
    assert isinstance(module, FullyShardedDataParallel)
    if not module._use_orig_params:
        return None
    with FullyShardedDataParallel.summon_full_params(module, writeback=False, with_grads=True):
        return {n: whole(p.grad) for n, p in module.module.named_parameters() if p.grad is not None}


def parameters(module: nn.Module) -> Tensors:
    """Whole parameters by name."""
    assert isinstance(module, FullyShardedDataParallel)
    with FullyShardedDataParallel.summon_full_params(module, writeback=False):
        return {n: whole(p) for n, p in module.module.named_parameters()}
