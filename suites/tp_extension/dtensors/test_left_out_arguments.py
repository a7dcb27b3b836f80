"""What DTensors and context_parallel do where arguments that are documented as optional are left out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional

from harness import Rank, World, requirement


def distributed(rank: Rank, whole: torch.Tensor) -> None:
    """Distribute a tensor without placements."""
    x = distribute_tensor(whole, rank.mesh())
    assert x.placements == (Replicate(),)
    assert torch.equal(x.to_local(), whole)


def redistributed(rank: Rank, whole: torch.Tensor) -> None:
    """Redistribute a sharded tensor without placements."""
    x = distribute_tensor(whole, rank.mesh(), [Shard(0)]).redistribute()
    assert x.placements == (Replicate(),)
    assert torch.equal(x.to_local(), whole)


def restored(rank: Rank, whole: torch.Tensor) -> None:
    """Shard a buffer without saying what is not to be restored."""
    buffer = whole.clone()
    with context_parallel(rank.mesh(), buffers=[buffer], buffer_seq_dims=[0]):
        assert len(buffer) == len(whole) // rank.size
    assert torch.equal(buffer, whole)


def without_buffers(rank: Rank, whole: torch.Tensor) -> None:
    """Enter a context for attention alone."""
    attention = functional.scaled_dot_product_attention
    with context_parallel(rank.mesh()):
        assert functional.scaled_dot_product_attention is not attention
    assert functional.scaled_dot_product_attention is attention


CALLS: dict[str, Callable[[Rank, torch.Tensor], None]] = {
    "distribute_tensor": distributed,
    "redistribute": redistributed,
    "no_restore_buffers": restored,
    "buffers": without_buffers,
}


@requirement(
    "TP-DEFAULT-5632",
    "Placements and buffers that are documented as optional can be left out, with the effect that is documented.",
    source="torch.distributed.tensor: DTensor.redistribute: 'default: replicate on all mesh dimensions', "
    "distribute_tensor: 'by default replicate the tensor'; experimental.context_parallel: 'buffers (Optional[...'",
)
@pytest.mark.parametrize("what", CALLS)
@pytest.mark.world(2)
def test_left_out(world: World, what: str) -> None:
    """Leave the placements out or the buffers of a context; compare with the whole tensor."""

    def body(rank: Rank) -> None:
        CALLS[what](rank, torch.arange(16.0, device=rank.device).view(8, 2))

    world.run(body)
