"""Forms of the arguments of functions that local_map makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map

from harness import Rank, World, requirement

CALLS: dict[str, Callable[..., Any]] = {
    "by position": lambda mapped, x: mapped(x, 2.0),
    "numbers by name": lambda mapped, x: mapped(x, factor=2.0),
    "by name": lambda mapped, x: mapped(x=x, factor=2.0),
}
"""Forms of a call."""


@requirement(
    "TP-LOCALMAP-5387",
    "A function that local_map maps gets the local tensor of each DTensor, whatever the form of the call.",
    source="torch.distributed.tensor.experimental.local_map: 'extracting the local components of DTensor'",
)
@pytest.mark.parametrize("how", CALLS)
@pytest.mark.world(2)
def test_arguments(world: World, how: str) -> None:
    """Add up the rows of a rank's part, which all ranks do together."""

    def body(rank: Rank) -> None:
        kinds = []

        def total(x: Any, factor: float) -> Any:
            kinds.append(type(x).__name__)
            return torch.ones(1, device=rank.device) * x.shape[0] * factor

        x = distribute_tensor(torch.ones(4, 3, device=rank.device), rank.mesh(), [Shard(0)])
        found: Any = CALLS[how](local_map(total, [Partial()]), x)
        assert kinds == ["Tensor"], f"the function got {kinds}"
        assert found.full_tensor().item() == 8.0

    world.run(body)
