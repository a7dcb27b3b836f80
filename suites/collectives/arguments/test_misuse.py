"""Misuse of a collective raises a Python error on the rank that misuses it, and kills no peer."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from harness import Rank, World, requirement, spmd
from harness.oracles.collectives import COMPLEX, Case
from harness.stacks.collectives import assert_right, refusals
from suites.collectives.cases import DTYPES, OPS, OPTIONAL, dtypes_of, every_collective

SHORT = timedelta(seconds=1)
MESSAGES = pytest.mark.needs(features=["messages"])
COALESCING = pytest.mark.needs(features=["coalescing"])
IN_PARTS = ("scatter", "all_to_all")


@requirement(
    "COLL-REFUSE-01",
    "A dtype or reduction that a backend does not support raises an error on every rank.",
    source="torch.distributed: Backends",
)
@requirement(
    "COLL-REFUSE-02",
    "The group stays usable after an unsupported collective has raised an error.",
    source="torch.distributed: Backends",
)
@pytest.mark.world(2, 3)
def test_refusals_are_clean(world: World) -> None:
    """Rare dtypes and reductions without a meaning are correct or raise, alike on all ranks."""
    cases = [case for case in _rare() if case.collective not in IN_PARTS]
    for op in OPS:
        known = dtypes_of(op)
        others = [dtype for dtype in DTYPES if dtype not in known and not (dtype in COMPLEX and op in ("MIN", "MAX"))]
        cases += [Case("all_reduce", op, dtype) for dtype in others if _has_a_model(op, dtype)]
    _assert_clean(world, cases)


@requirement(
    "COLL-REFUSE-01",
    "A dtype or reduction that a backend does not support raises an error on every rank.",
    source="torch.distributed: Backends",
)
@requirement(
    "COLL-REFUSE-02",
    "The group stays usable after an unsupported collective has raised an error.",
    source="torch.distributed: Backends",
)
@pytest.mark.world(2, 3)
def test_refusals_of_parts(world: World) -> None:
    """Rare dtypes are correct or raise in collectives that a backend may issue as a message for each tensor."""
    _assert_clean(world, [case for case in _rare() if case.collective in IN_PARTS])


@requirement(
    "COLL-REFUSE-01",
    "A dtype or reduction that a backend does not support raises an error on every rank.",
    source="torch.distributed: Backends",
)
@requirement(
    "COLL-REFUSE-02",
    "The group stays usable after an unsupported collective has raised an error.",
    source="torch.distributed: Backends",
)
@pytest.mark.parametrize(
    "of", [dtype for dtype in DTYPES if dtype != torch.bool], ids=lambda dtype: str(dtype).removeprefix("torch.")
)
@pytest.mark.world(2, 3)
def test_refusals_of_premultiplied_sums(world: World, of: torch.dtype) -> None:
    """PREMUL_SUM is correct or raises, alike on all ranks, whatever the dtype."""
    _assert_clean(world, [Case(name, "PREMUL_SUM", of) for name in ("all_reduce", "reduce_scatter_tensor")])


def _rare() -> list[Case]:
    return [case for dtype in OPTIONAL for case in every_collective(dtype=dtype)]


def _assert_clean(world: World, cases: list[Case]) -> None:
    for case, *ends in zip(cases, *world.run(refusals, cases), strict=True):
        kinds = {kind for kind, _ in ends}
        assert kinds in ({"right"}, {"refused"}), f"{case}: {ends}"
    assert_right(world, every_collective())


def _has_a_model(op: str, dtype: torch.dtype) -> bool:
    if dtype == torch.bool:
        return op != "AVG"
    return not (dtype.is_floating_point or dtype.is_complex) or op not in ("BAND", "BOR", "BXOR")


@requirement(
    "COLL-MISUSE-01",
    "A collective called with invalid arguments raises an error before it sends anything.",
    source="torch.distributed.distributed_c10d",
)
@spmd(2)
def test_wrong_arguments(rank: Rank) -> None:
    """Pass no tensor, a list for a tensor, a missing list, a root out of range; then a valid collective."""
    tensor, two = torch.ones(2, device=rank.device), [torch.ones(2, device=rank.device) for _ in range(2)]
    wrong = [
        lambda: dist.all_reduce(None),
        lambda: dist.all_reduce(two),
        lambda: dist.broadcast(tensor, src=2),
        lambda: dist.reduce(tensor, dst=-1),
        lambda: dist.all_gather(tensor, tensor),
        lambda: dist.scatter(tensor, None, src=rank.index),
        lambda: dist.gather(tensor, None, dst=rank.index),
        lambda: dist.all_gather([tensor, tensor.int()], tensor),
    ]
    for misuse in wrong:
        with pytest.raises((TypeError, ValueError, RuntimeError)):
            misuse()
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2, 2]


@requirement(
    "COLL-MISUSE-06",
    "A list of tensors must have exactly one for each rank of the group.",
    source="torch.distributed: all_gather: tensor_list, gather: gather_list, scatter: scatter_list, reduce_scatter: "
    "input_list, all_to_all: output_tensor_list, input_tensor_list",
)
@pytest.mark.parametrize("ranks", [(0, 1, 2), (1, 2)], ids=["world", "without-rank-0"])
@pytest.mark.parametrize(
    "name", ["all_gather", "reduce_scatter", "all_to_all-received", "all_to_all-sent", "gather", "scatter"]
)
@pytest.mark.world(3)
def test_lengths_of_lists(world: World, name: str, ranks: tuple[int, ...]) -> None:
    """Give no tensor, one too few, one too many, twice as many; synchronously and not; then the right number."""

    def body(rank: Rank) -> None:
        group: Any = dist.new_group(list(ranks)) if len(ranks) < rank.size else None
        if rank.index not in ranks:
            return
        size = len(ranks)

        def some(count: int) -> list[torch.Tensor]:
            return [torch.full((2,), 5.0, device=rank.device) for _ in range(count)]

        one, right = some(1)[0], some(size)
        calls: dict[str, Callable[[list[torch.Tensor], dict[str, Any]], Any]] = {
            "all_gather": lambda tensors, options: dist.all_gather(tensors, one, **options),
            "reduce_scatter": lambda tensors, options: dist.reduce_scatter(one, tensors, **options),
            "all_to_all-received": lambda tensors, options: dist.all_to_all(tensors, right, **options),
            "all_to_all-sent": lambda tensors, options: dist.all_to_all(right, tensors, **options),
            "gather": lambda tensors, options: dist.gather(one, tensors, rank.index, **options),
            "scatter": lambda tensors, options: dist.scatter(one, tensors, rank.index, **options),
        }
        for count in (0, size - 1, size + 1, 2 * size):
            for asynchronous in (False, True):
                given = some(count)
                with pytest.raises((TypeError, ValueError, RuntimeError)):
                    calls[name](given, {"group": group, "async_op": asynchronous})
                assert [t.tolist() for t in (*given, one, *right)] == [[5, 5]] * (count + 1 + size), count
        gathered = some(size)
        dist.all_gather(gathered, torch.full((2,), float(rank.index), device=rank.device), group)
        assert [t.tolist() for t in gathered] == [[i, i] for i in ranks]

    world.run(body)


@requirement(
    "COLL-MISUSE-03",
    "all_to_all_single without split sizes raises an error if the world size does not divide dimension 0.",
    source="torch.distributed.all_to_all_single: 'dim 0 of output and input tensor must divide equally'",
)
@spmd(2)
def test_indivisible_exchange(rank: Rank) -> None:
    """Exchange three rows between two ranks."""
    with pytest.raises((ValueError, RuntimeError)):
        dist.all_to_all_single(torch.ones(3, device=rank.device), torch.ones(3, device=rank.device))


@requirement(
    "COLL-MISUSE-02",
    "Tensors of a different size or dtype on each rank raise an error instead of giving a wrong result on every rank.",
    source="torch.distributed: all ranks must pass tensors of the same size and dtype; NVIDIA/nccl#1394",
)
@pytest.mark.parametrize(
    "what",
    [
        "all_reduce-dtype",
        "all_reduce-size",
        "broadcast-size",
        pytest.param("recv-larger", marks=MESSAGES),
        pytest.param("recv-smaller", marks=MESSAGES),
    ],
)
@pytest.mark.world(2)
def test_mismatch_raises(world: World, what: str) -> None:
    """At least one rank raises in Python before the timeout."""

    def body(rank: Rank) -> str:
        group = dist.new_group(timeout=SHORT)
        second = rank.index == 1
        dtype = torch.int32 if second and what == "all_reduce-dtype" else torch.float32
        sizes = {"all_reduce-size": 5, "broadcast-size": 5, "recv-larger": 5, "recv-smaller": 3}
        tensor = torch.ones(sizes.get(what, 4) if second else 4, dtype=dtype, device=rank.device)
        try:
            if what.startswith("all_reduce"):
                dist.all_reduce(tensor, group=group)
            elif what.startswith("broadcast"):
                dist.broadcast(tensor, 0, group=group)
            elif second:
                dist.recv(tensor, 0, group=group)
            else:
                dist.send(tensor, 1, group=group)
            tensor.cpu()  # on an accelerator only this waits
        except (RuntimeError, ValueError) as e:
            return f"{type(e).__name__}: {e}"
        return ""

    ends = world.run(body, watch=False, timeout=20)
    assert any(ends), "every rank took it for a success"
    assert "Timed out" not in "".join(ends), f"a mismatch was only noticed by a timeout: {ends}"


@requirement(
    "COLL-MISUSE-03",
    "all_to_all_single without split sizes raises an error if the world size does not divide dimension 0.",
    source="torch.distributed.all_to_all_single: 'dim 0 of output and input tensor must divide equally'",
)
@spmd(2)
def test_indivisible_on_one_side(rank: Rank) -> None:
    """Exchange three rows for four, or four for three, between two ranks."""
    for received, sent in ((3, 4), (4, 3)):
        with pytest.raises((ValueError, RuntimeError)):
            dist.all_to_all_single(torch.ones(received, device=rank.device), torch.ones(sent, device=rank.device))


@requirement(
    "COLL-MISUSE-04",
    "Tensors of two dtypes in one collective are refused, also if their elements have the same size.",
    source="torch.distributed: all_gather, all_to_all_single, all_gather_into_tensor",
)
@pytest.mark.parametrize("other", [torch.int32, torch.int64, torch.float16], ids=lambda dtype: str(dtype)[6:])
@spmd(2)
def test_two_dtypes(rank: Rank, other: torch.dtype) -> None:
    """Give inputs of float32 and outputs of another dtype; then a valid collective."""
    given = torch.ones(2, device=rank.device)
    wrong = [
        lambda: dist.all_gather([given.to(other) for _ in range(2)], given),
        lambda: dist.all_to_all_single(given.to(other), given),
        lambda: dist.all_gather_into_tensor(torch.ones(4, dtype=other, device=rank.device), given),
        lambda: dist.reduce_scatter(given.to(other), [given, given]),
    ]
    for misuse in wrong:
        with pytest.raises((TypeError, ValueError, RuntimeError)):
            misuse()
    dist.all_reduce(given)
    assert given.tolist() == [2, 2]


@requirement(
    "COLL-MISUSE-05",
    "At debug level DETAIL, collectives of any group that differ between ranks raise an error about it on every rank.",
    source="torch.distributed: Debugging torch.distributed applications: TORCH_DISTRIBUTED_DEBUG",
)
@pytest.mark.world(2, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
def test_differences_at_debug_level(world: World) -> None:
    """Give other shapes, dtypes, ranks and collectives, in groups made in every way; each group stays usable."""

    def body(rank: Rank) -> None:
        device, second = rank.device, rank.index == 1
        groups: dict[str, Any] = {
            "world": None,
            "new group": dist.new_group(),
            "group with options": dist.new_group([0, 1], group_desc="options", use_local_synchronization=True),
            "subgroup": dist.new_subgroups(2)[0],
            "enumerated": dist.new_subgroups_by_enumeration([[0, 1]])[0],
            "mesh": init_device_mesh(device.type, (2, 1), mesh_dim_names=("a", "b")).get_group("a"),
        }
        other = torch.ones(2, dtype=torch.float64 if second else torch.float32, device=device)
        more = torch.ones(3 if second else 2, device=device)
        two = torch.ones(2, device=device)
        words = {
            "dtype": ("ALLREDUCE", "Float", "Double"),
            "shape": ("ALLREDUCE", "[2]", "[3]"),
            "shape in flight": ("BROADCAST", "[2]", "[3]"),
            "shapes of lists": ("ALLGATHER", "[2]", "[3]"),
            "collective": ("ALLREDUCE", "BROADCAST", "Rank 0", "Rank 1"),
        }
        wrong: dict[str, Callable[[Any], Any]] = {
            "dtype": lambda group: dist.all_reduce(other, group=group),
            "shape": lambda group: dist.all_reduce(more, group=group),
            "shape in flight": lambda group: dist.broadcast(more, 0, group, async_op=True),
            "shapes of lists": lambda group: dist.all_gather([more.clone(), more.clone()], more, group),
            "collective": lambda group: dist.broadcast(two, 0, group) if second else dist.all_reduce(two, group=group),
        }
        for name, group in groups.items():
            for what, call in wrong.items():
                with pytest.raises(RuntimeError, match=r"(?i)mismatch") as told:
                    call(group)
                assert [word for word in words[what] if word not in str(told.value)] == [], f"{name}, another {what}"
                total = torch.ones(2, device=device)
                dist.all_reduce(total, group=group)
                assert total.tolist() == [2, 2], f"{name} after another {what}"

    world.run(body)


@requirement(
    "COLL-TIMEOUT-05",
    "At debug level DETAIL, a rank whose peer never joins a collective raises an error after the group's timeout.",
    source="torch.distributed.new_group, init_process_group: timeout; Debugging torch.distributed applications: "
    "TORCH_DISTRIBUTED_DEBUG",
)
@pytest.mark.needs(features=["timeouts"])
@pytest.mark.world(2, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
def test_timeouts_at_debug_level(world: World) -> None:
    """Each rank joins alone, at once, one collective in each of its groups, which are made in every way."""

    def body(rank: Rank) -> None:
        dist.barrier()
        dist.destroy_process_group()
        store = dist.PrefixStore("short", rank.store)
        dist.init_process_group(rank.backend, store=store, rank=rank.index, world_size=2, timeout=SHORT)
        ways: dict[str, Callable[[], Any]] = {
            "new group": lambda: dist.new_group(timeout=SHORT),
            "group with options": lambda: dist.new_group(
                [0, 1], SHORT, group_desc="options", use_local_synchronization=True
            ),
            "group with a backend": lambda: dist.new_group(timeout=SHORT, backend=dist.get_backend()),
            "subgroup": lambda: dist.new_subgroups(2, timeout=SHORT)[0],
            "enumerated": lambda: dist.new_subgroups_by_enumeration([[0, 1]], timeout=SHORT)[0],
        }
        mine = rank.index
        made = [{name: make() for name, make in ways.items()} for _ in range(2)]  # of each, one for each rank
        if rank.index == 0:
            made[mine]["world"] = None
        one = torch.ones(1, device=rank.device)
        calls: dict[str, Callable[[Any], Any]] = {
            "all_reduce": lambda group: dist.all_reduce(one.clone(), group=group),
            "broadcast": lambda group: dist.broadcast(one.clone(), 0, group),
            "all_gather": lambda group: dist.all_gather([one.clone(), one.clone()], one, group),
            "barrier": dist.barrier,
            "reduce_scatter": lambda group: dist.reduce_scatter(one.clone(), [one, one], group=group),
            "in flight": lambda group: dist.all_reduce(one.clone(), group=group, async_op=True).wait(),
        }

        def alone(name: str, what: str) -> tuple[str, float]:
            began = time.monotonic()
            with pytest.raises(RuntimeError):
                calls[what](made[mine][name])
            return f"{what} in {name}", time.monotonic() - began

        with ThreadPoolExecutor(len(calls)) as pool:
            for what, seconds in pool.map(alone, made[mine], calls):
                assert 0.9 * SHORT.total_seconds() <= seconds < SHORT.total_seconds() + 5, what

    world.run(body, watch=False, timeout=10)


@requirement(
    "COLL-MISUSE-07",
    "Tensors whose size or dtype does not fit a collective are refused where they are given, alone or in lists.",
    source="torch.distributed: its collectives; test_c10d_gloo.py: test_scatter_checks, "
    "test_allgather_coalesced_checks; test_c10d_common.py: AbstractCommTest",
)
@pytest.mark.needs(collective="gather")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(  # only the sender sees some of them
            "all_gather", marks=pytest.mark.needs(collective="all_gather", features=["mismatches"])
        ),
        pytest.param("all_gather_coalesced", marks=COALESCING),
        pytest.param("all_gather_into_tensor", marks=pytest.mark.needs(collective="all_gather_into_tensor")),
        pytest.param("all_reduce_coalesced", marks=COALESCING),
        pytest.param("all_to_all", marks=pytest.mark.needs(collective="all_to_all")),
        pytest.param("all_to_all_single", marks=pytest.mark.needs(collective="all_to_all_single")),
        "gather",
        pytest.param("reduce_scatter", marks=pytest.mark.needs(collective="reduce_scatter")),
        pytest.param("reduce_scatter_tensor", marks=pytest.mark.needs(collective="reduce_scatter_tensor")),
        pytest.param("scatter", marks=pytest.mark.needs(collective="scatter")),
    ],
)
@spmd(2)
def test_tensors_that_do_not_fit(rank: Rank, name: str) -> None:
    """Give tensors that are longer, shorter, empty or of another dtype, first, last or everywhere; then right ones."""
    me = rank.index

    def t(count: int = 2, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((count,), 5, dtype=dtype, device=rank.device)

    def lists(wrong: torch.Tensor) -> list[list[torch.Tensor]]:
        return [[wrong.clone(), t()], [t(), wrong.clone()], [wrong.clone(), wrong.clone()]]

    refused: list[tuple[str, str, Callable[[], Any]]] = []
    for kind, wrong in {
        "longer": t(3),
        "shorter": t(1),
        "empty": t(0),
        "double": t(2, torch.float64),
        "whole": t(2, torch.int32),
    }.items():
        size = kind in ("longer", "shorter", "empty")
        two = torch.cat([wrong, wrong])
        refused += [
            ("all_gather_into_tensor", kind, lambda two=two: dist.all_gather_into_tensor(two, t())),
            ("reduce_scatter_tensor", kind, lambda two=two: dist.reduce_scatter_tensor(t(), two)),
            ("all_to_all_single", kind, lambda two=two: dist.all_to_all_single(two, t(4))),
        ]
        for some in lists(wrong):
            nested, right = [[tensor] for tensor in some], [t(), t()]
            refused += [
                ("all_gather", kind, lambda some=some: dist.all_gather(some, t())),
                ("all_gather_coalesced", kind, lambda n=nested: dist.all_gather_coalesced(n, [t()])),
                ("gather", kind, lambda some=some: dist.gather(t(), some, me)),
                ("scatter", kind, lambda some=some: dist.scatter(t(), some, me)),
            ]
            if size:
                continue
            refused += [
                ("reduce_scatter", kind, lambda some=some: dist.reduce_scatter(t(), some)),
                ("all_to_all", f"{kind} in", lambda some=some, r=right: dist.all_to_all(r, some)),
                ("all_to_all", f"{kind} out", lambda some=some, r=right: dist.all_to_all(some, r)),
            ]
            if some[0].dtype != some[1].dtype:
                refused.append(("all_reduce_coalesced", kind, lambda some=some: dist.all_reduce_coalesced(some)))
    flat: Any = [t(), t()]
    for what, outs, ins in (
        ("no list of lists", flat, [t()]),
        ("a tuple of lists", ([t()], [t()]), [t()]),
        ("one list too few", [[t()]], [t()]),
        ("one list too many", [[t()] for _ in range(3)], [t()]),
        ("lists of two for one", [[t(), t()], [t(), t()]], [t()]),
        ("lists of one for two", [[t()], [t()]], [t(), t()]),
        ("nothing", [[], []], []),
    ):
        refused.append(("all_gather_coalesced", what, lambda o=outs, i=ins: dist.all_gather_coalesced(o, i)))
    refused.append(("all_reduce_coalesced", "nothing", lambda: dist.all_reduce_coalesced([])))
    calls = [(what, call) for collective, what, call in refused if collective == name]
    assert calls
    for what, call in calls:
        for _ in range(2):
            try:
                call()
            except (TypeError, ValueError, RuntimeError):
                continue
            raise AssertionError(f"{what}: {name} is not refused")
    if name == "all_gather_coalesced":
        outs = [[t(), t(3)] for _ in range(2)]
        dist.all_gather_coalesced(outs, [t() + me, t(3) + me])
        assert [[tensor.tolist() for tensor in line] for line in outs] == [[[5] * 2, [5] * 3], [[6] * 2, [6] * 3]]
    gathered = [t(), t()]
    for root in range(2):
        dist.gather(t() + me, gathered if me == root else None, root)
    assert [tensor.tolist() for tensor in gathered] == [[5, 5], [6, 6]]
