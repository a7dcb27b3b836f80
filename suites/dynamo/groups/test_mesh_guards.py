"""Meshes of several origins through one compiled function, and what else is made between the calls."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from harness import Rank, World, assert_same, requirement
from harness.stacks import dynamo
from harness.stacks.collectives import flattened, functional
from harness.stacks.limit import runs_with

SOURCE = "torch/distributed/device_mesh.py: _register_distributed_opaque_types"


def by_group(x: torch.Tensor, mesh: Any) -> torch.Tensor:
    """Sum in place over the group of the mesh."""
    y = x + mesh.size()
    dist.all_reduce(y, group=mesh.get_group())
    return y * dist.get_world_size(mesh.get_group()) + dist.get_rank(mesh.get_group())


def by_name(x: torch.Tensor, mesh: Any) -> torch.Tensor:
    """Sum over the group of a dimension that is named."""
    return functional.all_reduce(x, "sum", mesh.get_group(mesh.mesh_dim_names[-1])) + mesh.get_local_rank()


def by_mesh(x: torch.Tensor, mesh: Any) -> torch.Tensor:
    """Sum over the mesh itself."""
    return functional.all_reduce(x, "sum", mesh) * 2 + mesh.get_local_rank()


def by_dimension(x: torch.Tensor, mesh: Any) -> torch.Tensor:
    """Sum over the mesh and a dimension."""
    return functional.all_reduce(x, "sum", (mesh, 0)) * 2 + functional.all_gather_tensor(x, 0, (mesh, 0)).sum()


def by_dtensor(x: torch.Tensor, mesh: Any) -> torch.Tensor:
    """Gather shards on the mesh."""
    d: Any = DTensor.from_local(x, mesh, [Shard(0)], run_check=False)
    whole: torch.Tensor = d.redistribute(placements=[Replicate()]).to_local()
    return whole * 2


USES = pytest.mark.parametrize("use", [by_group, by_name, by_mesh, by_dimension, by_dtensor], ids=lambda f: f.__name__)


def origins(rank: Rank) -> dict[str, Any]:
    """Return meshes of one dimension: all with the name ``a``, over other ranks, of other origins."""
    device, own = rank.device.type, rank.index // 2
    groups = [dist.new_group(list(members)) for members in ((0, 1), (2, 3), (0, 2), (1, 3))]
    pair, across = groups[own], groups[2 + rank.index % 2]
    square = init_device_mesh(device, (2, 2), mesh_dim_names=("b", "a"))
    lists = [[0, 1], [2, 3]]
    both = DeviceMesh.from_group([across, pair], device, mesh=torch.tensor(lists), mesh_dim_names=("c", "a"))
    return {
        "init_device_mesh": init_device_mesh(device, (4,), mesh_dim_names=("a",)),
        "from_group": DeviceMesh.from_group(pair, device, mesh_dim_names=("a",)),
        "from_group, across": DeviceMesh.from_group(across, device, mesh_dim_names=("a",)),
        "from_group, world": DeviceMesh.from_group(dist.group.WORLD, device, mesh_dim_names=("a",)),  # type: ignore[arg-type]
        "a slice": square["a"],
        "a slice of from_group": both["a"],
        "flattened": flattened(init_device_mesh(device, (2, 2), mesh_dim_names=("d", "e")), "a"),
        "DeviceMesh": DeviceMesh(device, torch.tensor([3, 1, 0, 2]), mesh_dim_names=("a",)),
    }


@requirement(
    "DYN-MESH-04",
    "Compiled code uses the group of each one-dimensional mesh that it is given, whatever made the mesh.",
    source=f"{SOURCE}; DeviceMesh.from_group, get_group",
)
@USES
@pytest.mark.world(4, timeout=60)
def test_origins(world: World, use: Callable[[torch.Tensor, Any], torch.Tensor]) -> None:
    """Pass all meshes in turn, and again, and compare with uncompiled code."""

    def body(rank: Rank) -> None:
        meshes = origins(rank)
        function, counter = dynamo.compiled(use)
        for number, (name, mesh) in enumerate([*meshes.items()] * 2):
            x = torch.full((2,), 10.0**rank.index + number, device=rank.device)
            assert_same(use(x, mesh) + 0, function(x, mesh) + 0, f"call {number}: {name}")
        assert counter.graphs <= len(meshes)

    world.run(body)


@requirement(
    "DYN-MESH-05",
    "A function that uses a mesh is not compiled again because other groups or meshes were made, used or destroyed.",
    source=f"{SOURCE}: guard_fn; torch.compile: guards",
)
@USES
@pytest.mark.world(2)
def test_unrelated(world: World, use: Callable[[torch.Tensor, Any], torch.Tensor]) -> None:
    """Between calls, make a group, a mesh, a slice and a flattened mesh, run collectives and destroy a group."""

    def body(rank: Rank) -> None:
        mesh, other = init_device_mesh(rank.device.type, (2,), mesh_dim_names=("a",)), list[Any]()

        def collective() -> None:
            dist.all_reduce(torch.ones(1, device=rank.device))

        between: list[tuple[str, Callable[[], Any]]] = [
            ("nothing", lambda: None),
            ("a new group", lambda: other.append(dist.new_group([0, 1]))),
            ("a new mesh", lambda: other.append(init_device_mesh(rank.device.type, (2, 1), mesh_dim_names=("b", "c")))),
            ("a slice of it", lambda: other.append(other[-1]["b"])),
            ("a flattened mesh", lambda: flattened(other[1], "d")),
            ("a mesh of a group", lambda: other.append(DeviceMesh.from_group(other[0], rank.device.type))),
            ("a collective", collective),
            ("a DTensor", lambda: DTensor.from_local(torch.ones(1, device=rank.device), mesh, [Shard(0)])),
            ("a group destroyed", lambda: dist.destroy_process_group(other[0])),
        ]
        function, counter = dynamo.compiled(use)
        for number, (name, happens) in enumerate(between):
            happens()
            x = torch.full((2,), 10.0**rank.index + number, device=rank.device)
            assert_same(use(x, mesh) + 0, function(x, mesh) + 0, f"after {name}")
            assert counter.graphs == 1, f"after {name}"

    world.run(body)


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deep copy": copy.deepcopy,
    "pickle": lambda mesh: pickle.loads(pickle.dumps(mesh)),
    "save": lambda mesh: torch.save({"w": DTensor.from_local(torch.ones(1), mesh, [Shard(0)])}, io.BytesIO()),
    "deep copy of a DTensor": lambda mesh: copy.deepcopy(DTensor.from_local(torch.ones(1), mesh, [Shard(0)])),
}
"""What makes a copy of a mesh, or writes it."""


@requirement(
    "DYN-MESH-9134",
    "Compiled code takes a mesh that was copied, pickled or saved as it took it before, without being compiled again.",
    source=f"{SOURCE}; torch.distributed.device_mesh.DeviceMesh: __getstate__; torch.compile: guards",
)
@pytest.mark.parametrize("first", ["compiled", "copied"])
@USES
@pytest.mark.world(2)
def test_copied(world: World, use: Callable[[torch.Tensor, Any], torch.Tensor], first: str) -> None:
    """Make each kind of copy between calls, or before the first one, of a mesh and of a slice, which has a root."""

    def body(rank: Rank) -> None:
        root = init_device_mesh(rank.device.type, (1, 2), mesh_dim_names=("b", "a"))
        for mesh in root["a"], init_device_mesh(rank.device.type, (2,), mesh_dim_names=("a",)):
            function, counter = dynamo.compiled(use)
            for number, (name, way) in enumerate([("nothing", id), *COPIES.items()][first == "copied" :]):
                way(mesh)
                x = torch.full((2,), 10.0**rank.index + number, device=rank.device)
                assert_same(use(x, mesh) + 0, function(x, mesh) + 0, f"after {name}")
                assert counter.graphs == 1, f"after {name}"
            for name, way in [*COPIES.items()][:3]:
                other = way(mesh)
                assert_same(use(x, other) + 0, function(x, other) + 0, f"on what {name} makes")

    world.run(body)


@requirement(
    "DYN-MESH-06",
    "Compiled code uses the groups of the mesh that it is given, and not those of an equal mesh that came before.",
    source=f"{SOURCE}: guard_fn",
)
@pytest.mark.parametrize("use", [by_group, by_name, by_mesh, by_dimension], ids=lambda f: f.__name__)
@pytest.mark.skipif(runs_with("<2.12"), reason="before 2.12, equal meshes share code")
@pytest.mark.world(2)
def test_equal_meshes(world: World, use: Callable[[torch.Tensor, Any], torch.Tensor]) -> None:
    """Make three equal meshes, each of a group that is destroyed before the next one is made.

    Healthy PyTorch goes on using the first group where a DTensor is redistributed, so that is not tested.
    """

    def body(rank: Rank) -> None:
        function, _ = dynamo.compiled(use)
        for number in range(3):
            group: Any = dist.new_group([0, 1])
            mesh = DeviceMesh.from_group(group, rank.device.type, mesh_dim_names=("a",))
            x = torch.full((2,), 10.0**rank.index + number, device=rank.device)
            right = use(x, mesh) + 0
            assert_same(right, function(x, mesh) + 0, f"mesh {number}")
            dist.barrier()
            dist.destroy_process_group(group)

    world.run(body)


def by_position(x: torch.Tensor, mesh: Any) -> torch.Tensor:
    """Ask for sizes and places by the number of a dimension, and of all dimensions."""
    return x + mesh.size(0) * 100 + mesh.get_local_rank(1) * 10 + mesh.get_coordinate()[0] + mesh.shape[1] + mesh.ndim


def by_keyword(x: torch.Tensor, mesh: Any) -> torch.Tensor:
    """Ask for sizes and places by keyword."""
    places = mesh.get_local_rank(mesh_dim="a") * 100 + mesh.get_local_rank(mesh_dim=1)
    return x + places * 100 + mesh.size(mesh_dim=0) * 10 + mesh.size(mesh_dim=1)


def by_names(x: torch.Tensor, mesh: Any) -> torch.Tensor:
    """Read the names of the dimensions."""
    return x + mesh.mesh_dim_names.index("a") * 10 + (mesh.mesh_dim_names == ("b", "a"))


def by_name_of_dimension(x: torch.Tensor, mesh: Any) -> torch.Tensor:
    """Ask for the place in each dimension that is named."""
    return x + mesh.get_local_rank("a") * 10 + mesh.get_local_rank("b")


def by_slice(x: torch.Tensor, mesh: Any) -> torch.Tensor:
    """Ask for the size of a slice and the place in it."""
    return x + mesh["a"].size() * 10 + mesh["b"].get_local_rank()


def by_given_dtensor(d: Any, mesh: Any) -> torch.Tensor:
    """Ask the mesh of a DTensor that is given, and not the mesh."""
    result: torch.Tensor = d.to_local() + d.device_mesh.size(0) * 10 + d.device_mesh.mesh_dim_names.index("a")
    return result


READS = (by_position, by_keyword, by_names, by_name_of_dimension, by_slice, by_given_dtensor)
KINDS: list[tuple[str, list[list[int]]]] = [
    ("ab", [[0, 1]]),
    ("ba", [[0, 1]]),
    ("ab", [[0], [1]]),
    ("ab", [[1, 0]]),
]
"""The names and the ranks of meshes of which some differ in names alone, some in shape and some in ranks."""


@requirement(
    "DYN-MESH-07",
    "Compiled code reads the names, sizes and places of the mesh that it is given, if only one of these differs.",
    source=f"{SOURCE}: guard_fn; DeviceMesh.__eq__",
)
@requirement(
    "DYN-MESH-08",
    "A function that reads a mesh, but not its groups, is compiled once for all equal meshes.",
    source=f"{SOURCE}: guard_fn; DeviceMesh.__eq__",
)
@pytest.mark.world(2)
def test_unlike_in_one_way(world: World) -> None:
    """Pass a mesh of each kind, in turn, and then another one that is equal, also as the mesh of a DTensor."""

    def body(rank: Rank) -> None:
        meshes = [
            DeviceMesh(rank.device.type, torch.tensor(ranks), mesh_dim_names=tuple(names)) for names, ranks in KINDS * 2
        ]
        assert meshes[: len(KINDS)] == meshes[len(KINDS) :]
        for read in READS:
            function, counter = dynamo.compiled(read, backend="eager")
            for number, mesh in enumerate(meshes):
                x: Any = torch.full((2,), 1000.0 * number, device=rank.device)
                if read is by_given_dtensor:
                    x = DTensor.from_local(x, mesh, [Replicate(), Replicate()], run_check=False)
                assert_same(read(x, mesh), function(x, mesh), f"{read.__name__}: call {number} with {mesh}")
                assert counter.graphs <= min(number + 1, len(KINDS)), f"{read.__name__}: call {number}"

    world.run(body)
