"""DTensors on meshes of which dimensions were flattened: moves over both of them at once."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from fixtures.placements import MORE_OPERATORS, laid_out
from fixtures.tensors import numbers
from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks import messages
from harness.stacks.collectives import flattened

pytestmark = pytest.mark.needs(torch=MORE_OPERATORS)
R, ROWS, COLUMNS = Replicate(), Shard(0), Shard(1)
PENDING = SUM, AVERAGE, LARGEST = Partial(), Partial("avg"), Partial("max")
Layout = tuple[Placement, ...]


def placed(whole: torch.Tensor, mesh: Any, placements: Layout) -> tuple[DTensor, torch.Tensor]:
    """Return a DTensor with this rank's part, and what it stands for; the first of ranks with pending parts has all."""
    local = laid_out(whole, mesh, placements).clone(memory_format=torch.contiguous_format)
    if any(mesh.get_local_rank(i) for i, placement in enumerate(placements) if placement.is_partial()):
        local.zero_()
    due = whole / 2 ** sum(placement == AVERAGE for placement in placements)
    return DTensor.from_local(local, mesh, placements, shape=whole.shape, stride=whole.stride()), due


def at_once(source: Layout, target: Layout) -> bool:
    """Return whether a move is the same over both mesh dimensions, such as to gather shards or to reduce sums."""
    if target == (R, R):
        return source[0] == source[1] != R or set(source) == {SUM, AVERAGE}
    return target[0] == target[1] and set(source) <= {SUM, AVERAGE}


@requirement(
    "TP-MOVE-4202",
    "redistribute takes one collective for a move that is the same over several mesh dimensions, if these were "
    "flattened.",
    source="torch.distributed.tensor.DTensor.redistribute; test_redistribute.py: DistributeWithDeviceOrderTest",
)
@pytest.mark.world(4)
def test_moves(world: World) -> None:
    """Bring a tensor from each layout to each other; sums and averages may be reduced together, others not."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong = rank.mesh(2, 2, names=("dp", "tp")), []
        flattened(mesh, "both")
        whole = numbers(8, 4).to(rank.device) * 4
        for source in itertools.product((R, ROWS, COLUMNS, *PENDING), repeat=2):
            if LARGEST in source and set(PENDING[:2]) & set(source):
                continue  # which order matters
            for target in itertools.product((R, ROWS, COLUMNS), repeat=2):
                x, due = placed(whole, mesh, source)
                at = messages.launched()
                moved = x.redistribute(placements=target)
                found = messages.launched() - at
                if at_once(source, target) and found != 1:
                    wrong.append(f"{source} to {target}: {found} collectives")
                if not torch.equal(laid_out(due, mesh, target), moved.to_local()):
                    wrong.append(f"{source} to {target}: {moved.to_local().tolist()}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


@requirement(
    "TP-MOVE-4202",
    "redistribute takes one collective for a move that is the same over several mesh dimensions, if these were "
    "flattened.",
    source="torch.distributed.tensor.DTensor.redistribute; test_redistribute.py: DistributeWithDeviceOrderTest",
)
@pytest.mark.world(4)
def test_dimensions_apart(world: World) -> None:
    """Flatten two of three dimensions, which are neighbours or not; the third one has one rank."""

    def body(rank: Rank) -> list[str]:
        wrong = []
        whole = numbers(8, 4).to(rank.device) * 4
        for shape, parts in (((2, 1, 2), ("a", "c")), ((1, 2, 2), ("b", "c")), ((2, 2, 1), ("a", "b"))):
            mesh = rank.mesh(*shape, names=("a", "b", "c"))
            flattened(mesh[parts], "flat")
            for source, target in itertools.product((ROWS, COLUMNS, SUM, AVERAGE), (R, ROWS)):
                if source == target:
                    continue
                layouts = [tuple(p if size == 2 else R for size in shape) for p in (source, target)]
                x, due = placed(whole, mesh, layouts[0])
                at = messages.launched()
                moved = x.redistribute(placements=layouts[1])
                found = messages.launched() - at
                one = target == R or source.is_partial()
                if one and found != 1:
                    wrong.append(f"{source} to {target} on {shape}: {found} collectives")
                if not torch.equal(laid_out(due, mesh, layouts[1]), moved.to_local()):
                    wrong.append(f"{source} to {target} on {shape}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))
