"""The ``replicate`` stack: composable DDP."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed._composable.replicate import DDP, replicate
from torch.nn.parallel.distributed import _MixedPrecision as MixedPrecision

from harness.oracles.baseline import plain_gradients as gradients
from harness.oracles.baseline import plain_parameters as parameters
from harness.worlds.rank import Rank

__all__ = ["DDP", "MixedPrecision", "apply", "gradients", "names", "parameters", "parts", "replicate"]


def apply(module: nn.Module, rank: Rank, **options: Any) -> nn.Module:
    """Replicate a module over the world; ``options`` go to ``replicate``."""
    return replicate(module.to(rank.device), **options)


def names(module: nn.Module) -> list[str]:
    """Of the parameters that are averaged, once the module was called: as its state has them, for whoever debugs."""
    return list(replicate.state(module)._param_names)


def parts(size: int) -> list[int]:
    """Each rank its own part of the batch."""
    return list(range(size))
