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
COUNTED: dict[str, tuple[tuple[int, ...], int]] = {
    "tokens": ((2, 8), 1),
    "hidden": ((2, 8, 3), 1),
    "many-heads": ((2, 8, 8, 2), 2),
}
"""Buffers whose first dimension is the batch; the last one has as many heads as positions."""


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


@requirement(
    "TP-CONTEXT-7350",
    "context_parallel and context_parallel_unshard take a dimension of a buffer also as counted from its last one.",
    source="torch.distributed.tensor.experimental.context_parallel: buffer_seq_dims; torch.Tensor: dim",
)
@pytest.mark.parametrize("name", COUNTED)
@pytest.mark.parametrize("counted", ["start", "end"])
@pytest.mark.parametrize("function", ["shard", "unshard"])
@pytest.mark.world(2)
def test_counted(world: World, function: str, counted: str, name: str) -> None:
    """Count the sequence's dimension from the start or the end for one function, and from the start for the other."""
    shape, dimension = COUNTED[name]
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    other = dimension if counted == "start" else dimension - len(shape)
    dims = (other, dimension) if function == "shard" else (dimension, other)

    def body(rank: Rank) -> Any:
        buffer = whole.to(rank.device, copy=True)
        with context_parallel(rank.mesh(), buffers=[buffer], buffer_seq_dims=[dims[0]]):
            part = buffer.clone()
        assert part.shape[dimension] == shape[dimension] // rank.size
        (found,) = context_parallel_unshard(rank.mesh(), [part], [dims[1]])
        return found.tolist()

    assert_on_ranks([whole.tolist()] * world.size, world.run(body))
