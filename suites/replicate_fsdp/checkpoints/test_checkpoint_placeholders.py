"""Loads of checkpoints into tensors on the meta device, which have no memory yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as checkpoint
from torch.distributed.tensor import DTensor, Shard

from fixtures.states import assert_equal, whole
from fixtures.tensors import numbers
from harness import Rank, World, requirement


def made(rank: Rank, device: torch.device, add: int) -> dict[str, Any]:
    """Return a state with tensors on a device, at several depths and in every container, beside numbers."""
    mesh = rank.mesh()

    def plain(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return (numbers(*size) + add).to(dtype).to(device)

    def sharded(rows: int) -> DTensor:
        parts = plain(rows, 2).chunk(2)
        return DTensor.from_local(parts[rank.index], mesh, [Shard(0)], shape=torch.Size((rows, 2)), stride=(2, 1))

    return {
        "plain": plain(3),
        "number": plain(),
        "whole numbers": plain(2, dtype=torch.int64),
        "even": sharded(4),
        "uneven": sharded(5),
        "nested": {"plain": plain(2, 2), "step": add, "deeper": {"sharded": sharded(4), "plain": plain(3)}},
        "listed": [plain(3), sharded(4), {"plain": plain(4), "name": f"{add}"}],
        "pair": (plain(2), plain(1)),
    }


def devices(state: Any) -> set[str]:
    """Return the types of the devices of all tensors of a state."""
    if isinstance(state, torch.Tensor):
        return {state.device.type}
    inner: Any = state.values() if isinstance(state, Mapping) else state
    return set().union(*map(devices, inner)) if isinstance(state, (Mapping, list, tuple)) else set()


@requirement(
    "RFSDP-CHECKPOINT-2400",
    "A load gives each tensor on the meta device memory and its saved values, at every depth of the state.",
    source="torch.distributed.checkpoint: load, DefaultLoadPlanner; torch/distributed/checkpoint/planner_helpers.py: "
    "'Initializes meta tensor if the meta tensor is DTensor or torch.Tensor'",
)
@pytest.mark.world(2)
def test_placeholders(world: World, tmp_path: Path) -> None:
    """Load all of a state at once, and each of its entries alone."""

    def body(rank: Rank) -> None:
        right = made(rank, rank.device, 1)
        checkpoint.save(right, checkpoint_id=tmp_path)
        parts: Sequence[Sequence[str]] = [list(right), *([key] for key in right)]
        for keys in parts:
            empty = made(rank, torch.device("meta"), 2)
            loaded = {key: empty[key] for key in keys}
            checkpoint.load(loaded, checkpoint_id=tmp_path)
            assert devices(loaded) == {rank.device.type}, keys
            expected = {key: right[key] for key in keys}
            assert_equal(whole(listed(expected)), whole(listed(loaded)), str(keys))

    world.run(body)


def listed(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with lists in place of its tuples."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in state.items()}
