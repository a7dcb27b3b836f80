"""Meshes made in every way: sliced, flattened, divided, joined, from groups; as contexts, compared and pickled."""

from __future__ import annotations

import copy
import gc
import itertools
import os
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    empty,
    full,
    ones,
    zeros,
)
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.fx.experimental.proxy_tensor import make_fx

from harness import Rank, World, assert_on_ranks, requirement, spmd
from harness.stacks.collectives import concatenated, flattened, functional, unflattened
from harness.stacks.limit import runs_with
from suites.collectives.groups.test_naming import total

NAMES = ("a", "b", "c")


def members(table: torch.Tensor, rank: int, dims: Sequence[int]) -> torch.Tensor:
    """Return the part of a table of ranks with a rank's line in these dimensions."""
    position = (table == rank).nonzero()[0].tolist()
    return table[tuple(slice(None) if i in dims else at for i, at in enumerate(position))]


def check(rank: Rank, mesh: DeviceMesh, table: torch.Tensor, names: tuple[str, ...] | None, what: str) -> None:
    """Assert everything that a mesh says of its ranks, and sum over each of its dimensions in every way."""
    position = tuple((table == rank.index).nonzero()[0].tolist())
    assert mesh.mesh.tolist() == table.tolist(), what
    assert mesh.mesh_dim_names == names, what
    assert (mesh.ndim, tuple(mesh.shape), mesh.size()) == (table.ndim, tuple(table.shape), table.numel()), what
    assert mesh.device_type == rank.device.type, what
    assert tuple(mesh.get_coordinate() or ()) == position, what
    assert mesh.get_rank() == rank.index, what
    groups = mesh.get_all_groups()
    assert len(groups) == table.ndim, what
    if table.ndim == 1:
        assert mesh.get_group() is groups[0], what
        assert mesh.get_local_rank() == position[0], what
    for dim in range(table.ndim):
        line = members(table, rank.index, [dim]).tolist()
        given: list[Any] = [dim] if names is None else [dim, names[dim]]
        assert mesh.size(dim) == len(line), what
        for by in given:
            assert mesh.get_group(by) is groups[dim], f"{what}, group of {by}"
            assert mesh.get_local_rank(by) == position[dim], f"{what}, local rank in {by}"
        assert sorted(dist.get_process_group_ranks(groups[dim])) == sorted(line), f"{what}, dimension {dim}"
        own = torch.tensor([10**rank.index], device=rank.device)
        wanted = sum(10**i for i in line)
        assert total(rank, groups[dim]) == wanted, f"{what}, dimension {dim}"
        ways: list[Any] = [(mesh, dim), groups[dim], groups[dim].group_name, *([mesh] if table.ndim == 1 else [])]
        for group in ways:
            summed = functional.wait_tensor(functional.all_reduce(own, "sum", group))
            assert summed.item() == wanted, f"{what}, functional over dimension {dim}"
            gathered = functional.wait_tensor(functional.all_gather_tensor(own, 0, group))
            assert sorted(gathered.tolist()) == sorted(10**i for i in line), f"{what}, gathered over dimension {dim}"


@requirement(
    "COLL-MESH-28",
    "Slicing a mesh while a function is traced leaves nothing of it in the graph.",
    source="torch.distributed.device_mesh.DeviceMesh; torch.fx.experimental.proxy_tensor.make_fx; "
    "torch.fx.experimental.proxy_tensor.disable_proxy_modes_tracing",
)
@pytest.mark.skipif(runs_with("<2.13"), reason="before 2.13, graphs had the operations of slicing")
@pytest.mark.parametrize("mode", ["real", "symbolic"])
@spmd(2)
def test_slices_while_traced(rank: Rank, mode: str) -> None:
    """Add the sizes of slices, and multiply by them."""
    mesh = rank.mesh(2, 1, names=("a", "b"))

    def function(x: torch.Tensor) -> torch.Tensor:
        return (x + mesh["a"].size()) * mesh["a", "b"].ndim

    graph = make_fx(function, tracing_mode=mode)(torch.ones(2, device=rank.device))
    called = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert called == [torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor]
    assert graph(torch.ones(2, device=rank.device)).tolist() == [6, 6]


@requirement(
    "COLL-MESH-29",
    "The error for a mesh or a group that can't be made is one sentence, which names what is wrong.",
    source="torch.distributed.device_mesh.init_device_mesh: mesh_dim_names; torch.distributed.new_group: ranks",
)
@pytest.mark.skipif(runs_with("<2.13"), reason="before 2.13, the first of these errors had two texts")
@spmd(2)
def test_errors_of_what_cannot_be_made(rank: Rank) -> None:
    """Repeat a name, give too few names, and list ranks that there are not."""
    kind = rank.device.type
    refused: dict[str, Callable[[], Any]] = {
        "'a', 'a'": lambda: init_device_mesh(kind, (2, 1), mesh_dim_names=("a", "a")),
        "len(mesh_dim_names): 1": lambda: init_device_mesh(kind, (2, 1), mesh_dim_names=("a",)),
        "7": lambda: dist.new_group([0, 7]),
        "-3": lambda: dist.new_group([0, -3]),
    }
    for named, make in refused.items():
        with pytest.raises((RuntimeError, ValueError)) as error:
            make()
        assert len(error.value.args) == 1, error.value.args
        assert named in str(error.value), str(error.value)


@requirement(
    "COLL-MESH-06",
    "A mesh is the current mesh within its with statement, and the one around it is again after that.",
    source="torch.distributed.device_mesh.DeviceMesh: 'can also be used as a context manager'",
)
@spmd(2)
def test_contexts(rank: Rank) -> None:
    """Enter three meshes, two of them equal, within each other in all ways, leave by errors, and ask outside of all."""
    meshes = [DeviceMesh(rank.device.type, ranks) for ranks in ([0, 1], [[0, 1]], [0, 1])]
    tensor, other = torch.ones(2, device=rank.device), DeviceMesh(rank.device.type, [1, 0])

    def check(*entered: int) -> None:
        if not entered:
            with pytest.raises(RuntimeError, match="mesh"):
                distribute_tensor(tensor, src_data_rank=None)
            return
        assert distribute_tensor(tensor, src_data_rank=None).device_mesh is meshes[entered[-1]], entered
        assert distribute_tensor(tensor, other, src_data_rank=None).device_mesh is other, entered

    def enter(*entered: int) -> None:
        check(*entered)
        if len(entered) == 4:
            raise KeyError("not about meshes")
        for number, mesh in enumerate(meshes):
            with pytest.raises(KeyError) if len(entered) == 3 else nullcontext(), mesh as given:
                assert given is mesh
                enter(*entered, number)
            check(*entered)

    enter()


CURRENT: dict[str, Callable[[torch.device], Any]] = {
    "zeros": lambda device: zeros(2),
    "ones": lambda device: ones(2),
    "empty": lambda device: empty(2),
    "full": lambda device: full((2,), 1.5),
    "from_local": lambda device: DTensor.from_local(torch.ones(2, device=device)),
    "distribute_tensor": lambda device: distribute_tensor(torch.ones(2, device=device), src_data_rank=None),
    "distribute_module": lambda device: distribute_module(torch.nn.Linear(2, 2, device=device)).weight,
    "parallelize_module": lambda device: (
        parallelize_module(
            torch.nn.Linear(2, 2, device=device), parallelize_plan=ColwiseParallel(), src_data_rank=None
        ).weight
    ),
}
"""DTensors on the current mesh, in all ways to make one without a mesh."""

TURNS = (
    ("first", "outer"),
    ("main", "inner"),
    ("second", "outer"),
    ("first", "inner"),
    ("first", "inner"),
    ("second", None),
    ("first", None),
    ("main", None),
    ("second", "inner"),
    ("main", "outer"),
    ("first", None),
    ("first", None),
    ("main", None),
    ("second", None),
)
"""Which thread enters which mesh, or leaves the one that it has entered last."""


@requirement(
    "COLL-MESH-8401",
    "A mesh is the current one of the thread that has entered it alone, whatever other threads enter or leave.",
    source="torch.distributed.device_mesh.DeviceMesh: 'can also be used as a context manager'",
)
@spmd(2)
def test_contexts_of_threads(rank: Rank) -> None:
    """Three threads enter two meshes and leave them in turn, and make DTensors after each step in every way."""
    meshes = {"outer": rank.mesh(2), "inner": DeviceMesh(rank.device.type, [1, 0])}
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:

        def within(thread: str, call: Callable[[], Any]) -> Any:
            others = {"first": first, "second": second}
            return others[thread].submit(call).result() if thread in others else call()

        entered: dict[str, list[str]] = {"main": [], "first": [], "second": []}
        for step, (thread, name) in enumerate(TURNS):
            if name is None:
                left = meshes[entered[thread].pop()]
                within(thread, lambda left=left: left.__exit__(None, None, None))
            else:
                within(thread, meshes[name].__enter__)
                entered[thread].append(name)
            for who, names in entered.items():
                for way, make in CURRENT.items():
                    what = f"step {step}, {who}, {way}"
                    if names:
                        assert within(who, lambda make=make: make(rank.device)).device_mesh is meshes[names[-1]], what
                    else:
                        with pytest.raises(RuntimeError, match="mesh"):
                            within(who, lambda make=make: make(rank.device))
        assert not any(entered.values())


@requirement(
    "COLL-MESH-07",
    "A slice of a mesh has the ranks, names, groups of its dimensions, without making a group.",
    source="torch.distributed.device_mesh.DeviceMesh: __getitem__, get_group, get_all_groups",
)
@pytest.mark.needs(features=["functional"])
@pytest.mark.parametrize("shape", [(2, 2), (2, 1, 2), (1, 2, 2), (2, 2, 1)], ids=str)
@pytest.mark.world(4)
def test_slices(world: World, shape: tuple[int, ...]) -> None:
    """Take each selection of dimensions, by name or names, of the mesh and of its slices."""

    def body(rank: Rank) -> None:
        names = NAMES[: len(shape)]
        table = torch.arange(4).view(shape)
        mesh = rank.mesh(*shape, names=names)
        groups = dict(zip(names, mesh.get_all_groups(), strict=True))
        nameless = rank.mesh(*shape)
        equal = init_device_mesh(rank.device.type, shape, mesh_dim_names=names)
        count = dist.get_pg_count()
        check(rank, mesh, table, names, "mesh")
        assert mesh[names] is mesh
        for length in range(1, len(names)):
            for some in itertools.combinations(names, length):
                dims = [names.index(name) for name in some]
                part = members(table, rank.index, dims)
                for parent in (mesh, *([mesh["b", "c"]] if len(names) == 3 and set(some) < {"b", "c"} else [])):
                    for by in (some, *(some if length == 1 else ())):
                        slice_ = parent[by]
                        check(rank, slice_, part, some, f"slice {by!r}")
                        assert [slice_.get_group(name) for name in some] == [groups[name] for name in some]
                        other = [equal.get_group(name) for name in some]  # of a mesh that is equal, and another one
                        assert [equal[by].get_group(name) for name in some] == other, f"slice {by!r} of an equal mesh"
                        assert slice_ == parent[by]
                        assert hash(slice_) == hash(parent[by])
                        assert slice_ != mesh
        for wrong in ("x", ("a", "x"), *([("a", "a")] if shape[0] > 1 else [])):
            with pytest.raises((KeyError, RuntimeError)):
                mesh[wrong]
        with pytest.raises((KeyError, RuntimeError)):
            mesh["a"]["b"]
        with pytest.raises((KeyError, RuntimeError)):
            nameless["a"]
        assert dist.get_pg_count() == count

    world.run(body)


@requirement(
    "COLL-MESH-08",
    "A flattened mesh has one dimension with all ranks of the mesh, and flattening again gives the same one.",
    source="torch.distributed.device_mesh.DeviceMesh._flatten; pytorch/pytorch#133838",
)
@pytest.mark.needs(features=["functional"])
@pytest.mark.parametrize("shape", [(2, 2), (2, 1, 2), (1, 2, 2), (2, 2, 1)], ids=str)
@pytest.mark.world(4)
def test_flattening(world: World, shape: tuple[int, ...]) -> None:
    """Flatten the mesh and each pair of dimensions, several times, with a name and without one."""

    def body(rank: Rank) -> None:
        names = NAMES[: len(shape)]
        table = torch.arange(4).view(shape)
        mesh = init_device_mesh(rank.device.type, shape, mesh_dim_names=names)
        nameless = rank.mesh(*shape)
        selections = [names, *(itertools.combinations(names, 2) if len(names) == 3 else [])]
        made: dict[str, DeviceMesh] = {}
        for turn in range(2):
            for some in selections:
                dims = [names.index(name) for name in some]
                right = members(table, rank.index, dims).flatten()
                for given, name in (("", "_".join(some)), ("flat " + "".join(some),) * 2):
                    count = dist.get_pg_count()
                    flat = flattened(mesh[some], given)
                    check(rank, flat, right, (name,), f"{some} flattened, turn {turn}")
                    if name in made:
                        assert dist.get_pg_count() == count, f"{name}: flattening again makes groups"
                        assert flat == made[name]
                        assert flat.get_group() is made[name].get_group()
                    made[name] = flat
        count = dist.get_pg_count()
        assert flattened(mesh["a"], "a").get_group() is mesh.get_group("a")
        for some, name in ((names, "a"), (("a",), "b"), (("a",), "_".join(names))):
            if mesh[some].size() == 4 and name == "_".join(names):
                continue  # it may be the same ranks
            with pytest.raises((ValueError, RuntimeError)):
                flattened(mesh[some], name)
        with pytest.raises((ValueError, RuntimeError)):
            flattened(nameless, "nameless")
        assert dist.get_pg_count() == count
        check(rank, mesh, table, names, "the mesh after it was flattened")

    world.run(body)


@requirement(
    "COLL-MESH-09",
    "A mesh from groups has each group at the dimension of its place in the list, and makes no group.",
    source="torch.distributed.device_mesh.DeviceMesh.from_group: 'the first process group will be the 0th "
    "dimension of the DeviceMesh'",
)
@pytest.mark.needs(features=["functional"])
@pytest.mark.parametrize("shape", [(2, 2), (2, 1, 2), (1, 4), (4,)], ids=str)
@pytest.mark.world(4)
def test_from_groups(world: World, shape: tuple[int, ...]) -> None:
    """Take the groups of a mesh in their order and in the reverse order, with the transposed table of ranks."""

    def body(rank: Rank) -> None:
        names = NAMES[: len(shape)]
        table = torch.arange(4).view(shape)
        source = rank.mesh(*shape, names=names)
        groups = source.get_all_groups()
        count = dist.get_pg_count()
        device = rank.device.type
        orders = [tuple(range(len(shape))), tuple(reversed(range(len(shape))))]
        for order in orders:
            ranks = table.permute(order)
            some, called = [groups[i] for i in order], tuple(names[i] for i in order)
            for given in (ranks, ranks.contiguous().to(torch.int32), ranks.tolist()):
                mesh = DeviceMesh.from_group(some, device, given, mesh_dim_names=called)
                check(rank, mesh, ranks, called, f"from groups {order}")
                assert all(found is group for found, group in zip(mesh.get_all_groups(), some, strict=True))
                for name, group in zip(called, some, strict=True):
                    assert mesh.get_group(name) is group
                    assert len(called) == 1 or mesh[name].get_group() is group
        assert DeviceMesh.from_group(groups, device, table, mesh_dim_names=names) == source
        for dim, group in enumerate(groups):
            line = members(table, rank.index, [dim])
            for options in ({}, {"mesh": line}, {"mesh": line.tolist()}, {"mesh_dim_names": ("z",)}):
                mesh = DeviceMesh.from_group(group, device, **options)  # type: ignore[arg-type]
                check(rank, mesh, line, options.get("mesh_dim_names"), f"from one group, {list(options)}")  # type: ignore[arg-type]
                assert mesh.get_group() is group
        wrong: list[Callable[[], Any]] = [
            lambda: DeviceMesh.from_group([], device, table, mesh_dim_names=names),
            lambda: DeviceMesh.from_group([*groups, groups[0]], device, table, mesh_dim_names=names),
            lambda: DeviceMesh.from_group([groups[0], groups[0]], device, mesh_dim_names=("x", "y")),
            lambda: DeviceMesh.from_group([groups[0], groups[0]], device, [[0, 1], [2, 3]]),
            lambda: DeviceMesh.from_group(groups[0], device, torch.tensor([9])),
            lambda: DeviceMesh.from_group(groups[0], device, [9, 9]),
        ]
        for call in wrong:
            with pytest.raises(ValueError):  # noqa: PT011 - the words differ
                call()
        assert dist.get_pg_count() == count

    world.run(body)


@requirement(
    "COLL-MESH-10",
    "Meshes are equal exactly if they have the same ranks, names, type of device, which makes their hashes equal.",
    source="torch.distributed.device_mesh.DeviceMesh: __eq__, __hash__",
)
@requirement(
    "COLL-MESH-11",
    "A pickled mesh that is loaded on the same rank is equal to it and has its groups.",
    source="torch.distributed.device_mesh.DeviceMesh: __getstate__, __setstate__",
)
@spmd(4)
def test_comparison(rank: Rank) -> None:
    """Make each mesh twice, and in another thread, and compare pairs; pickle it, and a slice of it, use its groups."""
    device = rank.device.type

    def meshes() -> list[DeviceMesh]:
        made = [init_device_mesh(device, shape) for shape in ((4,), (2, 2), (4, 1), (1, 4))]
        made += [init_device_mesh(device, (2, 2), mesh_dim_names=names) for names in (("a", "b"), ("b", "a"))]
        made += [DeviceMesh(device, ranks) for ranks in ([3, 2, 1, 0], [[0, 2], [1, 3]], [[1, 0], [3, 2]])]
        return [*made, made[4]["a"], made[4]["b"], flattened(made[4], "ab")]

    first, second = meshes(), meshes()
    for (i, one), (j, other) in itertools.product(enumerate(first), enumerate(second)):
        assert (one == other) == (i == j), f"{one} and {other}"
        assert (one != other) == (i != j), f"{one} and {other}"
    assert [hash(mesh) for mesh in first] == [hash(mesh) for mesh in second]
    assert len({*first, *second}) == len(first)
    assert first[0] != "mesh"
    with ThreadPoolExecutor(1) as threads:
        elsewhere = threads.submit(meshes).result()
        assert threads.submit(lambda: [mesh == other for mesh, other in zip(first, second, strict=True)]).result()
    assert [mesh == other for mesh, other in zip(first, elsewhere, strict=True)] == [True] * len(first)
    assert len({*first, *elsewhere}) == len(first)
    for mesh in first:
        loaded = pickle.loads(pickle.dumps(mesh))
        assert loaded == mesh
        assert hash(loaded) == hash(mesh)
        assert loaded.mesh.tolist() == mesh.mesh.tolist()
        groups = zip(loaded.get_all_groups(), mesh.get_all_groups(), strict=True)
        assert all(one is other for one, other in groups)


ELSEWHERE = """
import pickle, sys
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("shards",))
loaded = pickle.loads(bytes.fromhex(sys.argv[1]))
print(loaded == mesh, loaded != mesh, hash(loaded) == hash(mesh), loaded in {mesh: 1})
"""
"""What another process says of a mesh that it loads and of its own one."""


@requirement(
    "COLL-MESH-9308",
    "A pickled mesh that is loaded in another process is equal to the same mesh there, and has its hash.",
    source="torch.distributed.device_mesh.DeviceMesh: __eq__, __hash__, __getstate__, __setstate__",
)
@pytest.mark.parametrize("used", ["new", "key"])
@pytest.mark.world(1)
def test_pickled_for_another_process(world: World, used: str) -> None:
    """Pickle a mesh, as it was made or after it was a key of a dict, and load it where hashes of texts are others."""

    def body(rank: Rank) -> str:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("shards",))
        assert used == "new" or {mesh: rank.index} == {mesh: 0}
        seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
        command = [sys.executable, "-c", ELSEWHERE, pickle.dumps(mesh).hex()]
        environment = os.environ | {"PYTHONHASHSEED": seed}
        result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        assert result.returncode == 0, result.stderr
        return result.stdout.strip()

    assert_on_ranks(["True False True True"], world.run(body))


@requirement(
    "COLL-MESH-12",
    "A mesh has the ranks that it is given, in any order and as any kind of table, at its time of creation.",
    source="torch.distributed.device_mesh.DeviceMesh: mesh: 'ndarray'",
)
@requirement(
    "COLL-MESH-13",
    "On a rank outside of a mesh, the coordinate is None.",
    source="torch.distributed.device_mesh.DeviceMesh.get_coordinate: 'If this rank is not part of the mesh, "
    "return None'",
)
@spmd(4)
def test_tables(rank: Rank) -> None:
    """Give lists, arrays and tensors that are transposed, of other dtypes, or change afterwards; also of some ranks."""
    device = rank.device.type
    tables = [
        [0, 1, 2, 3],
        [2, 0, 3, 1],
        [[0, 1], [2, 3]],
        [[3, 1], [0, 2]],
        [[[0], [1]], [[2], [3]]],
        [1, 2],
        [[3], [0]],
    ]
    for ranks in tables:
        table = torch.tensor(ranks)
        backwards = table.permute(*reversed(range(table.ndim))).contiguous().permute(*reversed(range(table.ndim)))
        for given in (ranks, table, table.int(), backwards, table.numpy()):
            names = ("x", "y", "z")[: table.ndim]
            mesh = DeviceMesh(device, given, mesh_dim_names=names)
            if rank.index in table:
                # groups are in ascending order, so that the place in them is another than the coordinate
                assert mesh.mesh.tolist() == table.tolist()
                assert list(mesh.get_coordinate() or ()) == (table == rank.index).nonzero()[0].tolist()
                for dim, name in enumerate(names):
                    line = members(table, rank.index, [dim]).tolist()
                    assert total(rank, mesh.get_group(name)) == sum(10**i for i in line), f"{ranks}, {name}"
                    if len(names) > 1:
                        assert mesh[name].mesh.tolist() == line
            else:
                assert mesh.get_coordinate() is None
    changing = torch.arange(4)
    mesh = DeviceMesh(device, changing)
    changing.fill_(0)
    assert mesh.mesh.tolist() == [0, 1, 2, 3]
    assert mesh == DeviceMesh(device, [0, 1, 2, 3])


@requirement(
    "COLL-MESH-14",
    "A mesh that cannot be is refused: names twice or too few, a rank twice, too many ranks, a device with an index.",
    source="torch.distributed.device_mesh.init_device_mesh, DeviceMesh",
)
@requirement(
    "COLL-MESH-15",
    "A dimension must be named where a mesh has several, and must exist.",
    source="torch.distributed.device_mesh.DeviceMesh.get_group, get_local_rank",
)
@pytest.mark.needs(features=["functional"])
@spmd(4)
def test_refused_meshes(rank: Rank) -> None:
    """Every rank is refused, and can make a mesh and use it afterwards."""
    device = rank.device.type
    mesh = rank.mesh(2, 2, names=("a", "b"))
    wrong: dict[str, Callable[[], Any]] = {
        "names twice": lambda: init_device_mesh(device, (2, 2), mesh_dim_names=("a", "a")),
        "too few names": lambda: init_device_mesh(device, (2, 2), mesh_dim_names=("a",)),
        "too many names": lambda: init_device_mesh(device, (4,), mesh_dim_names=("a", "b")),
        "too many ranks": lambda: init_device_mesh(device, (2, 3)),
        "index": lambda: init_device_mesh(f"{device}:0", (4,)),
        "override of no dimension": lambda: init_device_mesh(
            device, (2, 2), mesh_dim_names=("a", "b"), backend_override={"c": dist.get_backend()}
        ),
        "override of no number": lambda: init_device_mesh(
            device, (2, 2), mesh_dim_names=("a", "b"), backend_override={2: dist.get_backend()}
        ),
        "override twice": lambda: init_device_mesh(
            device, (2, 2), mesh_dim_names=("a", "b"), backend_override={"a": dist.get_backend(), 0: dist.get_backend()}
        ),
        "group of which": lambda: mesh.get_group(),
        "rank in which": lambda: mesh.get_local_rank(),
        "no such name": lambda: mesh.get_group("c"),
        "no such dimension": lambda: mesh.get_group(2),
        "no such local rank": lambda: mesh.get_local_rank("c"),
    }
    for name, call in wrong.items():
        count = dist.get_pg_count()
        with pytest.raises((RuntimeError, KeyError, IndexError, ValueError, AssertionError)):
            call()
        assert dist.get_pg_count() == count, name
    check(rank, init_device_mesh(device, (2, 2)), torch.arange(4).view(2, 2), None, "afterwards")


@requirement(
    "COLL-MESH-16",
    "backend_override gives a dimension of a mesh groups of its own with that backend, by number or by name.",
    source="torch.distributed.device_mesh.init_device_mesh: backend_override",
)
@pytest.mark.needs(features=["functional"])
@spmd(4)
def test_backend_of_a_dimension(rank: Rank) -> None:
    """Override one dimension, the other, both; the argument stays as it is."""
    backend = dist.get_backend()
    table = torch.arange(4).view(2, 2)
    for override in ({"a": backend}, {1: backend}, {0: backend, "b": backend}):
        mesh = init_device_mesh(rank.device.type, (2, 2), mesh_dim_names=("a", "b"), backend_override=dict(override))
        check(rank, mesh, table, ("a", "b"), f"{override}")
        assert [dist.get_backend(group) for group in mesh.get_all_groups()] == [backend] * 2
    line = init_device_mesh(rank.device.type, (4,), backend_override={0: backend})
    check(rank, line, torch.arange(4), None, "a line")
    assert line.get_group() is not dist.group.WORLD


@requirement(
    "COLL-MESH-16",
    "backend_override gives a dimension of a mesh groups of its own with that backend, by number or by name.",
    source="torch.distributed.device_mesh.init_device_mesh: backend_override",
)
@spmd(2)
def test_override_stays(rank: Rank) -> None:
    """Name a dimension or number it; a second mesh with the same argument has groups of its own as well."""
    backend = dist.get_backend()
    for override in ({"a": backend}, {0: backend}, {0: (backend, None)}):
        given: Any = dict(override)
        for _ in range(2):
            mesh = init_device_mesh(rank.device.type, (2,), mesh_dim_names=("a",), backend_override=given)
            assert given == override, f"{given} after {override}"
            assert mesh.get_group() is not dist.group.WORLD


@requirement(
    "COLL-MESH-17",
    "A dimension of a mesh can be divided into several, whose ranks are those of the dimension in their order.",
    source="torch/distributed/device_mesh.py: _unflatten",
)
@requirement(
    "COLL-MESH-18",
    "Slices of a mesh can be joined to a mesh that has their dimensions, names and groups.",
    source="torch/distributed/device_mesh.py: _concatenate",
)
@pytest.mark.needs(features=["functional"])
@spmd(4)
def test_divided_and_joined(rank: Rank) -> None:
    """Divide a line, and both dimensions of a square, and use them; join slices in both orders."""
    line = init_device_mesh(rank.device.type, (4,), mesh_dim_names=("w",))
    for sizes in ((2, 2), (4, 1), (1, 4), (2, 1, 2)):
        divided = unflattened(line, 0, sizes, NAMES[: len(sizes)])
        check(rank, divided, torch.arange(4).view(sizes), NAMES[: len(sizes)], f"a line divided into {sizes}")
    for wrong in ((3, 1), (2, 3), (4,)):
        with pytest.raises((ValueError, RuntimeError)):
            unflattened(line, 0, wrong, ("x", "y"))
    with pytest.raises((ValueError, RuntimeError)):
        unflattened(line, 1, (2, 2), ("x", "y"))
    square = init_device_mesh(rank.device.type, (2, 2), mesh_dim_names=("a", "b"))
    for dim, sizes, names in ((1, (2, 1), ("a", "x", "y")), (0, (1, 2), ("x", "y", "b"))):
        divided = unflattened(square, dim, sizes, ("x", "y"))
        shape = (2, *sizes) if dim == 1 else (*sizes, 2)
        check(rank, divided, torch.arange(4).view(shape), names, f"{dim} divided into {sizes}")
    count = dist.get_pg_count()
    joined = concatenated([square["a"], square["b"]])
    check(rank, joined, torch.arange(4).view(2, 2), ("a", "b"), "a and b")
    assert joined == square
    other = concatenated([square["b"], square["a"]])
    check(rank, other, torch.arange(4).view(2, 2).t(), ("b", "a"), "b and a")
    assert other.get_group("a") is square.get_group("a")
    with pytest.raises((ValueError, RuntimeError)):
        concatenated([square["a"], square["a"]])
    assert dist.get_pg_count() == count


@requirement(
    "COLL-MESH-20",
    "Names of dimensions may be in a list, which gives the same mesh as a tuple, whatever happens to the list.",
    source="torch.distributed.device_mesh.DeviceMesh: mesh_dim_names: __init__ makes a tuple of them; __hash__",
)
@pytest.mark.needs(features=["functional"])
@spmd(2)
def test_lists_of_names(rank: Rank) -> None:
    """Make meshes in every way that takes names, compare, hash, slice and pickle them, and distribute on them."""
    device, table = rank.device.type, torch.arange(2).view(2, 1)
    source = init_device_mesh(device, (2, 1), mesh_dim_names=("a", "b"))
    line = init_device_mesh(device, (2,), mesh_dim_names=("a",))
    ways: dict[str, Callable[[Any], DeviceMesh]] = {
        "init_device_mesh": lambda names: init_device_mesh(device, (2, 1), mesh_dim_names=names),
        "backend_override": lambda names: init_device_mesh(
            device, (2, 1), mesh_dim_names=names, backend_override={"b": dist.get_backend()}
        ),
        "DeviceMesh": lambda names: DeviceMesh(device, [[0], [1]], mesh_dim_names=names),
        "from groups": lambda names: DeviceMesh.from_group(
            source.get_all_groups(), device, table, mesh_dim_names=names
        ),
        "from a group": lambda names: DeviceMesh.from_group(source.get_group("a"), device, mesh_dim_names=names[:1]),
        "one dimension": lambda names: init_device_mesh(device, (2,), mesh_dim_names=names[:1]),
        "divided": lambda names: unflattened(line, 0, (2, 1), names),
    }
    for what, make in ways.items():
        names = ["a", "b"]
        mesh, right = make(names), make(("a", "b"))
        names[:] = ["y", "z"]
        called = ("a", "b")[: right.ndim]
        check(rank, mesh, table if right.ndim == 2 else table.flatten(), called, what)
        assert mesh == right, what
        assert hash(mesh) == hash(right), what
        assert len({mesh, right}) == 1, what
        assert pickle.loads(pickle.dumps(mesh)) == right, what
        assert mesh[called] is mesh, what
        assert mesh["a"] == right["a"], what
        tensor = torch.arange(4.0, device=rank.device)
        whole = distribute_tensor(tensor, mesh, [Shard(0), *[Replicate()] * (right.ndim - 1)])
        assert whole.to_local().tolist() == [2.0 * rank.index, 2.0 * rank.index + 1], what
        assert (whole + whole).full_tensor().tolist() == (2 * tensor).tolist(), what


@requirement(
    "COLL-MESH-21",
    "A dimension of a mesh that has all ranks uses the default group instead of making one.",
    source="torch/distributed/device_mesh.py: DeviceMesh: 'Append the default pg to the first dim groups only if the "
    "default pg is compatible'",
)
@spmd(1, 3)
def test_dimensions_of_all_ranks(rank: Rank) -> None:
    """All ranks in order and not, in the first, the last and the middle dimension, flattened, divided, twice."""
    device, size = rank.device.type, rank.size
    accelerator, own = torch.accelerator.current_accelerator(), dist.get_default_backend_for_device(device)
    if accelerator is not None and (accelerator.type != device or own != dist.get_backend()):
        return  # then a mesh has groups of its own, as the default group may be unfit for the accelerator
    everyone = list(range(size))
    lines: dict[str, Callable[[], DeviceMesh]] = {
        "init_device_mesh": lambda: init_device_mesh(device, (size,)),
        "named": lambda: init_device_mesh(device, (size,), mesh_dim_names=("a",)),
        "DeviceMesh": lambda: DeviceMesh(device, everyone),
        "tensor": lambda: DeviceMesh(device, torch.arange(size)),
        "reversed": lambda: DeviceMesh(device, everyone[::-1]),
        "from group": lambda: DeviceMesh.from_group(_world(), device),
        "loaded": lambda: pickle.loads(pickle.dumps(init_device_mesh(device, (size,)))),
    }
    for what, make in lines.items():
        for _ in range(2):
            count = dist.get_pg_count()
            mesh = make()
            assert dist.get_pg_count() == count, f"{what}: a group is made"
            assert mesh.get_group() is mesh.get_group(0) is _world(), what
            assert mesh.get_all_groups() == [_world()], what
            assert total(rank, mesh.get_group()) == sum(10**i for i in everyone), what
    for shape in ((size, 1), (1, size), (1, size, 1)):
        names = NAMES[: len(shape)]
        mesh = init_device_mesh(device, shape, mesh_dim_names=names)
        groups = mesh.get_all_groups()
        assert [group is _world() for group in groups] == [length == size for length in shape], shape
        count = dist.get_pg_count()
        assert flattened(mesh, "flat").get_group() is _world(), shape
        assert dist.get_pg_count() == count, f"{shape}: flattening makes a group"
        divided = unflattened(init_device_mesh(device, (size,), mesh_dim_names=("w",)), 0, shape, names)
        assert [group is _world() for group in divided.get_all_groups()] == [length == size for length in shape], shape


def _world() -> Any:
    return dist.group.WORLD


@requirement(
    "COLL-MESH-27",
    "A mesh that is made without a default group makes one, of the ranks that the environment variables describe.",
    source="torch.distributed.device_mesh.init_device_mesh: 'If no process group is found, init_device_mesh will "
    "initialize distributed process group/groups'; test_device_mesh.py: test_init_process_group",
)
@pytest.mark.needs(features=["functional"])
@pytest.mark.world(2, env={"TORCHELASTIC_USE_AGENT_STORE": "True"})
def test_without_a_default_group(world: World) -> None:
    """Make a mesh when there is no group, and others in both ways afterwards, which use the group that is there."""

    def body(rank: Rank) -> None:
        device = rank.device.type
        dist.barrier()
        dist.destroy_process_group()
        assert not dist.is_initialized()
        mesh = init_device_mesh(device, (2, 1), mesh_dim_names=("a", "b"))
        assert (dist.get_rank(), dist.get_world_size()) == (rank.index, 2)
        made = dist.group.WORLD
        assert total(rank, made) == 11
        check(rank, mesh, torch.tensor([[0], [1]]), ("a", "b"), "without a group")
        check(rank, DeviceMesh(device, [[0, 1]]), torch.tensor([[0, 1]]), None, "with the group")
        check(rank, init_device_mesh(device, (2,)), torch.arange(2), None, "with the group")
        assert dist.group.WORLD is made

    world.run(body)


@contextmanager
def default_device(device: str) -> Iterator[None]:
    """Make a device the default one of this thread."""
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


SURROUNDINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "device": lambda: torch.device("meta"),
    "default device": lambda: default_device("meta"),
    "inference": torch.inference_mode,
    "no gradients": torch.no_grad,
}
"""Contexts that say where or how tensors are made."""


@requirement(
    "COLL-MESH-2400",
    "A mesh that is made while another device is the default device is as any other.",
    source="torch.distributed.device_mesh.init_device_mesh, DeviceMesh; torch.device, torch.set_default_device, "
    "torch.inference_mode",
)
@pytest.mark.needs(features=["functional"])
@spmd(2)
def test_surroundings(rank: Rank) -> None:
    """Make meshes in every way in a context, in which their ranks are known, and use them outside of it."""
    device, table = rank.device.type, torch.tensor([[0], [1]])
    for name, context in SURROUNDINGS.items():
        with context():
            mesh = init_device_mesh(device, (2, 1), mesh_dim_names=("a", "b"))
            line = {
                "slice": mesh["a"],
                "flattened": flattened(mesh, "flat"),
                "by ranks": DeviceMesh(device, [0, 1]),
                "by a tensor": DeviceMesh(device, torch.tensor([0, 1], device="cpu")),
                "from a group": DeviceMesh.from_group(mesh.get_group("a"), device),
            }
            groups = DeviceMesh.from_group(mesh.get_all_groups(), device, [[0], [1]], mesh_dim_names=("a", "b"))
            for made in line.values():
                assert (made.get_coordinate(), made.get_local_rank()) == ((rank.index,), rank.index), name
        check(rank, mesh, table, ("a", "b"), name)
        check(rank, groups, table, ("a", "b"), f"{name}, from groups")
        for way, made in line.items():
            check(rank, made, table[:, 0], made.mesh_dim_names, f"{name}, {way}")
            shards = distribute_tensor(torch.arange(2.0, device=rank.device), made, [Shard(0)])
            assert (shards.to_local().tolist(), shards.sum().full_tensor().item()) == ([rank.index], 1), (
                f"{name}, {way}"
            )


@requirement(
    "COLL-MESH-19",
    "Nothing keeps a mesh, its slices or meshes made of it alive after its last use.",
    source="torch.distributed.device_mesh.DeviceMesh: __getitem__, from_group",
)
@pytest.mark.needs(features=["functional"])
@spmd(2)
def test_meshes_are_freed(rank: Rank) -> None:
    """Slice, flatten, copy, pickle, enter and compare a mesh, use its groups, and release all."""
    device = rank.device.type

    def used() -> dict[str, Any]:
        mesh = init_device_mesh(device, (2, 1), mesh_dim_names=("a", "b"))
        parts = {
            "mesh": mesh,
            "slice": mesh["a"],
            "slice of all": mesh["a", "b"],
            "again": mesh["a"],
            "other slice": mesh["b"],
            "flattened": flattened(mesh, "flat"),
            "slice of two": mesh["a", "b"]["b"],
            "from groups": DeviceMesh.from_group(mesh.get_all_groups(), device, mesh.mesh, mesh_dim_names=("a", "b")),
            "from a group": DeviceMesh.from_group(mesh.get_group("a"), device),
            "of ranks": DeviceMesh(device, [1, 0]),
            "loaded": pickle.loads(pickle.dumps(mesh)),
            "copied": copy.deepcopy(mesh["a"]),
        }
        for name, part in parts.items():
            assert hash(part) == hash(part)
            assert part == part
            with part:
                assert total(rank, part.get_group(0)) in (11, 10**rank.index), name
                group: Any = (part, 0)
                functional.wait_tensor(functional.all_reduce(torch.ones(1, device=rank.device), "sum", group))
        return {name: weakref.ref(part) for name, part in parts.items()}

    for _ in range(2):
        references = used()
        gc.collect()
        assert [name for name, reference in references.items() if reference() is not None] == []
