"""Subgroups and meshes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh

from harness import Rank, World, assert_on_ranks, assert_same, requirement, spmd
from harness.oracles.collectives import Case
from harness.stacks.collectives import assert_right, claimed, claimed_cases, flattened, functional
from suites.collectives.cases import DTYPES, OPS, dtypes_of, every_collective, groups_of


@requirement(
    "COLL-GROUP-01",
    "A collective on a subgroup involves the members of the subgroup only, with or without rank 0.",
    source="torch.distributed.new_group",
)
@pytest.mark.world(2, 3, 4, 5)
def test_every_collective_in_subgroups(world: World) -> None:
    """Groups are reversed, single, without rank 0, with gaps or overlapping; the last member is root; two calls."""
    cases = []
    for group in groups_of(world.size):
        for named in ("global", "group"):
            cases += every_collective(group=group, root=len(group) - 1, root_as=named, repeats=2)
    assert_right(world, cases)


@requirement(
    "COLL-GROUP-02",
    "Any collective can be the first one on a new group.",
    source="torch.distributed.new_group",
)
@pytest.mark.world(3)
def test_first_on_a_fresh_group(world: World) -> None:
    """Each collective gets a new group without rank 0."""
    for case in every_collective(group=(1, 2), root=1):
        assert_right(world, [case])


@requirement(
    "COLL-GROUP-282",
    "new_group gives a rank that is not in the group a handle that says so.",
    source="torch.distributed.new_group: 'if the rank is not part of ranks'",
)
@pytest.mark.parametrize("local", [False, True], ids=["by all ranks", "by its members"])
@spmd(2)
def test_handle_of_others(rank: Rank, local: bool) -> None:
    """Each rank in turn is the only member."""
    for member in range(rank.size):
        group = dist.new_group([member], use_local_synchronization=local)
        if rank.index != member:
            assert group is dist.GroupMember.NON_GROUP_MEMBER, f"it is {group}"
            assert dist.get_rank(group) == -1


@requirement(
    "COLL-GROUP-03",
    "new_group puts its ranks in ascending order, whatever the order they are given in.",
    source="torch.distributed.new_group, get_process_group_ranks, get_rank, get_world_size, get_global_rank, "
    "get_group_rank",
)
@spmd(3)
def test_order_of_ranks(rank: Rank) -> None:
    """Check global ranks, group ranks and the translation between them."""
    group = dist.new_group([2, 1])
    if rank.index == 0:
        assert group is dist.GroupMember.NON_GROUP_MEMBER
        assert dist.get_rank(group) == -1
        return
    assert dist.get_process_group_ranks(group) == [1, 2]
    assert dist.get_world_size(group) == 2
    assert dist.get_rank(group) == rank.index - 1
    assert [dist.get_global_rank(group, i) for i in range(2)] == [1, 2]
    assert [dist.get_group_rank(group, i) for i in (1, 2)] == [0, 1]


@requirement(
    "COLL-GROUP-04",
    "With use_local_synchronization=True, only the members of a group need to call new_group.",
    source="torch.distributed.new_group: use_local_synchronization",
)
@spmd(3)
def test_local_synchronization(rank: Rank) -> None:
    """Rank 0 never hears of the others' group."""
    if rank.index > 0:
        group = dist.new_group([1, 2], use_local_synchronization=True)
        tensor = torch.tensor([float(rank.index)], device=rank.device)
        dist.all_reduce(tensor, group=group)
        assert tensor.item() == 3


@requirement(
    "COLL-GROUP-05",
    "new_subgroups divides the world into groups of equal size, in rank order.",
    source="torch.distributed.new_subgroups, new_subgroups_by_enumeration",
)
@spmd(4)
def test_new_subgroups(rank: Rank) -> None:
    """Create two groups of two ranks, then groups with gaps by enumeration."""
    mine, groups = dist.new_subgroups(2)
    assert len(groups) == 2
    assert dist.get_process_group_ranks(mine) == [rank.index // 2 * 2, rank.index // 2 * 2 + 1]
    mine, groups = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    tensor = torch.tensor([float(10**rank.index)], device=rank.device)
    dist.all_reduce(tensor, group=mine)
    assert tensor.item() == (101 if rank.index % 2 == 0 else 1010)


@requirement(
    "COLL-GROUP-06",
    "A collective on a group that the caller is not a member of raises an error.",
    source="torch.distributed.new_group; pytorch/pytorch#67600",
)
@pytest.mark.parametrize("collective", ["all_reduce", "broadcast", "all_gather", "barrier"])
@pytest.mark.world(3)
def test_not_a_member(world: World, collective: str) -> None:
    """Rank 0 passes the group of the other ranks."""

    def body(rank: Rank) -> None:
        group = dist.new_group([1, 2])
        if rank.index > 0:
            return
        tensor = torch.ones(2, device=rank.device)
        arguments = {"broadcast": (tensor, 1), "all_gather": ([tensor, tensor], tensor), "barrier": ()}
        with pytest.raises((RuntimeError, ValueError)):
            getattr(dist, collective)(*arguments.get(collective, (tensor,)), group=group)

    world.run(body)


@requirement(
    "COLL-GROUP-06",
    "A collective on a group that the caller is not a member of raises an error.",
    source="torch.distributed.new_group; pytorch/pytorch#67600",
)
@pytest.mark.needs(features=["functional"])
@pytest.mark.world(3)
def test_no_member_of_a_functional(world: World) -> None:
    """Rank 0 passes the group of the other ranks to functional collectives."""

    def body(rank: Rank) -> None:
        group: Any = dist.new_group([1, 2])
        tensor = torch.ones(2, device=rank.device)
        calls: list[Callable[[], object]] = [
            lambda: functional.all_reduce(tensor, "sum", group),
            lambda: functional.all_gather_tensor(tensor, 0, group),
            lambda: functional.reduce_scatter_tensor(tensor, "sum", 0, group),
            lambda: functional.broadcast(tensor, 1, group),
        ]
        for call in calls if rank.index == 0 else ():
            with pytest.raises((RuntimeError, ValueError)):
                call()

    world.run(body)


@requirement(
    "COLL-GROUP-07",
    "The gradient of broadcast goes to the source rank, in subgroups too.",
    source="torch.distributed.nn.functional.broadcast; pytorch/pytorch#130515",
)
@pytest.mark.parametrize("ranks", [(0, 1, 2), (0, 1), (1, 2)], ids=["world", "with-rank-0", "without-rank-0"])
@pytest.mark.world(3)
def test_broadcast_gradient(world: World, ranks: tuple[int, ...]) -> None:
    """The first member is the source, and its gradient is the sum of all members' gradients."""

    def body(rank: Rank) -> None:
        group = dist.new_group(list(ranks))
        if rank.index in ranks:
            x = torch.ones(3, device=rank.device, requires_grad=True)
            (differentiable.broadcast(x, ranks[0], group=group) * (rank.index + 1)).sum().backward()
            assert x.grad is not None
            if rank.index == ranks[0]:
                assert_same(torch.full((3,), sum(i + 1.0 for i in ranks)), x.grad, "gradient of the source")

    world.run(body)


@requirement(
    "COLL-MESH-01",
    "get_group of a mesh dimension returns the group of the ranks whose coordinates differ in that dimension only.",
    source="torch.distributed.device_mesh.DeviceMesh.get_group",
)
@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 4), (1, 2, 2)], ids=str)
@pytest.mark.world(4)
def test_mesh_groups(world: World, shape: tuple[int, ...]) -> None:
    """Compare an all_reduce over each dimension with the ranks of the mesh."""

    def body(rank: Rank) -> None:
        mesh = rank.mesh(*shape)
        ranks = torch.arange(4).reshape(shape)
        for dimension in range(len(shape)):
            tensor = torch.tensor([10**rank.index], device=rank.device)
            dist.all_reduce(tensor, group=mesh.get_group(dimension))
            position = (ranks == rank.index).nonzero()[0].tolist()
            position[dimension] = slice(None)
            assert tensor.item() == sum(10**i for i in ranks[tuple(position)].reshape(-1).tolist())

    world.run(body)


@requirement(
    "COLL-MESH-02",
    "A rank's local rank in a mesh is its coordinate, whatever the order of ranks in the mesh.",
    source="torch.distributed.device_mesh.DeviceMesh.get_local_rank, get_coordinate",
)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)], ids=["ascending", "permuted"])
@pytest.mark.world(3)
def test_mesh_order(world: World, order: tuple[int, ...]) -> None:
    """Create a one-dimensional mesh of the whole world."""

    def body(rank: Rank) -> None:
        mesh = DeviceMesh(rank.device.type, list(order))
        assert list(mesh.get_coordinate() or ()) == [order.index(rank.index)]
        assert mesh.get_local_rank() == order.index(rank.index)

    world.run(body)


@requirement(
    "COLL-MESH-05",
    "With preserve_rank_order, the groups of a mesh, its slices and its flattening have their ranks in the mesh's "
    "order.",
    source="torch.distributed.device_mesh.DeviceMesh: preserve_rank_order",
)
@pytest.mark.needs(torch="torch.distributed.DeviceMesh(preserve_rank_order)")
@pytest.mark.parametrize("ranks", [[2, 0, 3, 1], [[3, 1], [0, 2]], [[0, 2], [1, 3]]], ids=["line", "square", "columns"])
@pytest.mark.world(4)
def test_preserved_order(world: World, ranks: Any) -> None:
    """Gather the ranks' numbers over each dimension, and over the flattened mesh."""

    def body(rank: Rank) -> None:
        table = torch.tensor(ranks)
        names = ("a", "b")[: table.ndim]
        options: Any = {"preserve_rank_order": True}
        mesh = DeviceMesh(rank.device.type, table, mesh_dim_names=names, **options)
        position = list(mesh.get_coordinate() or ())
        lines = [mesh[name] for name in names]
        right = [table.movedim(i, -1)[tuple(position[:i] + position[i + 1 :])].tolist() for i in range(table.ndim)]
        if table.ndim > 1:
            lines.append(flattened(mesh, "all"))
            right.append(table.flatten().tolist())
        for line, expected in zip(lines, right, strict=True):
            assert line.mesh.tolist() == expected
            assert line.get_local_rank() == expected.index(rank.index)
            assert dist.get_process_group_ranks(line.get_group()) == expected
            own = torch.tensor([float(rank.index)], device=rank.device)
            into = torch.zeros(len(expected), device=rank.device)
            dist.all_gather_into_tensor(into, own, group=line.get_group())
            assert into.tolist() == expected

    world.run(body)


@st.composite
def drawn_cases(draw: st.DrawFn, size: int) -> list[Case]:
    """Draw up to eight cases over collectives, dtypes, shapes, groups, roots, forms and repeats."""
    group = draw(st.none() | st.lists(st.integers(0, size - 1), min_size=1, max_size=size, unique=True).map(tuple))
    members = size if group is None else len(group)
    cases = []
    for base in draw(st.lists(st.sampled_from(claimed_cases(every_collective())), min_size=1, max_size=8)):
        dtypes = [dtype for dtype in DTYPES if base.collective != "gather" or not dtype.is_complex]
        dtypes = claimed(dtypes, base.collective)
        cases.append(
            Case(
                base.collective,
                dtype=draw(st.sampled_from(dtypes)),
                shape=tuple(draw(st.lists(st.integers(0, 5), min_size=1, max_size=3))),
                group=group,
                root=draw(st.integers(0, members - 1)),
                root_as=draw(st.sampled_from(["global", "group"])),
                form=draw(st.sampled_from(["sync", "async"])),
                repeats=draw(st.integers(1, 3)),
            )
        )
    return cases


@requirement(
    "COLL-MIX-01",
    "Any sequence of collectives gives correct results on any group.",
    source="torch.distributed",
)
@pytest.mark.world(2, 3, 4)
@settings(max_examples=15)
@given(data=st.data())
def test_any_sequence(world: World, data: st.DataObject) -> None:
    """Draw collectives, dtypes, shapes, groups, roots, forms and repeats."""
    assert_right(world, data.draw(drawn_cases(world.size)))


@requirement(
    "COLL-GROUP-16",
    "The list of a group's ranks is the caller's own, so that changes of it change no later list.",
    source="torch.distributed.get_process_group_ranks",
)
@spmd(2, 3)
def test_own_list_of_ranks(rank: Rank) -> None:
    """Change the lists of the default group and of a group without rank 0."""
    everyone = list(range(rank.size))
    group = dist.new_group(everyone[1:])
    for of, ranks in ((dist.group.WORLD, everyone), (group, everyone[1:])):
        if rank.index not in ranks:
            continue
        assert of is not None
        listed = dist.get_process_group_ranks(of)
        listed.reverse()
        listed.append(-1)
        assert dist.get_process_group_ranks(of) == ranks
        assert dist.get_world_size(of) == len(ranks)


@requirement(
    "COLL-GROUP-17",
    "A new_group that raises on one rank changes nothing, so that all ranks can make the next group.",
    source="torch.distributed.new_group",
)
@pytest.mark.needs(collective="all_reduce")
@pytest.mark.world(2, 3)
def test_after_a_refused_group(world: World) -> None:
    """Rank 0 asks for a group with a rank that there is not, and then every rank makes one."""

    def body(rank: Rank) -> int:
        if rank.index == 0:
            with pytest.raises((ValueError, RuntimeError)):
                dist.new_group([0, 99])
        group = dist.new_group(timeout=timedelta(seconds=10))
        total = torch.tensor([10**rank.index], device=rank.device)
        dist.all_reduce(total, group=group)
        return int(total)

    assert_on_ranks([sum(10**i for i in range(world.size))] * world.size, world.run(body))


@requirement(
    "COLL-GROUP-152",
    "A group is the same for ranks in a list, a tuple or a range, and for integer tensors, unless new_group refuses "
    "them.",
    source="torch.distributed.new_group: ranks; pytorch/pytorch#72346",
)
@pytest.mark.parametrize("ranks", ["list", "tuple", "range", "tensors", "a tensor"])
@pytest.mark.world(2)
def test_kinds_of_ranks(world: World, ranks: str) -> None:
    """Make a group of both ranks, ask for its ranks, and broadcast to it."""

    def body(rank: Rank) -> list[Any]:
        kinds: dict[str, Any] = {
            "list": [0, 1],
            "tuple": (0, 1),
            "range": range(2),
            "tensors": list(torch.arange(2)),
            "a tensor": torch.arange(2),
        }
        try:
            group = dist.new_group(kinds[ranks])
        except (TypeError, ValueError):
            return ["refused"]
        own = torch.tensor([10.0**rank.index], device=rank.device)
        calls: list[Callable[[], Any]] = [
            lambda: dist.get_rank(group),
            lambda: [dist.get_group_rank(group, i) for i in range(2)],
            lambda: dist.broadcast(own, 1, group=group),
            lambda: own.item(),
        ]
        found: list[Any] = []
        for call in calls:
            try:
                found.append(call())
            except ValueError as e:
                found.append(str(e).partition("<")[0])
        return found

    right = [[rank, [0, 1], None, 10] for rank in range(2)]
    assert_on_ranks(right, world.run(body), or_all=[["refused"]] * 2 if "tensor" in ranks else None)


@requirement(
    "COLL-GROUP-18",
    "A reduction in a subgroup is over the members of the subgroup, whatever the operation.",
    source="torch.distributed.new_group; torch.distributed.ReduceOp",
)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.world(3, 4)
@pytest.mark.each_choice
def test_operations_in_subgroups(world: World, op: str) -> None:
    """An average over two of the ranks is divided by two."""
    dtype = dtypes_of(op)[0]
    assert_right(world, [Case("all_reduce", op, dtype, group=group, repeats=2) for group in groups_of(world.size)])


@requirement(
    "COLL-GROUP-31",
    "A rank outside of a group that calls a collective of the group gets a warning or an error, and changes nothing.",
    source="torch.distributed: 'None, if not async_op or if not part of the group'; test_c10d_common.py: "
    "AbstractCommTest, test_warn_not_in_group",
)
@pytest.mark.needs(features=["messages", "objects"])
@spmd(3)
def test_outsiders(rank: Rank) -> None:
    """Rank 0 calls everything in the group of the others, which then use it."""
    group: Any = dist.new_group([1, 2])
    t = torch.ones(2, device=rank.device)
    some, objects = [torch.ones(2, device=rank.device) for _ in range(2)], ["a", "b"]
    four = torch.ones(4, device=rank.device)
    of: dict[str, Any] = {"group": group}
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(t, **of),
        "all_reduce in flight": lambda: dist.all_reduce(t, async_op=True, **of),
        "broadcast": lambda: dist.broadcast(t, 1, **of),
        "reduce": lambda: dist.reduce(t, 1, **of),
        "all_gather": lambda: dist.all_gather(some, t, **of),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(four, t, **of),
        "gather": lambda: dist.gather(t, None, 1, **of),
        "scatter": lambda: dist.scatter(t, None, 1, **of),
        "reduce_scatter": lambda: dist.reduce_scatter(t, some, **of),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(t, four, **of),
        "all_to_all": lambda: dist.all_to_all(some, [t, t], **of),
        "all_to_all_single": lambda: dist.all_to_all_single(t, t.clone(), **of),
        "all_reduce_coalesced": lambda: dist.all_reduce_coalesced(some, **of),
        "all_gather_coalesced": lambda: dist.all_gather_coalesced([[t], [t]], [t.clone()], **of),
        "barrier": lambda: dist.barrier(**of),
        "monitored_barrier": lambda: dist.monitored_barrier(**of),
        "send": lambda: dist.send(t, 1, **of),
        "isend": lambda: dist.isend(t, 1, **of),
        "recv": lambda: dist.recv(t, 1, **of),
        "irecv": lambda: dist.irecv(t, 1, **of),
        "all_gather_object": lambda: dist.all_gather_object(objects, "c", **of),
        "broadcast_object_list": lambda: dist.broadcast_object_list(objects, 1, **of),
        "gather_object": lambda: dist.gather_object("c", None, 1, **of),
        "scatter_object_list": lambda: dist.scatter_object_list(objects, None, 1, **of),
        "send_object_list": lambda: dist.send_object_list(objects, 1, **of),
        "recv_object_list": lambda: dist.recv_object_list(objects, 1, **of),
    }
    if rank.index == 0:
        for what, call in calls.items():
            name = what.split()[0]
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    result = call()
                except (RuntimeError, ValueError):
                    continue
            told = [str(each.message) for each in caught if "does not belong" in str(each.message)]
            assert len(told) == 1, what
            assert "rank 0" in told[0], what
            assert name in told[0] or "tensor" in name or name == "recv", what
            assert result in (None, -1), what
        assert all(tensor.eq(1).all() for tensor in (t, four, *some))
        assert objects == ["a", "b"]
    else:
        dist.all_reduce(t, group=group)
        assert t.tolist() == [2, 2]
    dist.all_reduce(four)
    assert four.tolist() == [3] * 4
