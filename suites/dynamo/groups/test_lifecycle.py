"""Groups that are destroyed and created again, a reset of the compiler, and objects created in compiled code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from harness import Rank, World, assert_on_ranks, assert_same, requirement
from harness.stacks import dynamo
from harness.stacks.collectives import functional
from harness.stacks.limit import runs_with


def started(rank: Rank, name: str, me: int) -> None:
    """Initialize the default group on fresh keys of the world's store."""
    dist.init_process_group(rank.backend, store=dist.PrefixStore(name, rank.store), rank=me, world_size=rank.size)


def _functions(x: torch.Tensor) -> torch.Tensor:
    return x * dist.get_world_size() + dist.get_rank()


def _world(x: torch.Tensor) -> torch.Tensor:
    return x * dist.group.WORLD.size() + dist.group.WORLD.rank()  # type: ignore[union-attr]


def _collective(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    dist.all_reduce(x)
    return x + 1


def _gathered(x: torch.Tensor) -> torch.Tensor:
    return functional.all_gather_tensor(x, 0, dist.group.WORLD) + 1


@requirement(
    "DYN-LIFE-01",
    "After the default group is destroyed and created again, compiled code uses the ranks of the new group.",
    source="torch.distributed.destroy_process_group; torch.compile: guards",
)
@pytest.mark.parametrize("function", [_functions, _world, _collective, _gathered], ids=lambda f: f.__name__.strip("_"))
@pytest.mark.world(2)
def test_made_anew(world: World, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Create it three times, with ranks in another order, and compare with uncompiled code."""

    def body(rank: Rank) -> None:
        compiled, counter = dynamo.compiled(function)
        for time, me in enumerate((rank.index, 1 - rank.index, rank.index)):
            if time:
                dist.barrier()
                dist.destroy_process_group()
                started(rank, f"again-{time}", me)
            x = torch.tensor([10.0 + me, 20.0], device=rank.device)
            assert_same(function(x) + 0, compiled(x) + 0, f"time {time}")
        assert counter.graphs > 0

    world.run(body)


@requirement(
    "DYN-LIFE-02",
    "A compiled function works with groups that are created and destroyed one after the other.",
    source="torch.distributed.new_group, destroy_process_group; torch.compile: guards",
)
@pytest.mark.world(3)
def test_groups_in_turn(world: World) -> None:
    """Create six groups of two or three ranks, one at a time."""

    def body(rank: Rank) -> None:
        def total(x: torch.Tensor, group: Any) -> torch.Tensor:
            return functional.all_reduce(x, "sum", group) * 2

        compiled, _ = dynamo.compiled(total)
        for call, members in enumerate([(0, 1), (1, 2), (0, 1, 2), (0, 2), (0, 1), (0, 1, 2)]):
            group = dist.new_group(list(members))
            if rank.index in members:
                result = compiled(torch.full((2,), 10.0**rank.index, device=rank.device), group)
                assert_same(torch.full((2,), 2.0 * sum(10.0**i for i in members)), result + 0, f"call {call}")
            dist.barrier()
            if rank.index in members:
                dist.destroy_process_group(group)

    world.run(body)


@requirement(
    "DYN-LIFE-03",
    "After torch.compiler.reset(), every rank recompiles a function once, at its next call.",
    source="torch.compiler.reset",
)
@pytest.mark.world(2)
def test_reset(world: World) -> None:
    """Reset between the second and third of five calls."""

    def body(rank: Rank) -> list[int]:
        compiled, counter = dynamo.compiled(_collective)
        counts = []
        for call in range(5):
            if call == 2:
                torch.compiler.reset()
            given = torch.tensor([10.0 + rank.index + call], device=rank.device)
            assert_same(torch.tensor([22.0 + call * 2]), compiled(given), "sum")
            counts.append(counter.graphs)
        return counts

    assert_on_ranks([[1, 1, 2, 2, 2]] * 2, world.run(body))


def _new_group(x: torch.Tensor) -> torch.Tensor:
    return x + dist.get_world_size(dist.new_group([0, 1]))


def _new_mesh(x: torch.Tensor) -> torch.Tensor:
    return x + init_device_mesh(x.device.type, (2,)).get_local_rank()


def _constructed_mesh(x: torch.Tensor) -> torch.Tensor:
    mesh = DeviceMesh(x.device.type, [1, 0])
    return x + mesh.get_local_rank()


def _named_mesh(x: torch.Tensor) -> torch.Tensor:
    mesh = DeviceMesh(device_type=x.device.type, mesh=torch.tensor([1, 0]), mesh_dim_names=("a",))
    return x + mesh.get_local_rank("a") + mesh.size() * 4 + mesh.ndim * 8


def _sharded_on_new_mesh(x: torch.Tensor) -> torch.Tensor:
    shard = DTensor.from_local(x + dist.get_rank(), DeviceMesh(x.device.type, [1, 0]), [Shard(0)])
    return shard.full_tensor() * 2


def _objects(x: torch.Tensor) -> torch.Tensor:
    objects = [dist.get_rank() + 5]
    dist.broadcast_object_list(objects, 0)
    return x + objects[0]


def _gathered_objects(x: torch.Tensor) -> torch.Tensor:
    objects: list[Any] = [None, None]
    dist.all_gather_object(objects, dist.get_rank() + 5)
    return x + objects[1]


def _barrier(x: torch.Tensor) -> torch.Tensor:
    x = x + 1
    dist.barrier()
    return x * 2


def _broadcast(x: torch.Tensor) -> torch.Tensor:
    x = x + dist.get_rank()
    dist.broadcast(x, 1)
    return x * 2


def _coalesced(x: torch.Tensor) -> torch.Tensor:
    one, other = x + dist.get_rank(), x * 3
    for result in functional.all_reduce_coalesced([one, other], "sum", dist.group.WORLD):
        x = x + result
    return x


BEFORE_2_13 = pytest.mark.skipif(runs_with("<2.13"), reason="before 2.13, compiled code can't construct a mesh")


@requirement(
    "DYN-BREAK-01",
    "Compiled code that creates groups or meshes, sends objects or waits at barriers breaks the graph and works "
    "as uncompiled code does.",
    source="torch.compile: fullgraph=False",
)
@pytest.mark.parametrize(
    "function",
    [
        *(_new_group, _new_mesh),
        *(pytest.param(f, marks=BEFORE_2_13) for f in (_constructed_mesh, _named_mesh, _sharded_on_new_mesh)),
        *(_objects, _gathered_objects, _barrier, _broadcast, _coalesced),
    ],
    ids=lambda f: f.__name__.strip("_"),
)
@pytest.mark.world(2)
def test_inside(world: World, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Compare two calls with uncompiled code."""

    def body(rank: Rank) -> None:
        compiled, _ = dynamo.compiled(function, backend="eager", fullgraph=False)
        for call in range(2):
            x = torch.tensor([10.0, 20.0], device=rank.device) + call
            assert_same(function(x.clone()) + 0, compiled(x.clone()) + 0, f"call {call}")

    world.run(body)
