"""The memory of DTensors that other processes or packages ask for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from fixtures.tensors import numbers
from harness import Rank, World, requirement
from harness.stacks.limit import runs_with


def share_module(x: Any) -> object:
    """Share the parameters of a layer whose weight is the DTensor."""
    layer = nn.Linear(2, 4, bias=False)
    layer.weight = nn.Parameter(x)
    return layer.share_memory()


WAYS: dict[str, Callable[[Any], object]] = {
    "numpy": lambda x: x.numpy(),
    "share_memory_": lambda x: x.share_memory_(),
    "share_memory": share_module,
    "from_dlpack": lambda x: torch.from_dlpack(x) + 0,
    "share_memory_ of a part": lambda x: x.to_local().cpu().share_memory_(),
    "from_dlpack of a part": lambda x: torch.from_dlpack(x.to_local()) + 0,
}
"""Ways to take the memory of a DTensor, or that of its local tensor."""
REFUSED = "before 2.12, DTensor has no rule for is_pinned, which from_dlpack asks first: it gets no further"


@requirement(
    "TP-LOCAL-5611",
    "A function that takes the memory of a DTensor raises an error at most, and the DTensor keeps its elements.",
    source="torch.from_dlpack, torch.Tensor.share_memory_, torch.nn.Module.share_memory",
)
@pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, marks=pytest.mark.skipif(way == "from_dlpack" and runs_with("<2.12"), reason=REFUSED))
        for way in WAYS
    ],
)
@pytest.mark.world(2)
def test_taken(world: World, way: str) -> None:
    """Share the memory of a matrix that is sharded by rows, or give it to another package."""

    def body(rank: Rank) -> None:
        whole = numbers(4, 2).to(rank.device)
        x = distribute_tensor(whole.clone(), rank.mesh(), [Shard(0)])
        try:
            WAYS[way](x)
        except (RuntimeError, TypeError, BufferError):
            assert "part" not in way, f"{way} raised an error"
        assert torch.equal(x.full_tensor(), whole)

    world.run(body)
