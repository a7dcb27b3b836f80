"""Buffers of context_parallel that are put together again from the parts that ranks have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor.experimental import context_parallel

from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks.tp_extension import context_parallel_unshard

BUFFERS: dict[str, tuple[tuple[int, ...], int]] = {
    "tokens": ((2, 8), 1),
    "heads": ((2, 3, 8, 2), 2),
    "mask": ((8, 8), 0),
    "positions": ((8,), 0),
}
"""Sizes of a buffer, and its dimension that is the sequence."""


@requirement(
    "TP-CONTEXT-5612",
    "Parts of a buffer that context_parallel makes are the whole buffer after they are unsharded, "
    "whichever dimension is the sequence.",
    source="torch.distributed.tensor.experimental.context_parallel: buffer_seq_dims",
)
@pytest.mark.parametrize("name", BUFFERS)
@pytest.mark.world(2)
def test_unsharded(world: World, name: str) -> None:
    """Each element is its position in the whole buffer."""
    shape, dimension = BUFFERS[name]
    whole = torch.arange(torch.Size(shape).numel()).view(shape)

    def body(rank: Rank) -> Any:
        buffer = whole.to(rank.device, copy=True)
        with context_parallel(rank.mesh(), buffers=[buffer], buffer_seq_dims=[dimension]):
            part = buffer.clone()
        (found,) = context_parallel_unshard(rank.mesh(), [part], [dimension])
        return found.tolist()

    assert_on_ranks([whole.tolist()] * world.size, world.run(body))
