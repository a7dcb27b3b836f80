"""The TP extension: FSDP1 asks it about tensor-parallel parameters, and uses it to make and load state dicts.

How it behaves:

1. A tensor-parallel parameter is a DTensor. FSDP flattens the local part of it, and unflattens to a DTensor of the same
   size, stride, mesh and placement. Before FSDP's flat parameter gets its gradient, the gradient's collective has
   ended.
2. For a sharded state dict, a tensor becomes a DTensor on the whole mesh: sharded in its first dimension over FSDP's
   ranks, replicated over FSDP's replicas, and laid out over tensor-parallel ranks like the parameter. On loading, all
   mesh dimensions but the last are gathered, which gives this rank's tensor-parallel part.
3. The older kind of state dict has sharded tensors. A plain tensor is sharded by rows over FSDP's ranks. A parameter
   becomes a sharded tensor over the tensor-parallel ranks whose only local shard is a sharded tensor over FSDP's ranks,
   and this inner one is loaded. Metadata covers every shard, is the same on every rank, and names global ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torch.distributed._shard.sharding_spec.api import ShardingSpec
from torch.distributed._shard.sharding_spec.chunk_sharding_spec import ChunkShardingSpec
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.remote_device import _remote_device
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from harness.reference.dtensors import laid, local


@dataclass(frozen=True)
class Parameter:
    """What is remembered about a tensor-parallel parameter while it is flat."""

    like: torch.Tensor
    """A meta tensor of its size and stride."""
    mesh: DeviceMesh
    placements: tuple[Placement, ...]


class DTensorExtensions:
    """The methods that FSDP1 calls."""

    def __init__(self, device_handle: Any) -> None:
        self.device_handle = device_handle
        self.compute_stream: Any = None
        """Set by FSDP, in its first forward."""

    def computing(self) -> AbstractContextManager[Any]:
        """Return a context that uses FSDP's compute stream, or the current stream."""
        found: AbstractContextManager[Any] = self.device_handle.stream(
            self.compute_stream or self.device_handle.current_stream()
        )
        return found

    def pre_flatten_transform(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Parameter | None]:
        """Return the tensor to flatten, and what to remember about a tensor-parallel parameter."""
        if not isinstance(tensor, DTensor):
            return tensor, None
        # FSDP would make a Parameter that always requires a gradient.
        own = nn.Parameter(tensor.to_local(), requires_grad=tensor.requires_grad)
        like = torch.empty_strided(tensor.shape, tensor.stride(), device="meta")
        return own, Parameter(like, tensor.device_mesh, tensor.placements)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def post_unflatten_transform(self, tensor: torch.Tensor, parameter: Parameter) -> torch.Tensor:
        """Return the DTensor for a part of the flat parameter, made on FSDP's compute stream."""
        with self.computing():
            found: torch.Tensor = laid(tensor, parameter.mesh, parameter.placements, parameter.like)
        if tensor.requires_grad:
            tensor.register_hook(self.arrived)  # type: ignore[no-untyped-call]
        found._fsdp_flattened = True  # type: ignore[attr-defined]  # an outer FSDP leaves it alone
        return found

    def arrived(self, gradient: torch.Tensor) -> torch.Tensor:
        """Wait for the collective of a gradient, if it comes from one."""
        if not isinstance(gradient, AsyncCollectiveTensor):
            return gradient
        with self.computing():
            return gradient.wait()

    def chunk_dtensor(self, tensor: torch.Tensor, rank: int, device_mesh: DeviceMesh) -> DTensor:
        """Return a copy of a tensor, sharded over FSDP's ``device_mesh`` and laid out over the rest of the whole mesh.

        Errors: RuntimeError if ``device_mesh`` is not part of a mesh of two or more dimensions.
        """
        mesh = device_mesh._get_root_mesh() if device_mesh is not None else None
        if mesh is None or mesh.ndim < 2:
            raise RuntimeError(f"FSDP's mesh must be part of a mesh that is at least 2D, and not of {mesh}")
        tensor_parallel = tensor.placements if isinstance(tensor, DTensor) else (Replicate(),)
        replicas = (Replicate(),) * (mesh.ndim - 2)
        found = laid(local(tensor.detach()).clone(), mesh, (*replicas, Replicate(), *tensor_parallel), tensor)
        return found.redistribute(placements=(*replicas, Shard(0), *tensor_parallel))

    def all_gather_dtensor(self, tensor: DTensor, parent_mesh: DeviceMesh | None) -> torch.Tensor:
        """Return this rank's tensor-parallel part of a DTensor that :meth:`chunk_dtensor` made."""
        assert tensor.device_mesh == parent_mesh, f"a tensor of {tensor.device_mesh} can't be loaded on {parent_mesh}"
        others = (Replicate(),) * (tensor.device_mesh.ndim - 1)
        return tensor.redistribute(placements=(*others, tensor.placements[-1])).to_local()

    def chunk_tensor(
        self,
        tensor: torch.Tensor,
        rank: int,
        world_size: int,
        num_devices_per_node: int,
        pg: dist.ProcessGroup,
        device: torch.device | None = None,
    ) -> ShardedTensor:
        """Return the sharded tensor to save for a tensor: over FSDP's ranks, ``pg``, and over tensor-parallel ones."""
        if isinstance(tensor, ShardedTensor):
            assert len(tensor.local_shards()) == 1, "one shard of it must be here"
            (outer,) = tensor.local_shards()
            inner = sharded_rows(outer.tensor, pg)
            meta = deepcopy(tensor.metadata())
            meta.tensor_properties.requires_grad = False
            return sharded([LocalShard(inner, deepcopy(outer.metadata))], meta, tensor._process_group)
        if not isinstance(tensor, DTensor):
            return sharded_rows(tensor, pg)
        assert tensor.device_mesh.ndim == 1, "a parameter is tensor parallel in one dimension"
        group, placement, own = tensor.device_mesh.get_group(), tensor.placements[0], tensor.to_local().detach()
        coordinate = tensor.device_mesh.get_coordinate()
        if coordinate is None:
            raise RuntimeError(f"rank {dist.get_rank()} has no part of a parameter on {tensor.device_mesh}")
        if isinstance(placement, Shard):
            shards = boxes(tensor.shape, placement.dim, tensor.device_mesh.mesh.tolist(), own.device)
            (here,) = coordinate
        else:  # each rank has all of it, and lists itself as the owner
            shards, here = [ShardMetadata([0] * tensor.dim(), [*tensor.shape], at(dist.get_rank(), own.device))], 0
        own_shards = [LocalShard(sharded_rows(own, pg), deepcopy(shards[here]))] if here < len(shards) else []
        return sharded(own_shards, described(tensor, shards), group)

    def pre_load_state_dict_transform(self, tensor: Any) -> tuple[torch.Tensor, list[LocalShard]]:
        """Return the saved sharded tensor over FSDP's ranks, and this rank's shards of it."""
        shards = tensor.local_shards()
        if len(shards) == 1 and isinstance(shards[0].tensor, ShardedTensor):
            tensor = shards[0].tensor
        return tensor, tensor.local_shards()


# sharded tensors


def sharded_rows(tensor: torch.Tensor, group: dist.ProcessGroup) -> ShardedTensor:
    """Return a copy of a tensor, sharded in its first dimension over a group. Every rank must have the whole tensor."""
    shards, rank = boxes(tensor.shape, 0, dist.get_process_group_ranks(group), tensor.device), dist.get_rank(group)
    rows = tensor.detach().chunk(len(shards))[rank].clone() if rank < len(shards) else None
    return sharded([] if rows is None else [LocalShard(rows, deepcopy(shards[rank]))], described(tensor, shards), group)


def boxes(size: Sequence[int], dim: int, ranks: Sequence[int], device: torch.device) -> list[ShardMetadata]:
    """Return the metadata of each rank's shard of a tensor that is sharded in a dimension.

    ``ranks``: global ranks in the order of their shards. Ranks without elements are left out.
    """
    found, whole = [], size[dim]
    step = -(-whole // len(ranks)) or 1
    for i, start in enumerate(range(0, whole, step)):
        offsets, sizes = [0] * len(size), [*size]
        offsets[dim], sizes[dim] = start, min(step, whole - start)
        found.append(ShardMetadata(offsets, sizes, at(ranks[i], device)))
    return found


def at(rank: int, device: torch.device) -> str:
    """Return the place of a shard. Other ranks are assumed to use the same device as this one."""
    return f"rank:{rank}/{device}"


def described(tensor: torch.Tensor, shards: list[ShardMetadata]) -> ShardedTensorMetadata:
    """Return the metadata of a sharded tensor like ``tensor`` with these shards."""
    properties = TensorProperties(dtype=tensor.dtype, layout=tensor.layout, requires_grad=False)
    return ShardedTensorMetadata(shards, tensor.size(), properties)


def sharded(shards: list[LocalShard], meta: ShardedTensorMetadata, group: Any) -> ShardedTensor:
    """Return a sharded tensor from this rank's shards and the metadata of all shards."""
    return ShardedTensor._init_from_local_shards_and_global_metadata(shards, meta, process_group=group)


def rewrite_spec(spec: ShardingSpec, tensor: torch.Tensor, rank: int) -> ShardingSpec:
    """Return a sharding spec with this rank's placement set to its tensor's device, which may have changed."""
    if not isinstance(spec, ChunkShardingSpec):
        return spec
    here = _remote_device(at(rank, tensor.device))
    return replace(spec, placements=[here if p.rank() == rank else p for p in spec.placements])  # type: ignore[union-attr]
