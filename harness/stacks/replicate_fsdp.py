"""The ``replicate_fsdp`` stack: replication on FSDP2's machinery."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import ReplicateModule, replicate
from torch.distributed.tensor import DTensor

from harness.oracles.baseline import Tensors
from harness.worlds.rank import Rank

__all__ = ["MESH", "ReplicateModule", "apply", "gradients", "parameters", "parts", "replicate", "whole"]

MESH = "mesh" if "mesh" in inspect.signature(replicate).parameters else "device_mesh"
"""How the argument is called that takes the mesh."""


def apply(module: nn.Module, rank: Rank, *, groups: bool = True, **options: Any) -> nn.Module:
    """Replicate a module over the world, each child with parameters as a group of its own if ``groups``.

    ``options`` go to ``replicate``.
    """
    module.to(rank.device)
    options.setdefault(MESH, rank.mesh())
    if groups:
        for child in module.children():
            if any(True for _ in child.parameters()):
                replicate(child, **options)
    replicate(module, **options)
    return module


def parts(size: int) -> list[int]:
    """Each rank its own part of the batch."""
    return list(range(size))


def gradients(module: nn.Module) -> Tensors:
    """Whole gradients by parameter name."""
    return {n: whole(p.grad) for n, p in module.named_parameters() if p.grad is not None}


def parameters(module: nn.Module) -> Tensors:
    """Whole parameters by name."""
    return {n: whole(p) for n, p in module.named_parameters()}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as one device would have it, a copy on its own."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()
