"""DTensors on several meshes in one compiled function: what its results are, and the gradients of its arguments."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from harness import Rank, World, assert_same, dyadic, requirement
from harness.stacks import dynamo
from harness.stacks.limit import runs_with

ROWS, COLUMNS, WHOLE = Shard(0), Shard(1), Replicate()
KINDS: list[tuple[str, list[Placement], torch.dtype]] = [
    ("a", [ROWS], torch.float32),
    ("b", [COLUMNS], torch.float32),
    ("ab", [WHOLE, ROWS], torch.float64),
    ("b", [WHOLE], torch.float64),
]
"""The dimensions of a mesh, placements and the dtype of each DTensor: no two are alike in all of them."""

Several = Callable[[list[Any]], Any]

FUNCTIONS: dict[str, Several] = {
    "in order": lambda ds: [d * d for d in ds],
    "backwards": lambda ds: [d * 2 for d in reversed(ds)],
    "by every second": lambda ds: [d.sin() for d in (*ds[1::2], *ds[::2])],
    "beside tensors": lambda ds: [y for d in ds for y in (d.to_local() * 3, d * 3)],
    "views": lambda ds: [(d * 2).t() for d in ds],
    "redistributed": lambda ds: [(d * d).redistribute(placements=[WHOLE] * d.device_mesh.ndim) for d in ds],
    "made": lambda ds: [DTensor.from_local(d.to_local() * 2, d.device_mesh, d.placements, run_check=False) for d in ds],
    "mixed": lambda ds: [
        DTensor.from_local(d.to_local() * e.to_local().sum(), d.device_mesh, d.placements, run_check=False)
        for d, e in itertools.pairwise(ds)
    ],
}
"""Functions of a list of DTensors."""


def about(y: Any) -> tuple[Any, ...]:
    """Return what a tensor or a DTensor is, but its numbers."""
    known = type(y), y.shape, y.stride(), y.dtype, y.requires_grad, y.is_leaf
    return (*known, y.device_mesh, y.device_mesh.mesh_dim_names, y.placements) if isinstance(y, DTensor) else known


@requirement(
    "DYN-DT-8603",
    "Each DTensor that compiled code returns has the mesh, placements, size, strides and dtype that it has uncompiled.",
    source="torch.compile; torch/_functorch/_aot_autograd: subclasses; torch.distributed.tensor.DTensor: device_mesh, "
    "placements",
)
@requirement(
    "DYN-DT-8604",
    "Each gradient that compiled code computes for a DTensor has the mesh and placements that it has uncompiled.",
    source="torch.compile; torch/_functorch/_aot_autograd: subclasses; torch.distributed.tensor.DTensor: device_mesh, "
    "placements",
)
@pytest.mark.parametrize("form", FUNCTIONS)
@pytest.mark.skipif(runs_with("<2.12"), reason="before 2.12, compiled code has other strides")
@pytest.mark.world(2)
def test_results(world: World, form: str) -> None:
    """Give DTensors on two slices and the whole of a mesh, in two orders, with gradients and without."""
    function = FUNCTIONS[form]

    def body(rank: Rank) -> None:
        both = rank.mesh(1, 2, names=("a", "b"))
        meshes: dict[str, Any] = {"a": both["a"], "b": both["b"], "ab": both}
        compiled, counter = dynamo.compiled(function, dynamic=False)
        for call, (kinds, trained) in enumerate(((KINDS, True), (KINDS[::-1], False), (KINDS, True))):
            found = []
            for run in (function, compiled):
                given: list[Any] = [
                    DTensor.from_local(
                        dyadic(4, 4, key=(i, call, rank.index), dtype=dtype).to(rank.device),
                        meshes[names],
                        placements,
                        run_check=False,
                    ).requires_grad_(trained)
                    for i, (names, placements, dtype) in enumerate(kinds)
                ]
                results = run(given)
                if trained:
                    locals_ = [y.to_local() if isinstance(y, DTensor) else y for y in results]
                    torch.stack([y.double().sum() for y in locals_]).sum().backward()
                found.append((results, [d.grad for d in given if trained]))
            for what, rights, others in zip(("result", "gradient"), *found, strict=True):
                for number, (right, other) in enumerate(zip(rights, others, strict=True)):
                    where = f"call {call}, {what} {number}"
                    assert about(other) == about(right), where
                    parts = (y.to_local() if isinstance(y, DTensor) else y for y in (right, other))
                    assert_same(*(y.detach() + 0 for y in parts), where)
        assert counter.graphs == 2

    world.run(body)
