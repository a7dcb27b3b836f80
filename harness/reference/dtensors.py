"""Local parts of tensors, and their layouts over ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

Layout = tuple[DeviceMesh, tuple[Placement, ...]]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def laid(own: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], like: torch.Tensor) -> DTensor:
    """Return a DTensor from this rank's part, with the shape and stride of another tensor."""
    return DTensor.from_local(own, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())


def moved(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """Move a tensor to a device. A tensor on the meta device stays there, to be filled later."""
    return tensor if tensor.is_meta else tensor.to(device)
