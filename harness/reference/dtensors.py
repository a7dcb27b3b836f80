"""What a rank has of a tensor, and how it lies over ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

Layout = tuple[DeviceMesh, tuple[Placement, ...]]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def laid(own: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], like: torch.Tensor) -> DTensor:
    """A DTensor of what this rank has of it, of the shape of another tensor."""
    return DTensor.from_local(own, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())


def moved(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """On a device, unless it is on none and is to be filled later."""
    return tensor if tensor.is_meta else tensor.to(device)
