"""Groups, meshes and DTensors in compiled code: their properties and their operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from fixtures.tensors import numbers
from harness import Rank, World, assert_same, requirement
from harness.stacks import dynamo
from harness.stacks.collectives import flattened, functional

ROWS, COLUMNS, WHOLE = Shard(0), Shard(1), Replicate()
SOURCE = "torch/_dynamo/variables/distributed.py"


@requirement(
    "DYN-CONST-01",
    "Compiled code sees the same rank and size of the world or of a group as uncompiled code.",
    source=f"{SOURCE}: is_constant_pg_functions; torch/_dynamo/variables/torch.py",
)
@pytest.mark.parametrize("members", [None, (0, 1, 2), (1, 2), (0, 2)], ids=str)
@pytest.mark.world(3)
def test_groups(world: World, members: tuple[int, ...] | None) -> None:
    """The function closes over the group; another one has nothing to compute, and returns the size alone."""

    def body(rank: Rank) -> None:
        group = None if members is None else dist.new_group(list(members))
        if members is not None and rank.index not in members:
            return

        def about(x: torch.Tensor) -> tuple[torch.Tensor, int, int, list[int]]:
            index, size = dist.get_rank(group), dist.get_world_size(group)
            known = [0, 1, 2] if group is None else dist.get_process_group_ranks(group)
            return x * size + index, index, size, known

        def only_size() -> int:
            return dist.get_world_size(group)

        function, counter = dynamo.compiled(only_size, fullgraph=False)
        assert function() == only_size()
        assert counter.graphs == 0
        function, _ = dynamo.compiled(about)
        answers = function(torch.ones(2, device=rank.device))
        ranks = list(members or (0, 1, 2))
        index, size = ranks.index(rank.index), len(ranks)
        assert answers[1:] == (index, size, ranks)
        assert_same(torch.full((2,), float(size + index)), answers[0], "result")

    world.run(body)


@requirement(
    "DYN-CONST-02",
    "One compiled function sees the rank and size of each group that it is given.",
    source="torch.compile: guards",
)
@pytest.mark.parametrize("how", ["functions", "methods"])
@pytest.mark.world(3)
def test_other_groups(world: World, how: str) -> None:
    """Pass the world, two ranks, and one rank alone, in turn."""

    def body(rank: Rank) -> None:
        def about(x: torch.Tensor, group: Any) -> torch.Tensor:
            if how == "methods":
                return x * group.size() + group.rank()
            return x * dist.get_world_size(group) + dist.get_rank(group)

        function, _ = dynamo.compiled(about)
        everyone = [(0, 1, 2), (1, 2), (0, 2), (0,), (1,), (2,)]
        for members, group in [(members, dist.new_group(list(members))) for members in everyone]:
            if rank.index in members:
                right = torch.full((2,), 10.0 * len(members) + members.index(rank.index))
                assert_same(right, function(torch.full((2,), 10.0, device=rank.device), group), f"{members}")

    world.run(body)


@requirement(
    "DYN-MESH-01",
    "Compiled code sees the same properties of each mesh that it is given as uncompiled code.",
    source="torch/distributed/device_mesh.py: DeviceMesh in torch.compile",
)
@pytest.mark.world(4)
def test_meshes(world: World) -> None:
    """Pass meshes of different shapes, in turn and again, with an all_reduce over each dimension."""

    def body(rank: Rank) -> None:
        def about(x: torch.Tensor, mesh: Any) -> Any:
            where, sizes = mesh.get_coordinate(), tuple(mesh.size(i) for i in range(mesh.ndim))
            local = tuple(mesh.get_local_rank(i) for i in range(mesh.ndim))
            sums = [functional.all_reduce(x, "sum", (mesh, i)) + 0 for i in range(mesh.ndim)]
            if mesh.device_type == "cpu":
                sums = [s + 1 for s in sums]
            return tuple(where), sizes, local, mesh.size(), mesh.ndim, mesh.mesh_dim_names, mesh.shape, sums

        function, counter = dynamo.compiled(about)
        meshes = [rank.mesh(2, 2, names=("a", "b")), rank.mesh(4, 1, names=("a", "b")), rank.mesh(1, 4)]
        for mesh in meshes * 2:
            sizes = tuple(mesh.mesh.shape)
            where = tuple(int(i) for i in (mesh.mesh == rank.index).nonzero()[0])
            *properties, sums = function(torch.full((2,), float(rank.index), device=rank.device), mesh)
            assert properties == [where, sizes, where, 4, 2, mesh.mesh_dim_names, sizes]
            rows, columns = mesh.mesh[:, where[1]].sum(), mesh.mesh[where[0]].sum()
            shift = rank.device.type == "cpu"
            for expected, sum_ in zip((rows, columns), sums, strict=True):
                assert_same(torch.full((2,), float(expected) + shift), sum_, "sum")
        assert counter.graphs == len(meshes)

    world.run(body)


@requirement(
    "DYN-MESH-02",
    "Compiled code slices, flattens and sums over meshes of one to three dimensions as uncompiled code does.",
    source="torch/distributed/device_mesh.py: DeviceMesh.__getitem__, _flatten",
)
@pytest.mark.world(4)
def test_slices(world: World) -> None:
    """Slice each dimension, slice two of three, flatten all, and compare with uncompiled code."""

    def body(rank: Rank) -> None:
        def about(x: torch.Tensor, mesh: Any) -> Any:
            names = mesh.mesh_dim_names
            slices = [mesh[name] for name in names]
            places = [(s.size(), s.get_local_rank(), s.get_coordinate()[0]) for s in slices]
            sums = [functional.all_reduce(x, "sum", s) + 1 for s in slices]
            if mesh.ndim == 3:
                two = mesh["a", "c"]
                places.append((two.size(), two.get_local_rank("c"), two.get_coordinate()[0]))
                sums += [functional.all_reduce(x, "sum", (two, i)) + 2 for i in (0, 1)]
            if mesh.ndim > 1:
                whole = flattened(mesh, "all")
                places.append((whole.size(), whole.get_local_rank(), whole.ndim))
                sums.append(functional.all_reduce(x, "sum", whole) + 3)
            return places, sums

        function, counter = dynamo.compiled(about)
        meshes = [rank.mesh(*shape, names="abc"[: len(shape)]) for shape in ((4,), (2, 2), (2, 1, 2))]
        for mesh in meshes * 2:
            x = torch.full((2,), 10.0**rank.index, device=rank.device)
            places, sums = function(x, mesh)
            right_places, right_sums = about(x, mesh)
            assert places == right_places
            for right, result in zip(right_sums, sums, strict=True):
                assert_same(right + 0, result + 0, f"sum over {mesh}")
        assert counter.graphs == len(meshes)

    world.run(body)


@requirement(
    "DYN-DT-01",
    "DTensors that are created, redistributed or converted in compiled code have the same values and gradients as "
    "in uncompiled code.",
    source="torch.compile; torch.distributed.tensor: from_local, redistribute, to_local, full_tensor",
)
@pytest.mark.parametrize("target", [ROWS, COLUMNS, WHOLE], ids=str)
@pytest.mark.parametrize("source", [ROWS, COLUMNS, WHOLE, Partial()], ids=str)
@pytest.mark.world(2)
@pytest.mark.each_choice
def test_made_inside(world: World, source: Placement, target: Placement) -> None:
    """One graph serves two calls with different data, compared with uncompiled code."""

    def body(rank: Rank) -> None:
        mesh = rank.mesh(rank.size)

        def through(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            given = DTensor.from_local(x, mesh, [source])
            moved = given.redistribute(placements=[target])
            return moved.to_local() * 2, (moved * moved).full_tensor()

        function, counter = dynamo.compiled(through)
        for call in range(2):
            results = []
            for run in (through, function):
                x = (numbers(4, 6).to(rank.device) + 10 * rank.index + call).requires_grad_()
                local, whole = run(x)
                (local.sum() + (whole * numbers(*whole.shape).to(rank.device)).sum()).backward()
                assert x.grad is not None
                results.append((local + 0, whole + 0, x.grad + 0))
            for name, right, actual in zip(("local", "whole", "gradient"), *results, strict=True):
                assert_same(right, actual, f"{name} of call {call}")
        assert counter.graphs == 1

    world.run(body)


@requirement(
    "DYN-DT-02",
    "One compiled function accepts DTensors of any placement and mesh, with one graph for each.",
    source="torch.compile: guards of DTensor",
)
@pytest.mark.world(4)
def test_given(world: World) -> None:
    """Pass every placement on one- and two-dimensional meshes, in turn and again."""

    def body(rank: Rank) -> None:
        def about(tensor: Any) -> tuple[torch.Tensor, torch.Tensor, int]:
            sharded = sum(p.is_shard() for p in tensor.placements)
            return tensor.to_local() + sharded, (tensor * 2).full_tensor(), sharded

        function, counter = dynamo.compiled(about)
        line, square = rank.mesh(4), rank.mesh(2, 2)
        layouts: list[tuple[Any, list[Placement]]] = [
            *((line, [placement]) for placement in (ROWS, COLUMNS, WHOLE)),
            *((square, list(placements)) for placements in ((ROWS, WHOLE), (WHOLE, ROWS), (COLUMNS, ROWS))),
        ]
        for number, (mesh, placements) in enumerate(layouts * 2):
            given = distribute_tensor(numbers(4, 8).to(rank.device) + number, mesh, placements)
            local, whole, sharded = function(given)
            assert sharded == sum(p.is_shard() for p in placements)
            assert_same(given.to_local() + sharded, local + 0, f"local part as {placements}")
            assert_same(2 * (numbers(4, 8) + number), whole + 0, f"whole of {placements}")
        assert counter.graphs == len(layouts)

    world.run(body)


@requirement(
    "DYN-DT-03",
    "Parameters that are DTensors train compiled as they do uncompiled, from one graph.",
    source="torch.compile; torch.distributed.tensor: distribute_tensor",
)
@pytest.mark.parametrize("placement", [ROWS, COLUMNS, WHOLE], ids=str)
@pytest.mark.world(2)
def test_parameters(world: World, placement: Placement) -> None:
    """Train a product with a tensor-parallel weight for three steps."""

    def body(rank: Rank) -> None:
        mesh = rank.mesh(rank.size)

        def product(weight: Any, x: Any) -> torch.Tensor:
            return (x @ weight).redistribute(placements=[WHOLE]).to_local().square()

        function, counter = dynamo.compiled(product)
        alone = numbers(4, 6).requires_grad_()
        weight = distribute_tensor(numbers(4, 6).to(rank.device), mesh, [placement]).requires_grad_()
        for step in range(3):
            x = numbers(2, 4) - 4 + step
            (x @ alone).square().sum().backward()
            function(weight, distribute_tensor(x.to(rank.device), mesh, [WHOLE])).sum().backward()
            for tensor in (alone, weight):
                with torch.no_grad():
                    tensor.sub_(tensor.grad / 64)
                tensor.grad = None
            assert_same(alone, weight.full_tensor() + 0, f"step {step}")
        assert counter.graphs == 1

    world.run(body)
