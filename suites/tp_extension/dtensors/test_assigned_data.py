"""The data of DTensors and of parameters, to which a program assigns or writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from fixtures.operators import floats
from harness import Rank, World, assert_on_ranks, requirement


def assign(x: Any, new: Any) -> None:
    """Assign a tensor as the data of another."""
    x.data = new


def from_vector(x: Any, new: Any) -> None:
    """Give a parameter the elements of a vector."""
    vector = new.redistribute(placements=[Replicate()]).flatten()
    nn.utils.vector_to_parameters(vector, [x])


def load(x: Any, new: Any) -> None:
    """Load a state dict into a module whose parameter is the tensor."""
    nn.ParameterList([x]).load_state_dict({"0": new})


WAYS: dict[str, tuple[Callable[[Any, Any], None], ...]] = {
    "assigned": (assign, from_vector),
    "written": (
        load,
        lambda x, new: x.data.copy_(new),
        lambda x, new: x.data.zero_().add_(new),
        lambda x, new: torch.utils.swap_tensors(x, nn.Parameter(new)),
    ),
}
"""Ways to give a parameter the elements of another tensor."""


@requirement(
    "TP-LOCAL-6650",
    "Assigning or writing to the data of a DTensor gives it the new elements, as functions of torch.nn do.",
    source="torch.nn.utils.vector_to_parameters: 'Copy slices of a vector into an iterable of parameters.'",
)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.world(2)
def test_data(world: World, way: str) -> None:
    """Replace the elements of replicas, and of shards of rows and of columns, by others in the same placements."""
    placements: tuple[Placement, ...] = (Replicate(), Shard(0), Shard(1))

    def body(rank: Rank) -> list[str]:
        old, new = floats(4, 6).to(rank.device), floats(4, 6, start=3).to(rank.device)
        wrong = []
        for i, change in enumerate(WAYS[way]):
            for placement in placements:
                x = nn.Parameter(distribute_tensor(old.clone(), rank.mesh(), [placement]))
                change(x, distribute_tensor(new, rank.mesh(), [placement]))
                found = x.detach().full_tensor()
                if not torch.equal(found, new):
                    kept = "are the old" if torch.equal(found, old) else "are others"
                    wrong.append(f"way {i}, {placement}: elements {kept}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))
