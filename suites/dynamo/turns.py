"""Call a compiled function with one thing after another, and compare what it gives with the uncompiled function."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from harness import Rank
from harness.stacks import dynamo
from suites.dynamo.objects import known

Make = Callable[[], Any]
"""A function that makes an argument anew."""


def by_turns(rank: Rank, function: Callable[..., Any], makes: Iterable[Make], *, name: str) -> list[str]:
    """Compile a function once, and call it with what each makes. Return a sentence for each result that differs."""
    compiled, _ = dynamo.compiled(function, backend="eager", fullgraph=False)
    wrong = []
    for i, make in enumerate(makes):
        expected, observed = (_outcome(call, rank, make) for call in (function, compiled))
        if observed != expected:
            wrong.append(f"{name}, call {i}: {expected} uncompiled, {observed} compiled")
    return wrong


def _outcome(function: Callable[..., Any], rank: Rank, make: Make) -> Any:
    """Return what a call with a tensor of the rank gives, or the class of its error."""
    try:
        return known(function(torch.arange(2.0, device=rank.device) + rank.index, make()))
    except Exception as error:  # whatever it is, it is compared
        return ("error", type(error).__name__, str(error).strip().partition("\n")[0][:200])
