"""Meshes of more ranks than there are processes: each rank in turn asks its own, in a pretended world."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from harness import Rank, World, requirement
from harness.stacks.collectives import concatenated, flattened, unflattened
from harness.stacks.limit import runs_with
from harness.stacks.pretended import FakeTensorMode, mark_of, options, pretended
from suites.collectives.meshes.test_meshes import NAMES, members

SHAPE = (2, 3, 4)
TABLE = torch.arange(math.prod(SHAPE)).view(SHAPE)
REFUSED = (KeyError, ValueError, RuntimeError)


def told(mesh: DeviceMesh, table: torch.Tensor, names: tuple[str, ...] | None, what: str) -> None:
    """Assert everything that a mesh says of its ranks to the rank that asks."""
    me = dist.get_rank()
    position = tuple((table == me).nonzero()[0].tolist())
    assert mesh.mesh.tolist() == table.tolist(), what
    assert mesh.mesh_dim_names == names, what
    assert (mesh.ndim, tuple(mesh.shape), mesh.size()) == (table.ndim, tuple(table.shape), table.numel()), what
    assert tuple(mesh.get_coordinate() or ()) == position, what
    for dim, size in enumerate(table.shape):
        line = members(table, me, [dim]).tolist()
        for by in (dim, *([] if names is None else [names[dim]])):
            assert dist.get_process_group_ranks(mesh.get_group(by)) == line, f"{what}, dimension {by}"
            assert mesh.get_local_rank(by) == position[dim], f"{what}, dimension {by}"
        assert mesh.size(dim) == size, what


def same_groups(one: list[Any], other: list[Any], what: str) -> None:
    assert len(one) == len(other), what
    assert all(a is b for a, b in zip(one, other, strict=True)), what


def some_ranks(some: range = range(0, 24, 5)) -> Iterator[int]:
    """Pretend to be some ranks, one after the other, of the world that has the ranks of :data:`TABLE`.

    By default they have each place in each dimension.
    """
    for me in some:
        with pretended(me, TABLE.numel()):
            yield me


@requirement(
    "COLL-MESH-07",
    "A slice of a mesh has the ranks, names, groups of its dimensions, without making a group.",
    source="torch.distributed.device_mesh.DeviceMesh: __getitem__, get_group, get_all_groups",
)
@requirement(
    "COLL-MESH-09",
    "A mesh from groups has each group at the dimension of its place in the list, and makes no group.",
    source="torch.distributed.device_mesh.DeviceMesh.from_group: 'the first process group will be the 0th "
    "dimension of the DeviceMesh'",
)
@requirement(
    "COLL-MESH-10",
    "Meshes are equal exactly if they have the same ranks, names, type of device, which makes their hashes equal.",
    source="torch.distributed.device_mesh.DeviceMesh: __eq__, __hash__",
)
@pytest.mark.world(1)
def test_slices_of_larger_meshes(world: World) -> None:
    """Name the dimensions in a tuple or a list, in both orders; make meshes of two of the three groups."""

    def body(rank: Rank) -> None:
        for me in some_ranks():
            mesh = init_device_mesh("cpu", SHAPE, mesh_dim_names=NAMES)
            made = DeviceMesh("cpu", TABLE, mesh_dim_names=NAMES)
            for one, other in ((mesh, made), (init_device_mesh("cpu", SHAPE), DeviceMesh("cpu", TABLE.tolist()))):
                assert one == other
                assert hash(one) == hash(other)
            told(mesh, TABLE, NAMES, "mesh")
            groups = dict(zip(NAMES, mesh.get_all_groups(), strict=True))
            count = dist.get_pg_count()
            for some in (*itertools.combinations(NAMES, 1), *itertools.combinations(NAMES, 2), NAMES):
                dims = [NAMES.index(name) for name in some]
                part = members(TABLE, me, dims)
                ways: list[Any] = [some, list(some), *(some if len(some) == 1 else [])]
                for by in ways:
                    slice_ = mesh[by]
                    told(slice_, part, some, f"slice {by!r}")
                    same_groups(slice_.get_all_groups(), [groups[name] for name in some], f"slice {by!r}")
                    assert slice_ == mesh[some], by
                    assert hash(slice_) == hash(mesh[some]), by
                given = [groups[name] for name in some]
                again = DeviceMesh.from_group(given, "cpu", part, mesh_dim_names=some)
                told(again, part, some, f"from the groups of {some}")
                same_groups(again.get_all_groups(), given, f"from the groups of {some}")
                if len(some) > 1:
                    backwards = some[::-1]
                    try:
                        slice_ = mesh[backwards]
                    except REFUSED:  # where the order of names may not be another
                        continue
                    told(slice_, part.permute(*range(part.ndim)[::-1]), backwards, f"slice {backwards!r}")
            assert dist.get_pg_count() == count
            line = init_device_mesh("cpu", (TABLE.numel(),), mesh_dim_names=("w",))
            for wrong in ("a", ("w", "a"), ""):
                with pytest.raises(REFUSED):
                    line[wrong]

    world.run(body)


@requirement(
    "COLL-MESH-07",
    "A slice of a mesh has the ranks, names, groups of its dimensions, without making a group.",
    source="torch.distributed.device_mesh.DeviceMesh: __getitem__, get_group, get_all_groups",
)
@pytest.mark.parametrize("order", ["own", "another"])
@pytest.mark.world(1)
def test_order_of_a_slice(world: World, order: str) -> None:
    """Name two dimensions and all three, as the mesh has them or not: as in mesh_3d["cp", "dp"] of the docstring."""

    def body(rank: Rank) -> None:
        for me in some_ranks():
            mesh = init_device_mesh("cpu", SHAPE, mesh_dim_names=NAMES)
            for some in (*itertools.permutations(NAMES, 2), *itertools.permutations(NAMES)):
                own = tuple(sorted(some))
                if (some == own) == (order == "own"):
                    part = members(TABLE, me, [NAMES.index(name) for name in own])
                    table = part.permute([own.index(name) for name in some])
                    told(mesh[some], table, some, f"slice {some}")
                    groups = [mesh.get_group(name) for name in some]
                    same_groups(mesh[some].get_all_groups(), groups, f"slice {some}")

    world.run(body)


@requirement(
    "COLL-MESH-22",
    "A flattened dimension can be sliced from the mesh together with others and flattened again, unless they overlap.",
    source="torch/distributed/device_mesh.py: DeviceMesh._flatten: 'one can use the existing slicing method to obtain "
    "the flattened mesh'; test_device_mesh.py: test_flatten_mesh_4d, test_reconstruct_mesh_with_flatten_dim",
)
@pytest.mark.skipif(runs_with("<2.13"), reason="before 2.13, a flattened dimension is another mesh than its slice")
@pytest.mark.world(1)
def test_flattened_among_others(world: World) -> None:
    """Flatten the first two dimensions, the last two, the first and the last, and the first with flattened ones."""

    def body(rank: Rank) -> None:
        for me in some_ranks():
            mesh = init_device_mesh("cpu", SHAPE, mesh_dim_names=NAMES)
            first = flattened(mesh["a", "b"])
            last = flattened(mesh["b", "c"], "rest")
            outer = flattened(mesh["a", "c"], "outer")
            flat = {"a_b": first, "rest": last, "outer": outer}
            for dims, (name, made) in zip(((0, 1), (1, 2), (0, 2)), flat.items(), strict=True):
                told(made, members(TABLE, me, dims).flatten(), (name,), name)
                assert mesh.get_group(name) is made.get_group(), name
                assert mesh.get_local_rank(name) == made.get_local_rank(), name
            count = dist.get_pg_count()
            tables = {("a_b", "c"): TABLE.view(6, 4), ("a", "rest"): TABLE.view(2, 12)}
            for names, table in tables.items():
                told(mesh[names], table, names, f"{names}")
                right = [flat[name].get_group() if name in flat else mesh.get_group(name) for name in names]
                same_groups(mesh[names].get_all_groups(), right, f"{names}")
            wrong = [("a", "a_b"), ("a_b", "a"), ("a_b", "b"), ("rest", "c"), ("a_b", "rest"), ("a_b", "a_b")]
            for names in wrong:
                with pytest.raises(REFUSED):
                    mesh[names]
            assert dist.get_pg_count() == count
            again = flattened(mesh["a", "rest"], "again")
            told(again, TABLE.flatten(), ("again",), "flattened again")
            assert mesh["again"] == again
            count = dist.get_pg_count()
            assert flattened(mesh["a", "rest"], "again").get_group() is again.get_group()
            assert dist.get_pg_count() == count
            other = flattened(first, "other")
            told(mesh["other"], members(TABLE, me, (0, 1)).flatten(), ("other",), "flattened under two names")
            assert mesh.get_group("other") is other.get_group()
            told(mesh, TABLE, NAMES, "the mesh afterwards")

    world.run(body)


@requirement(
    "COLL-MESH-1500",
    "A flattened mesh may have any name that is not taken, also one that is a part of another dimension's name.",
    source="torch/distributed/device_mesh.py: DeviceMesh._flatten: mesh_dim_name, 'already exists for submesh'",
)
@requirement(
    "COLL-MESH-1501",
    "Flattening under a name that a dimension or a mesh of other ranks has is refused without making a group.",
    source="torch/distributed/device_mesh.py: DeviceMesh._flatten: 'has been created before, Please specify another "
    "valid mesh_dim_name'",
)
@pytest.mark.world(1)
def test_names_of_flattened(world: World) -> None:
    """Letters and pieces of dimensions' names, several together, and other cases; then each name for other ranks."""
    dims = ("dp", "ctx", "t")
    names = ("d", "p", "c", "ct", "tx", "dpctx", "dp_t", "t_dp", "T", "dp ", "dp.ctx", "tt")

    def body(rank: Rank) -> None:
        for me in some_ranks(range(19, 20)):
            mesh = init_device_mesh("cpu", SHAPE, mesh_dim_names=dims)
            selections = [*itertools.combinations(dims, 2), dims]
            for number, name in enumerate(names):
                taken = selections[number % len(selections)]
                flat = flattened(mesh[taken], name)
                part = members(TABLE, me, [dims.index(dim) for dim in taken]).flatten()
                told(flat, part, (name,), f"{taken} flattened as {name!r}")
                count = dist.get_pg_count()
                assert flattened(mesh[taken], name).get_group() is flat.get_group(), name
                for some in selections:
                    if some != taken:
                        with pytest.raises(REFUSED):
                            flattened(mesh[some], name)
                for dim in dims:
                    with pytest.raises(REFUSED):
                        flattened(mesh[taken], dim)
                assert dist.get_pg_count() == count, name

    world.run(body)


@requirement(
    "COLL-MESH-1502",
    "A rank outside of a mesh can slice off its dimensions of one rank, and the slices have no place for that rank.",
    source="torch.distributed.device_mesh.DeviceMesh: __getitem__, get_coordinate: 'If this rank is not part of the "
    "mesh, return None'",
)
@pytest.mark.world(1)
def test_slices_outside(world: World) -> None:
    """A mesh has every other rank or the last ones; take each selection that keeps all ranks, also of its slices."""
    shape = (1, 2, 1, 6)
    names = (*NAMES, "d")
    tables = (TABLE.flatten()[::2].reshape(shape), TABLE.flatten()[12:].reshape(shape))

    def body(rank: Rank) -> None:
        for me in (1, 11):
            with pretended(me, TABLE.numel()):
                for table in tables:
                    mesh = DeviceMesh("cpu", table, mesh_dim_names=names)
                    count = dist.get_pg_count()
                    for parent in (mesh, mesh["b", "c", "d"], mesh["a", "b", "d"], mesh["b", "d"]):
                        called = parent.mesh_dim_names or ()
                        for length in range(2, len(called) + 1):
                            for some in itertools.combinations(called, length):
                                if not {"b", "d"} <= {*some}:
                                    continue
                                slice_ = parent[some]
                                sizes = tuple(shape[names.index(name)] for name in some)
                                what = f"{some} of {called}"
                                assert slice_.mesh_dim_names == some, what
                                assert (slice_.ndim, slice_.size()) == (length, 12), what
                                assert tuple(slice_.shape) == sizes, what
                                assert slice_.get_coordinate() is None, what
                        with pytest.raises(REFUSED):
                            parent["e"]
                    assert dist.get_pg_count() == count

    world.run(body)


@requirement(
    "COLL-MESH-22",
    "A flattened dimension can be sliced from the mesh together with others and flattened again, unless they overlap.",
    source="torch/distributed/device_mesh.py: DeviceMesh._flatten: 'one can use the existing slicing method to obtain "
    "the flattened mesh'; test_device_mesh.py: test_flatten_mesh_4d, test_reconstruct_mesh_with_flatten_dim",
)
@pytest.mark.skipif(runs_with("<2.13"), reason="before 2.13, a flattened dimension is another mesh than its slice")
@pytest.mark.world(1)
def test_flattened_units(world: World) -> None:
    """Some dimensions have one rank; flatten all neighbors, and take each selection of dimensions side by side."""
    names = ("a", "b", "c", "d")
    runs = [range(start, end) for start in range(4) for end in range(start + 1, 5)]
    called = {run: "".join(names[i] for i in run) for run in runs}
    selections = [
        some
        for length in range(1, 4)
        for some in itertools.combinations(runs, length)
        if all(one.stop <= other.start for one, other in itertools.pairwise(some))
    ]

    def body(rank: Rank) -> None:
        for shape in ((1, 1, 2, 3), (2, 1, 1, 3), (2, 3, 1, 1), (1, 2, 1, 3), (6, 1, 1, 1)):
            table = torch.arange(6).view(shape)
            with pretended(4, 6):
                mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
                made = {name: mesh.get_group(name) for name in names}
                for run in runs:
                    if len(run) > 1:
                        made[called[run]] = flattened(mesh[tuple(names[i] for i in run)], called[run]).get_group()
                count = dist.get_pg_count()
                for some in selections:
                    by = tuple(called[run] for run in some)
                    part = members(table, 4, [i for run in some for i in run])
                    right = part.reshape([math.prod(shape[i] for i in run) for run in some])
                    found = mesh[by]
                    told(found, right, by, f"{by} of {shape}")
                    same_groups(found.get_all_groups(), [made[name] for name in by], f"{by} of {shape}")
                assert dist.get_pg_count() == count, shape

    world.run(body)


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
@requirement(
    "COLL-MESH-23",
    "The dimensions of a mesh that are not divided keep their groups, and only the new mesh knows the new names.",
    source="torch/distributed/device_mesh.py: DeviceMesh._unflatten: 'one can only use the newly unflattened mesh to "
    "slice out the unflattened mesh dims'; test_device_mesh.py: test_unflatten_mesh_2d",
)
@pytest.mark.skipif(runs_with("<2.13"), reason="before 2.13, a mesh can be divided once only")
@pytest.mark.world(1)
def test_divided_and_joined_larger(world: World) -> None:
    """Divide the first, the middle and the last dimension, by number and by name, and a divided one; join slices."""

    def body(rank: Rank) -> None:
        for _ in some_ranks():
            mesh = init_device_mesh("cpu", (4, 6, 1), mesh_dim_names=NAMES)
            cases: list[tuple[int | str, tuple[int, ...], tuple[str, ...]]] = [
                (0, (2, 2), ("x", "y")),
                ("b", (3, 2), ("x", "y")),
                (1, (3, 1, 2), ("x", "y", "z")),
                ("c", (1, 1), ("x", "y")),
            ]
            for dim, sizes, names in cases:
                at = NAMES.index(dim) if isinstance(dim, str) else dim
                divided = unflattened(mesh, dim, sizes, names)
                shape = (*mesh.shape[:at], *sizes, *mesh.shape[at + 1 :])
                called = (*NAMES[:at], *names, *NAMES[at + 1 :])
                told(divided, TABLE.view(shape), called, f"{dim} divided into {sizes}")
                for name in NAMES[:at] + NAMES[at + 1 :]:
                    assert divided.get_group(name) is mesh.get_group(name), f"{dim} divided: {name}"
                    assert divided[name].get_group() is mesh.get_group(name), f"{dim} divided: {name}"
                for name, one in ((NAMES[at], divided), *((name, mesh) for name in names)):
                    with pytest.raises(REFUSED):
                        one[name]
            line = init_device_mesh("cpu", (24,), mesh_dim_names=("w",))
            pair = unflattened(line, 0, (2, 12), ("x", "rest"))
            three = unflattened(pair, 1, (3, 4), ("y", "z"))
            told(three, TABLE, ("x", "y", "z"), "divided twice")
            assert three.get_group("x") is pair.get_group("x")
            count = dist.get_pg_count()
            whole = init_device_mesh("cpu", SHAPE, mesh_dim_names=NAMES)
            made = dist.get_pg_count() - count
            assert concatenated([whole["a", "b"], whole["c"]]) == whole
            assert concatenated([whole["a"], whole["b", "c"]]) == whole
            assert concatenated([whole["a", "b"]]) == whole["a", "b"]
            for some in itertools.combinations(NAMES, 2):
                joined = concatenated([whole[name] for name in some])
                told(joined, whole[some].mesh, some, f"{some} joined")
                same_groups(joined.get_all_groups(), whole[some].get_all_groups(), f"{some} joined")
                assert joined == whole[some]
            assert dist.get_pg_count() == count + made

    world.run(body)


@requirement(
    "COLL-MESH-24",
    "Options in backend_override, alone or with a backend, reach the groups of their dimension and of no other.",
    source="torch.distributed.device_mesh.init_device_mesh: backend_override: 'a tuple containing the name of the "
    "backend and its options, or just one of these two components'; DeviceMesh._flatten, _unflatten",
)
@requirement(
    "COLL-MESH-25",
    "The description of a group that is made for a dimension of a mesh has the dimension's name, or else its number.",
    source="torch/distributed/device_mesh.py: 'the group description of the subgroups'; torch.distributed.new_group: "
    "group_desc",
)
@pytest.mark.world(1)
def test_options_and_descriptions(world: World) -> None:
    """Name dimensions by number and by name; give a backend, options, both, or neither to each; flatten and divide."""

    def body(rank: Rank) -> None:
        for _ in some_ranks(range(19, 20)):
            backend = dist.get_backend()
            values: dict[str, tuple[Any, int | None]] = {
                "nothing": (None, None),
                "backend": (backend, None),
                "options": (options(3), 3),
                "both": ((backend, options(4)), 4),
            }
            for number, some in enumerate(itertools.product(values.items(), repeat=3)):
                override = {
                    (NAMES[dim] if (number + dim) % 2 else dim): value
                    for dim, (_, (value, _)) in enumerate(some)
                    if value is not None
                }
                what = ", ".join(name for name, _ in some)
                mesh = init_device_mesh("cpu", SHAPE, mesh_dim_names=NAMES, backend_override=override)
                told(mesh, TABLE, NAMES, what)
                assert [mark_of(group) for group in mesh.get_all_groups()] == [mark for _, (_, mark) in some], what
            nameless = init_device_mesh("cpu", SHAPE, backend_override={1: options(3)})
            assert [mark_of(group) for group in nameless.get_all_groups()] == [None, 3, None]
            mesh = init_device_mesh("cpu", SHAPE, mesh_dim_names=NAMES)
            for found, prefix in ((mesh, NAMES), (nameless, ("0", "1", "2"))):
                for group, name in zip(found.get_all_groups(), prefix, strict=True):
                    assert group.group_desc.endswith(f"_{name}"), name
            line = init_device_mesh("cpu", (24,), mesh_dim_names=("w",))
            for name, (value, mark) in values.items():
                given = {} if value is None else {"backend_override": value}
                flat = flattened(mesh["a", "c"], f"flat {name}", **given)
                assert mark_of(flat.get_group()) == mark, f"flattened, {name}"
                assert flat.get_group().group_desc.endswith(f"_flat {name}")
                given = {} if value is None else {"backend_override": {"y": value}}
                divided = unflattened(line, 0, (4, 6), ("x", "y"), **given)
                assert [mark_of(group) for group in divided.get_all_groups()] == [None, mark], f"divided, {name}"
                assert [group.group_desc[-2:] for group in divided.get_all_groups()] == ["_x", "_y"]
            assert [mark_of(group) for group in mesh.get_all_groups()] == [None] * 3
            for wrong in ({3: backend}, {-1: backend}, {"w": backend}, {0: backend, "a": options(1)}):
                count = dist.get_pg_count()
                with pytest.raises(REFUSED):
                    init_device_mesh("cpu", SHAPE, mesh_dim_names=NAMES, backend_override=wrong)  # type: ignore[arg-type]
                assert dist.get_pg_count() == count

    world.run(body)


@requirement(
    "COLL-MESH-26",
    "Meshes work within torch.device contexts as without them, and can be sliced under FakeTensorMode.",
    source="torch/distributed/device_mesh.py: init_device_mesh: 'Always initialize the (identity) rank map on CPU'; "
    "DeviceMesh.__getitem__: 'When using FakeTensorMode to trace the model'",
)
@pytest.mark.world(1)
def test_within_contexts(world: World) -> None:
    """Make a mesh in each way within contexts of three devices; slice it and ask for groups among fake tensors."""

    def body(rank: Rank) -> None:
        for _ in some_ranks(range(13, 14)):
            mesh = init_device_mesh("cpu", SHAPE, mesh_dim_names=NAMES)
            line = init_device_mesh("cpu", (24,), mesh_dim_names=("w",))
            ways: dict[str, Callable[[], DeviceMesh]] = {
                "init_device_mesh": lambda: init_device_mesh("cpu", SHAPE, mesh_dim_names=NAMES),
                "DeviceMesh": lambda: DeviceMesh("cpu", TABLE.tolist(), mesh_dim_names=NAMES),
                "of a tensor": lambda mesh=mesh: DeviceMesh("cpu", mesh.mesh, mesh_dim_names=NAMES),
                "divided": lambda line=line: unflattened(line, 0, SHAPE, NAMES),
                "from groups": lambda mesh=mesh: DeviceMesh.from_group(
                    mesh.get_all_groups(), "cpu", TABLE.tolist(), mesh_dim_names=NAMES
                ),
                "joined": lambda mesh=mesh: concatenated([mesh["a"], mesh["b", "c"]]),
            }
            for device in ("cpu", "meta", rank.device.type):
                with torch.device(device):
                    for what, make in ways.items():
                        told(make(), TABLE, NAMES, f"{what} within {device}")
                        told(make()["b", "c"], members(TABLE, dist.get_rank(), (1, 2)), NAMES[1:], f"{what}, sliced")
                    flat = flattened(mesh["a", "b"], f"flat {device}")
                    told(flat, members(TABLE, dist.get_rank(), (0, 1)).flatten(), (f"flat {device}",), "flattened")
                    one = DeviceMesh.from_group(mesh.get_group("b"), "cpu", mesh_dim_names=("b",))
                    told(one, members(TABLE, dist.get_rank(), (1,)), ("b",), "from a group")
            right = [
                (name, mesh[name].get_group(), mesh.get_local_rank(name), mesh[name].get_coordinate()) for name in NAMES
            ]
            with FakeTensorMode():
                found = [
                    (name, mesh[name].get_group(), mesh.get_local_rank(name), mesh[name].get_coordinate())
                    for name in NAMES
                ]
                pair = mesh["a", "c"]
                assert pair == mesh["a", "c"]
                same_groups(pair.get_all_groups(), [mesh.get_group("a"), mesh.get_group("c")], "among fake tensors")
                assert (tuple(pair.shape), pair.ndim, pair.size()) == ((2, 4), 2, 8)
            for one, other in zip(right, found, strict=True):
                assert one[1] is other[1], one[0]
                assert (one[0], *one[2:]) == (other[0], *other[2:])
            told(pair, members(TABLE, dist.get_rank(), (0, 2)), ("a", "c"), "sliced among fake tensors")

    world.run(body)
