"""One adapter a stack: how a module is put on ranks with it, and how its whole state comes back.

Names that PyTorch keeps private are imported in these files and nowhere else in the library.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn

from harness.oracles.baseline import Tensors
from harness.worlds.rank import Rank


class Stack(Protocol):
    """What a stack's module provides."""

    def apply(self, module: nn.Module, rank: Rank, **options: Any) -> nn.Module:
        """Put a module, equal on all ranks, under the stack; returns what to call."""
        ...

    def parts(self, size: int) -> list[int]:
        """Which part of the batch each rank of such a world gets, in rank order."""
        ...

    def gradients(self, module: nn.Module) -> Tensors | None:
        """Whole gradients by the plain module's parameter names, or None where the stack can't show them."""
        ...

    def parameters(self, module: nn.Module) -> Tensors:
        """Whole parameters by the plain module's parameter names."""
        ...
