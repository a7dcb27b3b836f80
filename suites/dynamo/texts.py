"""A function with a collective that is compiled anew for each text, and what it must give."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from harness import assert_same
from harness.stacks.collectives import functional


def summed(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Sum over ranks, and multiply by the length of a text."""
    return functional.all_reduce(x, "sum", dist.group.WORLD) * len(kind)


def check(function: Any, x: torch.Tensor, length: int) -> None:
    """Call with a text of some length."""
    assert_same(summed(x, "a" * length) + 0, function(x, "a" * length) + 0, f"length {length}")
