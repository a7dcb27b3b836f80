"""The local tensors of DTensors that are views of other DTensors: what is written to them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard, distribute_tensor

from fixtures.operators import floats
from fixtures.placements import MORE_OPERATORS
from harness import Rank, World, assert_on_ranks, requirement

pytestmark = pytest.mark.needs(torch=MORE_OPERATORS)
PLACES: tuple[Placement, ...] = (Replicate(), Shard(0), Shard(1), Shard(2))
VIEWS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda x: x,
    "detach": lambda x: x.detach(),
    "alias": lambda x: x[...],
    "mT": lambda x: x.mT,
    "transpose": lambda x: x.transpose(0, 2),
    "permute": lambda x: x.permute(1, 2, 0),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "transpose of unsqueeze": lambda x: x.unsqueeze(0).transpose(0, -1),
    "movedim": lambda x: x.movedim(0, -1),
}
"""Views of a whole cube, whose memory is in another order than their elements, or not."""
MODES = {"no_grad": torch.no_grad, "enable_grad": torch.enable_grad, "inference_mode": torch.inference_mode}


@requirement(
    "TP-LOCAL-4923",
    "A write to the local tensor of a DTensor reaches the DTensor, as well as the tensor of which it is a view.",
    source="torch.distributed.tensor.DTensor.to_local: it represents the local tensor on its current rank",
)
@pytest.mark.world(2)
def test_written(world: World) -> None:
    """Double the elements through local tensors that are contiguous or not, of whole, sharded or pending values."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong, whole = rank.mesh(), [], floats(4, 6, 2).to(rank.device)
        modes = itertools.cycle(MODES.items())
        for (name, view), place in itertools.product(VIEWS.items(), (*PLACES, Partial())):
            case, mode = next(modes)
            with mode():
                x = distribute_tensor(whole.clone(), mesh, [place], src_data_rank=None)
                viewed = view(x)
                viewed.to_local().mul_(2)
                for what, expected, found in (("view", view(whole * 2), viewed), ("DTensor", whole * 2, x)):
                    if not torch.equal(expected, found.full_tensor()):
                        wrong.append(f"{what} of {name} of {place} in {case}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))
