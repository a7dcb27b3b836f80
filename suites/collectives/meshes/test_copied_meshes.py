"""What copies of a mesh can do, and the mesh itself after it was copied, pickled or saved."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fixtures.copying import reloaded
from harness import Rank, World, requirement
from harness.stacks.collectives import concatenated, flattened, unflattened
from suites.collectives.meshes.test_meshes import check


def placed(mesh: DeviceMesh) -> Any:
    """Return a DTensor on a mesh."""
    return distribute_tensor(torch.arange(8.0), mesh, [Shard(0)] * mesh.ndim, src_data_rank=None)


WAYS: dict[str, Callable[[DeviceMesh], DeviceMesh]] = {
    "copy": copy.copy,
    "deep copy": copy.deepcopy,
    "pickle": lambda mesh: pickle.loads(pickle.dumps(mesh)),
    "save": reloaded,
    "deep copy of a DTensor": lambda mesh: copy.deepcopy(placed(mesh)).device_mesh,
    "saved state": lambda mesh: reloaded({"w": placed(mesh)})["w"].device_mesh,
}
"""Ways to make another mesh of one, alone or in what has it."""
SHAPES: dict[str, tuple[Callable[[DeviceMesh], DeviceMesh], tuple[str, ...]]] = {
    "root": (lambda mesh: mesh, ("a", "b")),
    "slice": (lambda mesh: mesh["b"], ("b",)),
    "flattened": (lambda mesh: flattened(mesh, "ab"), ("ab",)),
}
"""Meshes that are made of a square."""


@requirement(
    "COLL-MESH-9132",
    "A mesh that was copied, pickled or saved, alone or with a DTensor, can be used in every way, as its copy can.",
    source="torch.distributed.device_mesh.DeviceMesh: __getstate__, __setstate__; copy.copy, copy.deepcopy, torch.save",
)
@pytest.mark.needs(features=["functional"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.world(4)
def test_copied(world: World, way: str) -> None:
    """Slice, divide, flatten and join the mesh first, the one that it was made of, or the copy; also a slice."""

    def body(rank: Rank) -> None:
        square = torch.arange(4).view(2, 2)
        for kind, (make, names) in SHAPES.items():
            root = init_device_mesh(rank.device.type, (2, 2), mesh_dim_names=("a", "b"))
            mesh = make(root)
            table = mesh.mesh.clone()
            another = WAYS[way](mesh)
            assert (another == mesh, hash(another) == hash(mesh)) == (True, True), kind
            for what, each, ranks, own in (
                ("itself", mesh, table, names),
                ("its copy", another, table, names),
                ("its root", root, square, ("a", "b")),
            ):
                case = f"{kind}, {what}"
                check(rank, each, ranks, own, case)
                for i, name in enumerate(own):
                    assert each[name].get_group() is each.get_group(i), case
                divided = unflattened(each, 0, (len(ranks), 1), ("x", "y"))
                assert divided.mesh.tolist() == ranks.unsqueeze(1).tolist(), case
                assert [*divided.get_all_groups()[2:]] == each.get_all_groups()[1:], case
                flat = flattened(each, f"flat {what}")
                check(rank, flat, ranks.flatten(), (f"flat {what}",), f"{case}, flattened")
                if len(own) > 1:
                    assert concatenated([each[name] for name in own]) == each, case
                tensor = distribute_tensor(torch.arange(8.0, device=rank.device), each, [Shard(0)] * each.ndim)
                whole = tensor.redistribute(placements=[Replicate()] * each.ndim).to_local()
                assert whole.tolist() == list(range(8)), case
                assert WAYS[way](each) == each, case

    world.run(body)
