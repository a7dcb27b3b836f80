"""fully_shard with dp_mesh_dims: parameters that are DTensors on a whole mesh, of which some dimensions are named."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fixtures.tensors import chunk, numbers
from harness import Rank, World, requirement
from harness.stacks.limit import runs_with

SOURCE = "torch.distributed.fsdp.DataParallelMeshDims; torch.distributed.fsdp.fully_shard: dp_mesh_dims"
DIMS = pytest.mark.needs(torch="torch.distributed.fsdp.DataParallelMeshDims")


def distributed(mesh: Any, placements: list[Any], device: torch.device, rows: int = 8) -> Any:
    """Return a layer from four features to as many as rows, whose weight is a DTensor."""
    layer = nn.Linear(4, rows, bias=False)
    layer.weight = nn.Parameter(distribute_tensor(numbers(rows, 4).to(device), mesh, placements))
    return layer


MESHES: dict[str, tuple[tuple[int, ...], tuple[str, ...], dict[str, Any]]] = {
    "hybrid": ((2, 2), ("b", "c"), {"shard": "c", "replicate": "b"}),
    "hybrid-the-other-way": ((2, 2), ("d", "e"), {"shard": "d", "replicate": "e"}),
    "both-shard": ((2, 2), ("f", "g"), {"shard": ("f", "g")}),
    "tensor": ((2, 2), ("j", "k"), {"shard": "j"}),
    "three": ((1, 2, 2), ("l", "m", "n"), {"shard": "m", "replicate": "l"}),
    "replicas": ((2, 2), ("o", "p"), {"replicate": ("o", "p")}),
    "replicas-and-tensor": ((2, 2), ("q", "r"), {"replicate": "q"}),
    "two-of-replicas": ((2, 1, 2), ("s", "t", "u"), {"shard": "u", "replicate": ("s", "t")}),
}
"""Shapes and names of meshes, and what of them is named; the rest is for tensor parallelism."""


@requirement(
    "RFSDP-SPMD-01",
    "With dp_mesh_dims, fully_shard shards parameters over the dimensions named for it, and averages their gradients "
    "over all named dimensions alone.",
    source=SOURCE,
)
@DIMS
@pytest.mark.world(4)
def test_meshes(world: World) -> None:
    """Name one dimension or several of each kind, over weights that others divide by rows, by columns or not."""

    def body(rank: Rank) -> None:
        keeps = itertools.cycle((False, True))
        for name, (shape, names, named) in MESHES.items():
            mesh = rank.mesh(*shape, names=names)
            data = {n for value in named.values() for n in ((value,) if isinstance(value, str) else value)}
            others: list[Any] = [Shard(0), Shard(1), Replicate()] if data != set(names) else [Replicate()]
            for other, kept in zip(others, keeps, strict=False):
                what = f"{name}, {other}, {kept=}"
                model = distributed(mesh, [Replicate() if n in data else other for n in names], rank.device)
                fully_shard(
                    model, mesh=mesh, reshard_after_forward=not kept, dp_mesh_dims=fsdp.DataParallelMeshDims(**named)
                )
                whole = numbers(8, 4)
                for step in range(2):
                    weight = model.weight
                    assert torch.equal(weight.full_tensor().cpu(), whole), f"{what}, step {step}"
                    shards = math.prod(mesh.size(names.index(n)) for n in names if n in named.get("shard", ()))
                    divided = shards * (2 if isinstance(other, Shard) else 1)
                    assert weight.to_local().numel() == 32 // divided, what
                    sizes = [mesh.size(names.index(n)) for n in names if n in data]
                    at = [mesh.get_local_rank(n) for n in names if n in data]
                    part = sum(place * math.prod(sizes[i + 1 :]) for i, place in enumerate(at))
                    placed = [Shard(0) if n in data else Replicate() for n in names]
                    own = torch.full((1, 4), 1.0 + part, device=rank.device)
                    x = DTensor.from_local(own, mesh, placed, run_check=False)
                    output = model(x)
                    assert torch.equal(output.full_tensor()[part].detach().cpu(), (whole * (1.0 + part)).sum(1)), what
                    output.sum().backward()
                    model.reshard()
                    gradient = model.weight.grad
                    parts = 4 if others == [Replicate()] else 2
                    assert gradient.placements == model.weight.placements, what
                    assert gradient.full_tensor().unique().tolist() == [(parts + 1) / 2], f"{what}, step {step}"
                    torch.optim.SGD(model.parameters(), lr=2.0, foreach=False).step()
                    model.zero_grad()
                    whole = whole - (parts + 1)

    world.run(body)


@requirement(
    "RFSDP-SPMD-2100",
    "With dp_mesh_dims, fully_shard takes parameters on its mesh, even if a part or an equal of it was used before.",
    source=SOURCE,
)
@DIMS
@pytest.mark.parametrize("before", ["part", "equal"])
@pytest.mark.world(4)
def test_used_meshes(world: World, before: str) -> None:
    """Train a layer that is sharded over one dimension and tensor-parallel over the other, or whole on an equal mesh.

    FSDP-replicate makes such an equal mesh of two parts.
    """

    def body(rank: Rank) -> None:
        names = (f"{before} data", "tensor")
        mesh = rank.mesh(2, 2, names=names)
        x = torch.ones(1, 4, device=rank.device)
        used = mesh["tensor"] if before == "part" else init_device_mesh(rank.device.type, (2, 2), mesh_dim_names=names)
        first = distributed(used, [Replicate()] * used.ndim, rank.device)
        if before == "part":
            fully_shard(first, mesh=mesh[names[0]])
        first(distribute_tensor(x, used, [Replicate()] * used.ndim)).to_local().sum().backward()
        second = distributed(mesh, [Replicate()] * 2, rank.device)
        fully_shard(second, mesh=mesh, dp_mesh_dims=fsdp.DataParallelMeshDims(shard=names[0]))
        second(distribute_tensor(x, mesh, [Replicate()] * 2)).to_local().sum().backward()
        for model in first, second:
            assert torch.equal(model.weight.grad.full_tensor().cpu(), torch.ones(8, 4))

    world.run(body)


TOGETHER: dict[str, tuple[tuple[int, ...], dict[str, tuple[str, ...]], int]] = {
    "both": ((2, 2), {"shard": ("a", "b")}, 4),
    "after replicas": ((2, 1, 2), {"shard": ("b", "c"), "replicate": ("a",)}, 2),
    "replicas": ((2, 2), {"replicate": ("a", "b")}, 1),
    "the first replicas": ((1, 2, 2), {"shard": ("c",), "replicate": ("a", "b")}, 2),
    "beside others": ((2, 2, 1), {"shard": ("a", "b")}, 4),
    "after others": ((1, 2, 2), {"shard": ("b", "c")}, 4),
}
"""Shapes of meshes, several dimensions that are named together, and over how many ranks parameters are then sharded."""


@requirement(
    "RFSDP-SPMD-212",
    "Dimensions that dp_mesh_dims names together act as one, over all ranks of which parameters and gradients are "
    "sharded.",
    source=f"{SOURCE}: 'flattened into a single shard dimension'",
)
@pytest.mark.skipif(runs_with("<2.13"), reason="before 2.13, several dimensions are sharded over in turn")
@DIMS
@pytest.mark.world(4)
def test_together(world: World) -> None:
    """Shard one to seven rows, which four ranks do not divide, over dimensions at every place, in a step or two."""

    def body(rank: Rank) -> None:
        for (name, (shape, named, shards)), rows in zip(TOGETHER.items(), itertools.cycle((5, 7, 3, 1)), strict=False):
            mesh = rank.mesh(*shape, names=("a", "b", "c")[: len(shape)])
            right, dims = numbers(rows, 4), fsdp.DataParallelMeshDims(**named)  # type: ignore[arg-type]
            model = distributed(mesh, [Replicate()] * len(shape), rank.device, rows)
            fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
            x = torch.full((1, 4), 1.0 + rank.index, device=rank.device)
            given = DTensor.from_local(x, mesh, [Shard(0)] * len(shape), run_check=False)
            for step in range(2 if rows > 4 else 1):
                what = f"{name}, step {step}"
                output = model(given)
                assert torch.equal(output.to_local().cpu(), (right * (1.0 + rank.index)).sum(1)[None]), what
                output.sum().backward()
                for tensor, whole in (model.weight, right), (model.weight.grad, torch.full((rows, 4), 2.5)):
                    own = chunk(whole, shards, rank.index % shards)
                    assert torch.equal(tensor.to_local().detach().cpu(), own), what
                    assert torch.equal(tensor.full_tensor().detach().cpu(), whole), what
                    assert tensor.placements.count(Shard(0)) == (shards > 1), f"{what}: {tensor.placements}"
                torch.optim.SGD(model.parameters(), lr=2.0, foreach=False).step()
                model.zero_grad()
                right = right - 5.0

    world.run(body)


def refused(rank: Rank) -> list[tuple[Callable[[], Any], type[Exception], str]]:
    """Return calls, and the kind of error that each raises and a word in it."""
    mesh, other = rank.mesh(2, names=("a",)), rank.mesh(2, names=("y",))
    plane = rank.mesh(1, 2, names=("b", "c"))

    def shard(of: Any, placements: list[Any], on: Any = None, **named: Any) -> Callable[[], Any]:
        options = {key: named.pop(key) for key in ("reshard_after_forward",) if key in named}
        model = distributed(on or of, placements, rank.device)
        return lambda: fully_shard(model, mesh=of, dp_mesh_dims=fsdp.DataParallelMeshDims(**named), **options)

    plain = nn.Linear(2, 2, device=rank.device)
    return [
        (lambda: fsdp.DataParallelMeshDims(), ValueError, "(?i)at least one"),
        (shard(mesh, [Replicate()], shard="z"), ValueError, "z"),
        (shard(mesh, [Replicate()], shard="a", replicate="z"), ValueError, "z"),
        (shard(mesh, [Shard(0)], shard="a"), ValueError, "Replicate"),
        (shard(plane, [Shard(0), Replicate()], shard="c", replicate="b"), ValueError, "Repl"),
        (shard(mesh, [Replicate()], on=other, shard="a"), ValueError, "mesh"),
        (
            lambda: fully_shard(plain, mesh=mesh, dp_mesh_dims=fsdp.DataParallelMeshDims(shard="a")),
            ValueError,
            "DTensor",
        ),
        (
            shard(mesh, [Replicate()], shard="a", reshard_after_forward=2),
            NotImplementedError,
            "reshard_after_forward",
        ),
    ]


@requirement(
    "RFSDP-SPMD-02",
    "With dp_mesh_dims, fully_shard refuses names that the mesh lacks, and parameters that are divided over them, "
    "plain or of another mesh.",
    source=SOURCE,
)
@DIMS
@pytest.mark.world(2)
def test_refused(world: World) -> None:
    """Every rank has the error, which names the problem, and a right call still works."""

    def body(rank: Rank) -> None:
        for call, kind, word in refused(rank):
            with pytest.raises(kind, match=word):
                call()
        mesh = rank.mesh(2, names=("a",))
        model = distributed(mesh, [Replicate()], rank.device)
        fully_shard(model, mesh=mesh, dp_mesh_dims=fsdp.DataParallelMeshDims(shard="a"))
        assert model.weight.placements == (Shard(0),)

    world.run(body)
