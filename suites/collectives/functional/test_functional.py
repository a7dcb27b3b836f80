"""Functional collectives beyond the plain ones: of lists, in place, permutations, messages."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fixtures.tensors import moved
from harness import Rank, World, assert_same, requirement
from harness.oracles.collectives import Case, inputs, outputs
from harness.stacks.collectives import functional, summed_later, unwaited
from suites.collectives.cases import here

GROUPS = pytest.mark.parametrize("ranks", [(0, 1, 2), (1, 2)], ids=["world", "without-rank-0"])
OF_LISTS = {
    "all_reduce_coalesced": "all_reduce",
    "all_gather_single_coalesced": "all_gather_into_tensor",
    "all_gather_into_tensor_coalesced": "all_gather_into_tensor",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor",
}
OTHER_NAMES = {
    "all_gather_single": "all_gather_into_tensor",
    "all_gather_single_autograd": "all_gather_into_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "reduce_scatter_single_autograd": "reduce_scatter_tensor",
}
IN_PLACE = {
    "all_reduce_inplace": "all_reduce",
    "all_gather_tensor_inplace": "all_gather_into_tensor",
    "reduce_scatter_tensor_inplace": "reduce_scatter_tensor",
    "all_to_all_inplace": "all_to_all_single",
    "all_gather_inplace": "all_gather",
    "reduce_scatter_inplace": "reduce_scatter",
}


def of_list(name: str, given: list[torch.Tensor], op: str, group: Any) -> list[torch.Tensor]:
    """Call a functional collective of :data:`OF_LISTS`, which reduces with ``op`` and scatters rows, if it does."""
    arguments: list[Any] = [] if "gather" in name else [op]
    arguments += [[0] * len(given)] if "scatter" in name else []
    results: list[torch.Tensor] = getattr(functional, name)(given, *arguments, group)
    return results


def among(world: World, ranks: tuple[int, ...], body: Callable[[Any, int, int, torch.device], None]) -> None:
    """Run ``body(group, member, size, device)`` on the members of a new group."""

    def run(rank: Rank) -> None:
        group = dist.new_group(list(ranks))
        if rank.index in ranks:
            body(group, ranks.index(rank.index), len(ranks), rank.device)

    world.run(run)


@requirement(
    "COLL-FUNC-09",
    "A functional collective of a list gives for each tensor what the collective of one tensor gives.",
    source="torch.distributed._functional_collectives: all_reduce_coalesced, all_gather_single_coalesced, "
    "all_gather_into_tensor_coalesced, reduce_scatter_single_coalesced, reduce_scatter_tensor_coalesced",
)
@GROUPS
@pytest.mark.parametrize("name", here(OF_LISTS))
@pytest.mark.world(3)
def test_of_lists(world: World, name: str, ranks: tuple[int, ...]) -> None:
    """Use three sizes, SUM of float32 and MAX of int64; inputs stay unchanged."""

    def body(group: Any, member: int, size: int, device: torch.device) -> None:
        for op, dtype, call in (("SUM", torch.float32, 0), ("MAX", torch.int64, 1)):
            cases = [Case(OF_LISTS[name], op, dtype, (count,)) for count in (1, 4, 33)]
            given = moved((inputs(case, size, member, call)[0] for case in cases), device)
            before = [tensor.clone() for tensor in given]
            results = of_list(name, given, op.lower(), group)
            for case, tensor, kept, result in zip(cases, given, before, results, strict=True):
                assert_same(outputs(case, size, member, call)[0], functional.wait_tensor(result), str(case))
                assert_same(kept, tensor, "input")

    among(world, ranks, body)


@requirement(
    "COLL-FUNC-26",
    "A functional reduce-scatter of a list scatters each tensor along its own dimension, as one alone does.",
    source="torch.distributed._functional_collectives: reduce_scatter_tensor_coalesced: scatter_dim",
)
@GROUPS
@pytest.mark.world(3)
def test_dimensions_of_lists(world: World, ranks: tuple[int, ...]) -> None:
    """Every dimension can be scattered and has another size; gradients are gathered along it."""

    def body(group: Any, member: int, size: int, device: torch.device) -> None:
        wholes = [torch.arange(size**3 * 6.0).view(size, 2 * size, 3 * size) + 1000 * i for i in range(3)]
        everyone = sum(range(1, size + 1))
        for dims in ((0, 0, 0), (0, 1, 2), (2, 1, 0), (1, 0, -1)):
            given = [(whole * (member + 1)).to(device).requires_grad_() for whole in wholes]
            results = functional.reduce_scatter_tensor_coalesced(list(given), "sum", list(dims), group)
            loss: Any = sum((result * (i + 1) * 10**member).sum() for i, result in enumerate(results))
            loss.backward()
            for i, (whole, dim) in enumerate(zip(wholes, dims, strict=True)):
                right = (whole.chunk(size, dim)[member] * everyone).contiguous()
                assert_same(right, functional.wait_tensor(results[i].detach()), f"{dims}, tensor {i}")
                one = functional.reduce_scatter_tensor(given[i].detach(), "sum", dim, group)
                assert_same(right, functional.wait_tensor(one), f"{dims}, tensor {i} alone")
                parts = [torch.full_like(p, (i + 1) * 10.0**m) for m, p in enumerate(whole.chunk(size, dim))]
                gradient = given[i].grad
                assert gradient is not None
                assert_same(torch.cat(parts, dim), gradient, f"{dims}, gradient {i}")

    among(world, ranks, body)


@requirement(
    "COLL-FUNC-27",
    "A functional collective of a list leaves the list as it is, so that the same list may be given again.",
    source="torch.distributed._functional_collectives: 'The input tensors are left unmodified'",
)
@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "reduce_scatter", "reduce_scatter-along-1"])
@pytest.mark.world(2)
def test_lists_given_again(world: World, name: str) -> None:
    """Call twice with one list, whose tensors have four rows and two columns."""

    def body(rank: Rank) -> None:
        group: Any = dist.group.WORLD
        calls: dict[str, Callable[[list[torch.Tensor]], list[torch.Tensor]]] = {
            "all_reduce": lambda given: functional.all_reduce_coalesced(given, "sum", group),
            "all_gather": lambda given: functional.all_gather_into_tensor_coalesced(given, group),
            "reduce_scatter": lambda given: functional.reduce_scatter_tensor_coalesced(given, "sum", [0, 0], group),
            "reduce_scatter-along-1": lambda given: functional.reduce_scatter_tensor_coalesced(
                given, "sum", [1, 1], group
            ),
        }
        given = [torch.arange(8.0, device=rank.device).view(4, 2) + i for i in range(2)]
        kept = list(given)
        first, second = ([functional.wait_tensor(result) for result in calls[name](given)] for _ in range(2))
        assert [tensor.shape for tensor in given] == [(4, 2)] * 2
        assert all(tensor is same for tensor, same in zip(given, kept, strict=True))
        for one, other in zip(first, second, strict=True):
            assert_same(one.cpu(), other, "result of the second call")

    world.run(body)


@requirement(
    "COLL-FUNC-29",
    "The results of a functional collective of a list have the dtypes of their own tensors, or the list is refused.",
    source="torch.distributed._functional_collectives: all_reduce_coalesced, all_gather_into_tensor_coalesced, "
    "reduce_scatter_tensor_coalesced",
)
@pytest.mark.world(2)
def test_dtypes_of_lists(world: World) -> None:
    """Give pairs of dtypes in both orders, of which one can hold the other's numbers, or neither, and all at once."""
    dtypes = (torch.float32, torch.int64, torch.bfloat16, torch.uint8, torch.float64)

    def body(rank: Rank) -> list[tuple[str, str]]:
        ends = []
        for name in (name for name in OF_LISTS if hasattr(functional, name)):
            for some in (*itertools.permutations(dtypes, 2), dtypes):
                given = [torch.arange(4, device=rank.device).to(dtype) for dtype in some]
                try:
                    results = of_list(name, list(given), "sum", dist.group.WORLD)
                except (RuntimeError, ValueError, TypeError):
                    ends.append((name, "refused"))
                    continue
                ends.append((name, "done"))
                count = 8 if "gather" in name else 2 if "scatter" in name else 4
                assert [result.dtype for result in results] == list(some), name
                waited = [functional.wait_tensor(result) for result in results]
                assert [(result.dtype, result.shape) for result in waited] == [(d, (count,)) for d in some], name
                assert [tensor.dtype for tensor in given] == list(some), name
        return ends

    one, other = world.run(body)
    assert one == other


@requirement(
    "COLL-FUNC-09",
    "A functional collective of a list gives for each tensor what the collective of one tensor gives.",
    source="torch.distributed._functional_collectives: all_reduce_coalesced, all_gather_single_coalesced, "
    "all_gather_into_tensor_coalesced, reduce_scatter_single_coalesced, reduce_scatter_tensor_coalesced",
)
@pytest.mark.world(2)
def test_values_of_gathered_dtypes(world: World) -> None:
    """Gather a tensor after one of a dtype that can't hold its numbers, unless the list is refused."""
    pairs = [(torch.float32, torch.float64), (torch.int32, torch.int64), (torch.bfloat16, torch.float32)]

    def body(rank: Rank) -> list[str]:
        wrong = []
        for one, other in pairs:
            given = [torch.arange(3.0, device=rank.device).add(rank.index + 1).to(dtype) for dtype in (one, other)]
            try:
                results = of_list("all_gather_into_tensor_coalesced", given, "", dist.group.WORLD)
            except (RuntimeError, ValueError, TypeError):
                continue
            found = [functional.wait_tensor(result).tolist() for result in results]
            if found != [[1, 2, 3, 2, 3, 4]] * 2:
                wrong.append(f"{one}, {other}")
        return wrong

    assert world.run(body) == [[]] * 2


@requirement(
    "COLL-FUNC-10",
    "Functional collectives give the same results under their shorter names.",
    source="torch.distributed._functional_collectives: all_gather_single, all_gather_single_autograd, "
    "reduce_scatter_single, reduce_scatter_single_autograd",
)
@GROUPS
@pytest.mark.parametrize("name", here(OTHER_NAMES))
@pytest.mark.world(3)
def test_other_names(world: World, name: str, ranks: tuple[int, ...]) -> None:
    """Use SUM of a vector and MIN of a matrix."""

    def body(group: Any, member: int, size: int, device: torch.device) -> None:
        for call, (op, shape) in enumerate((("SUM", (7,)), ("MIN", (3, 5)))):
            case = Case(OTHER_NAMES[name], op, shape=shape)
            given = inputs(case, size, member, call)[0].to(device)
            arguments = [given, 0, group] if "gather" in name else [given, op.lower(), 0, group]
            result = functional.wait_tensor(getattr(functional, name)(*arguments))
            assert_same(outputs(case, size, member, call)[0], result, str(case))

    among(world, ranks, body)


@requirement(
    "COLL-FUNC-11",
    "The in-place forms of functional collectives write what the regular collective writes.",
    source="torch.distributed._functional_collectives: all_reduce_inplace, all_gather_tensor_inplace, "
    "reduce_scatter_tensor_inplace, all_to_all_inplace, all_gather_inplace, reduce_scatter_inplace",
)
@GROUPS
@pytest.mark.parametrize("name", here(IN_PLACE))
@pytest.mark.world(3)
def test_in_place(world: World, name: str, ranks: tuple[int, ...]) -> None:
    """Call twice with different data."""

    def body(group: Any, member: int, size: int, device: torch.device) -> None:
        for call in range(2):
            case = Case(IN_PLACE[name], shape=(3, 5))
            parts = [part.to(device) for part in inputs(case, size, member, call)]
            given = parts[0]
            expected = outputs(case, size, member, call)
            into = [torch.full_like(right, -1, device=device) for right in expected]
            if name == "all_reduce_inplace":
                into = [given]
                functional.all_reduce_inplace(given, "sum", group)
            elif name == "reduce_scatter_inplace":
                functional.reduce_scatter_inplace(into[0], parts, group=group)
            else:
                getattr(functional, name)(into if name == "all_gather_inplace" else into[0], given, group=group)
            for right, result in zip(expected, into, strict=True):
                assert_same(right, result, f"call {call}")

    among(world, ranks, body)


@requirement(
    "COLL-FUNC-17",
    "wait_tensors waits for all results of a collective, any number of times.",
    source="torch.distributed._functional_collectives: wait_tensors",
)
@pytest.mark.needs(torch=f"{functional.__name__}.wait_tensors")
@GROUPS
@pytest.mark.world(3)
def test_all_waited_for(world: World, ranks: tuple[int, ...]) -> None:
    """Sum tensors of different shapes, wait twice, and sum the results again."""

    def body(group: Any, member: int, size: int, device: torch.device) -> None:
        given = [torch.full(shape, 10.0**member, device=device) for shape in ((2,), (1, 3), ())]
        right = [torch.full(tensor.shape, sum(10.0**i for i in range(size))) for tensor in given]
        for _ in range(2):
            results = summed_later(given, group)
            assert unwaited() > 0
            for _ in range(2):
                results = functional.wait_tensors(results)
                assert unwaited() == 0
                assert len(results) == len(right)
                for expected, result in zip(right, results, strict=True):
                    assert_same(expected, result, "sum")
            given, right = results, [tensor * size for tensor in right]

    among(world, ranks, body)


@requirement(
    "COLL-FUNC-12",
    "permute_tensor gives member src_dst[m] the tensor of member m.",
    source="torch.distributed._functional_collectives: permute_tensor",
)
@GROUPS
@pytest.mark.world(3)
def test_permutation(world: World, ranks: tuple[int, ...]) -> None:
    """Send to the next member, to oneself, and in reverse order."""

    def body(group: Any, member: int, size: int, device: torch.device) -> None:
        case = Case("all_gather", shape=(7,))
        for call, order in enumerate(([*range(1, size), 0], [*range(size)], [*range(size)][::-1])):
            given = inputs(case, size, member, call)[0].to(device)
            result = functional.wait_tensor(functional.permute_tensor(given, order, group))
            assert_same(inputs(case, size, order.index(member), call)[0], result, str(order))

    among(world, ranks, body)


@requirement(
    "COLL-FUNC-13",
    "Functional send and receive operations deliver their messages, in subgroups too.",
    source="torch.distributed._functional_collectives: isend_inplace, irecv_inplace, batch_p2p_ops_inplace; "
    "pytorch/pytorch#187924",
)
@GROUPS
@pytest.mark.parametrize("name", here(["isend_inplace", "batch_p2p_ops_inplace"]))
@pytest.mark.world(3, keeps="messages that nothing waits for")
def test_messages(world: World, name: str, ranks: tuple[int, ...]) -> None:
    """Each member sends to the next by global rank; a batch sends all messages at once, by ranks in the group.

    This is done in inference mode, too.

    Dynamo passes a batch the ranks in the group, and says that this is what it expects (2.15).
    """

    def body(group: Any, member: int, size: int, device: torch.device) -> None:
        for mode in (False, True):
            with torch.inference_mode(mode):
                exchange(group, member, size, device)

    def exchange(group: Any, member: int, size: int, device: torch.device) -> None:
        case = Case("all_gather", shape=(7,))
        into = torch.full((7,), -1.0, device=device)
        after, before = (member + 1) % size, (member - 1) % size
        given, expected = moved((inputs(case, size, sender)[0] for sender in (member, before)), device)
        if name == "batch_p2p_ops_inplace":
            peers = [after, before]
            works = functional.batch_p2p_ops_inplace(["isend", "irecv"], peers, [0, 0], [given, into], group)
            for work in works:
                functional.wait_tensor(work)
            assert_same(expected, into, "received")
        elif member == 0:
            functional.wait_tensor(functional.isend_inplace(given, ranks[after], group=group))
        elif member == 1:
            functional.wait_tensor(functional.irecv_inplace(into, ranks[before], group=group))
            assert_same(expected, into, "received")

    among(world, ranks, body)


@requirement(
    "COLL-FUNC-14",
    "A functional collective accepts its group as a process group, ranks, a mesh, or a mesh with one of its "
    "dimensions.",
    source="torch.distributed._functional_collectives: all_reduce: group",
)
@pytest.mark.parametrize("given", ["ranks", "mesh", "dimension", "group"])
@pytest.mark.world(4)
def test_ways_to_name_a_group(world: World, given: str) -> None:
    """The digits of a sum show which ranks took part."""

    def body(rank: Rank) -> None:
        everyone, column = [0, 1, 2, 3], [rank.index % 2, rank.index % 2 + 2]
        group, ranks = {
            "ranks": (everyone, everyone),
            "mesh": (rank.mesh(4), everyone),
            "dimension": ((rank.mesh(2, 2), 0), column),
            "group": (dist.group.WORLD, everyone),
        }[given]
        mine = torch.tensor([10**rank.index], device=rank.device)
        total = functional.wait_tensor(functional.all_reduce(mine, "sum", group))
        assert total.item() == sum(10**i for i in ranks)

    world.run(body)


@requirement(
    "COLL-FUNC-18",
    "A functional gather or scatter counts a negative dimension from the last.",
    source="torch.distributed._functional_collectives: all_gather_tensor, reduce_scatter_tensor",
)
@pytest.mark.needs(collective="all_gather_into_tensor")
@pytest.mark.needs(collective="reduce_scatter_tensor")
@pytest.mark.parametrize("dim", [-1, -2, -3])
@pytest.mark.world(2, 3)
def test_negative_dimension(world: World, dim: int) -> None:
    """Gather blocks of three dimensions, and scatter the sum of what every rank has gathered."""

    def body(rank: Rank) -> None:
        blocks = [torch.arange(8.0, device=rank.device).view(2, 2, 2) + 10 * i for i in range(rank.size)]
        group = dist.group.WORLD
        whole = functional.wait_tensor(functional.all_gather_tensor(blocks[rank.index], dim, group))
        assert_same(torch.cat(blocks, dim=3 + dim), whole, "gathered")
        part = functional.wait_tensor(functional.reduce_scatter_tensor(whole, "sum", dim, group))
        assert_same(rank.size * blocks[rank.index], part, "scattered")

    world.run(body)


@requirement(
    "COLL-FUNC-18",
    "A functional gather or scatter counts a negative dimension from the last.",
    source="torch.distributed._functional_collectives: all_gather_tensor, reduce_scatter_tensor",
)
@pytest.mark.needs(collective="all_gather_into_tensor")
@pytest.mark.parametrize("dim", [-1, -2])
@pytest.mark.world(2)
def test_negative_dimension_of_one_row(world: World, dim: int) -> None:
    """Gather blocks whose first dimension has one element."""

    def body(rank: Rank) -> None:
        blocks = [torch.arange(6.0, device=rank.device).view(1, 2, 3) + 10 * i for i in range(rank.size)]
        whole = functional.wait_tensor(functional.all_gather_tensor(blocks[rank.index], dim, dist.group.WORLD))
        assert_same(torch.cat(blocks, dim=dim), whole, "gathered")

    world.run(body)


@requirement(
    "COLL-FUNC-19",
    "A list of ranks means the group that has exactly these ranks, whatever groups share some of them.",
    source="torch.distributed._functional_collectives: all_reduce: group; "
    "torch.distributed.distributed_c10d: _find_pg_by_ranks_and_tag",
)
@pytest.mark.needs(collective="all_reduce")
@pytest.mark.parametrize("first", [0, 1, 2])
@pytest.mark.world(3)
def test_ranks_among_overlapping_groups(world: World, first: int) -> None:
    """There are three groups of two ranks, made in each order; the digits of a sum show which ranks took part."""

    def body(rank: Rank) -> None:
        pairs = [sorted(((first + i) % 3, (first + i + 1) % 3)) for i in range(3)]
        for pair in pairs:
            dist.new_group(pair)
        for pair in pairs:
            if rank.index in pair:
                mine = torch.tensor([10**rank.index], device=rank.device)
                total = functional.wait_tensor(functional.all_reduce(mine, "sum", pair))
                assert total.item() == sum(10**i for i in pair)

    world.run(body)


@requirement(
    "COLL-FUNC-79",
    "The functional all_to_all_single takes both lists of splits or neither, and refuses what is no whole number.",
    source="torch.distributed._functional_collectives: all_to_all_single, all_to_all_single_autograd: 'must either be "
    "specified together or both set to None'",
)
@GROUPS
@pytest.mark.world(3)
def test_splits_of_one_side(world: World, ranks: tuple[int, ...]) -> None:
    """Give one list, of equal parts or others, also empty, or what is no list of sizes; then both and none."""

    def body(group: Any, member: int, size: int, device: torch.device) -> None:
        given = torch.arange(2.0 * size, device=device) + 100 * member
        equal, uneven, halves = [2] * size, [1, 3, *[2] * (size - 2)], [2.0] * size
        right = torch.cat([torch.arange(2.0) + 2 * member + 100 * sender for sender in range(size)])
        for exchange in (functional.all_to_all_single, functional.all_to_all_single_autograd):
            wrong: list[tuple[Any, Any]] = [(halves, equal), (equal, halves), (["2"] * size, equal)]
            for splits in (equal, uneven, []):
                wrong += [(splits, None), (None, splits)]
            for received, sent in wrong:
                with pytest.raises((AssertionError, ValueError, RuntimeError, TypeError)):
                    exchange(given, received, sent, group)
            with pytest.raises((AssertionError, ValueError, RuntimeError)):
                functional.wait_tensor(exchange(given[1:], None, None, group))
            for splits in (equal, None):
                assert_same(right, functional.wait_tensor(exchange(given, splits, splits, group)), str(splits))

    among(world, ranks, body)
