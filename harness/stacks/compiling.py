"""What users tell Dynamo beside its settings, by names that torch.compiler lacks: marks of functions and of sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = [
    "DECOMPOSES",
    "OVER_LIMIT",
    "leaf",
    "nonstrict",
    "unbacked",
]

DECOMPOSES = "torch._inductor.config.aten_distributed_optimizations.allow_comms_decompositions"
"""The name in PyTorch without which Inductor replaces no gathers, for ``@pytest.mark.needs(torch=)``."""

OVER_LIMIT = torch._dynamo.config.recompile_limit
"""How often a function may be compiled by default."""


def nonstrict(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function as one that Dynamo does not look into, but AOTAutograd does."""
    return torch._dynamo.nonstrict_trace(function)


def leaf(
    function: Callable[..., Any],
    like: Callable[..., Any],
    *,
    hook: Callable[..., None] | None = None,
    mutates: set[str] | None = None,
) -> Callable[..., Any]:
    """Mark a function as one that neither Dynamo nor AOTAutograd looks into.

    Args:
        like: gives tensors like the results.
        hook: is given the gradients of the arguments.
        mutates: the names of the arguments that the function changes.
    """
    mark = torch._dynamo.decorators.leaf_function
    marked: Any = mark(mutates_args=mutates)(function) if mutates else mark(function)
    marked.register_fake(like)
    if hook is not None:
        marked.register_multi_grad_hook(hook)
    return marked  # type: ignore[no-any-return]


def unbacked(tensor: torch.Tensor, dims: Any, **options: Any) -> torch.Tensor:
    """Mark dimensions as ones whose sizes the compiler does not know, and return the tensor."""
    torch._dynamo.decorators.mark_unbacked(tensor, dims, **options)
    return tensor
