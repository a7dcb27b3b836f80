"""Classes of tensors that answer for functions by __torch_function__, in code that AOTAutograd compiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from harness import Rank, World, requirement
from harness.stacks import dynamo
from suites.dynamo.objects import known, summed


class Answering(torch.Tensor):
    """A tensor whose class answers torch.stack with seven."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return torch.tensor(7.0) if func is torch.stack else super().__torch_function__(func, types, args, kwargs or {})


STACKS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "list": lambda a: torch.stack([a, a]),
    "keyword": lambda a: torch.stack(tensors=[a, a]),
    "tuple": lambda a: torch.stack((a, a)),
}
"""How tensors are stacked."""


@requirement(
    "DYN-CLASS-3766",
    "Compiled code asks the __torch_function__ of a tensor's class whether the tensor is in a list or in a tuple.",
    source="PyTorch docs, Extending torch.Tensor: __torch_function__ and overloaded arguments; torch.compile",
)
@pytest.mark.parametrize("way", STACKS)
@pytest.mark.world(2)
def test_stacked(world: World, way: str) -> None:
    """Scale a sum over ranks by what the class of two tensors answers."""

    def step(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        return summed(x) * STACKS[way](a).sum()

    def body(rank: Rank) -> list[Any]:
        compiled, _ = dynamo.compiled(step, backend="aot_eager", fullgraph=False)
        found: list[Any] = []
        for call in step, compiled:
            a = torch.ones(2, device=rank.device).as_subclass(Answering)
            try:
                found.append(known(call(torch.ones(2, device=rank.device), a)))
            except Exception as error:  # uncompiled code raises none
                found.append(f"{error!r:.100}")
        return found

    for expected, observed in world.run(body):
        assert observed == expected, f"{way}: {expected} uncompiled, {observed} compiled"
