"""The mesh over which FSDP-replicate replicates a module."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

if TYPE_CHECKING:
    from torch.distributed.fsdp import DataParallelMeshDims  # newer than the oldest supported PyTorch


def mesh_of(mesh: DeviceMesh | None, dimensions: DataParallelMeshDims | None) -> DeviceMesh:
    """Return the mesh to replicate over. Errors: ValueError for dimensions that do not fit."""
    if mesh is None:
        device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
        if not dist.is_initialized():
            dist.init_process_group()
        mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("replicate",))
    if dimensions is None:
        if mesh.ndim != 1:
            raise ValueError(f"replicate expects a 1D DeviceMesh but got {mesh}")
        return mesh
    if dimensions.shard is not None:
        raise ValueError("replicate() with dp_mesh_dims requires replicate-only dims. Use fully_shard() for sharding.")
    names = (dimensions.replicate,) if isinstance(dimensions.replicate, str) else dimensions.replicate or ()
    unknown = [name for name in names if name not in (mesh.mesh_dim_names or ())]
    if unknown or not names:
        raise ValueError(f"dp_mesh_dims {dimensions}: the mesh has the dimensions {mesh.mesh_dim_names}")
    return mesh[names]
