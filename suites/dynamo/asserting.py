"""Functions that assert what they are given, in a module whose assert statements pytest leaves as they are."""

from __future__ import annotations

from typing import Any

import torch

from suites.dynamo.objects import summed


def alone(x: torch.Tensor, k: Any) -> Any:
    """Assert without a text."""
    y = summed(x)
    assert k == "a"
    return y + 1


def with_text(x: torch.Tensor, k: Any) -> Any:
    """Assert with a text."""
    y = summed(x)
    assert k == "a", "no such kind"
    return y + 1


def with_formatted_text(x: torch.Tensor, k: Any) -> Any:
    """Assert with a text that has the value in it."""
    y = summed(x)
    assert k in ("a", 3), f"no kind {k}"
    return y + 1


def in_call(x: torch.Tensor, k: Any) -> Any:
    """Call a function that asserts."""
    return with_text(x * 2, k) + 1


def caught(x: torch.Tensor, k: Any) -> Any:
    """Catch the error of an assertion."""
    try:
        return with_text(x, k)
    except AssertionError:
        return summed(x) * 5
