"""Layouts that redistribute can't bring a DTensor to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from harness import Rank, World, assert_on_ranks, requirement

ROWS, COLUMNS, WHOLE = Shard(0), Shard(1), Replicate()
REFUSED: dict[str, dict[tuple[Placement, ...], tuple[bool, tuple[Placement, ...]]]] = {
    "mesh": {(ROWS,): (True, (COLUMNS,)), (WHOLE,): (True, (ROWS,)), (COLUMNS,): (True, (WHOLE,))},
    "mesh-alone": {(ROWS,): (True, (ROWS,)), (WHOLE,): (True, (WHOLE,)), (COLUMNS,): (True, (COLUMNS,))},
    "none": {(ROWS,): (False, ()), (WHOLE,): (False, ())},
    "more": {
        (ROWS,): (False, (ROWS, WHOLE)),
        (WHOLE,): (False, (WHOLE, COLUMNS)),
        (COLUMNS,): (False, (ROWS, COLUMNS)),
    },
}
"""Whether the mesh is another one, and the placements, for each layout that there is."""


@requirement(
    "TP-MOVE-4702",
    "redistribute raises an error for another mesh than the DTensor's, or for a wrong number of placements.",
    source="torch.distributed.tensor.DTensor.redistribute: 'only supports redistributing DTensor on the same "
    "DeviceMesh'; placements: 'must have the same number of elements as device_mesh.ndim'",
)
@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.world(2)
def test_refused(world: World, what: str) -> None:
    """Take a mesh whose ranks are in another order, with other or the same placements; none, and one too many."""

    def body(rank: Rank) -> list[Any]:
        mesh, taken = rank.mesh(), []
        turned = DeviceMesh(rank.device.type, [1, 0])
        for layout, (elsewhere, placements) in REFUSED[what].items():
            x = distribute_tensor(torch.ones(4, 2, device=rank.device), mesh, layout)
            try:
                found = x.redistribute(turned if elsewhere else mesh, placements)
                taken.append(f"gave {found.placements} on {found.device_mesh.mesh.tolist()}")
            except (NotImplementedError, RuntimeError, ValueError, IndexError):
                pass
        return taken

    assert_on_ranks([[]] * 2, world.run(body))
