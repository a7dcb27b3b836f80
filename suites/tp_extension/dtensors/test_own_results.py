"""Memory of what is gathered from several ranks, or reduced over them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from harness import Rank, World, requirement

MADE: dict[str, Callable[[DTensor], torch.Tensor]] = {
    "full_tensor": DTensor.full_tensor,
    "redistribute": lambda dtensor: dtensor.redistribute(placements=[Replicate()]).to_local(),
    "asynchronous": lambda dtensor: dtensor.redistribute(placements=[Replicate()], async_op=True).to_local(),
    "to shards": lambda dtensor: dtensor.redistribute(placements=[Shard(2)]).to_local(),
}


@requirement(
    "TP-OWN-9460",
    "full_tensor() or redistribute() of several ranks' parts has memory of its own: a change of it, or of the parts, "
    "does not change the other.",
    source="torch.distributed.tensor.DTensor: full_tensor, redistribute: 'returns a new DTensor'",
)
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Partial(), Partial("max")], ids=str)
@pytest.mark.parametrize("made", MADE)
@pytest.mark.world(2, 3)
def test_own(world: World, made: str, placement: Placement) -> None:
    """Write into the parts and into what was made of them, of tensors with sizes that ranks divide and others."""

    def body(rank: Rank) -> None:
        mesh = rank.mesh(rank.size)
        for shape in (rank.size, 2, 6), (rank.size, 1, 5):
            for written in "result", "part":
                part = torch.arange(1.0, 1 + shape[0] * shape[1] * shape[2], device=rank.device).reshape(shape)
                dtensor = DTensor.from_local(part, mesh, [placement])
                result = MADE[made](dtensor)
                own, value = part.clone(), result.clone()
                (result if written == "result" else part).fill_(-99.0)
                if written == "result":
                    assert torch.equal(dtensor.to_local(), own), f"{shape}: the DTensor changed"
                else:
                    assert torch.equal(result, value), f"{shape}: the result changed"

    world.run(body)
