"""Asynchronous, coalesced and functional forms give the same results as the synchronous form."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fixtures.tensors import moved
from harness import Rank, World, assert_same, requirement, spmd
from harness.oracles.collectives import Case, inputs, outputs
from harness.stacks.collectives import assert_right, coalescing_manager, functional
from suites.collectives.cases import COALESCED, DTYPES, FUNCTIONAL, every_collective, repeated, shaped, swept

MIXED: list[list[tuple[torch.dtype, tuple[int, ...]]]] = [
    [(torch.float32, (count,)) for count in (1, 4, 33)],
    [(torch.float32, shape) for shape in ((2, 2), (0,), (3, 3, 3), (0,), (), (0, 2))],
    [(torch.complex64, (5,)), (torch.complex64, (2, 3))],
    [(torch.float32, (3,)), (torch.complex64, (4,)), (torch.float32, (2, 2))],
]
"""Lists of tensors of one dtype, or of a complex one and that of its parts."""


@requirement(
    "COLL-ASYNC-01",
    "With async_op=True a collective returns a Work, and the result is available after wait().",
    source="torch.distributed: Synchronous and asynchronous collective operations",
)
@pytest.mark.world(1, 2, 3, 4)
def test_asynchronous(world: World) -> None:
    """Call every collective with small and large tensors, and read the poisoned outputs right after wait()."""
    assert_right(world, every_collective(form="async", repeats=3))
    assert_right(world, every_collective(form="async", shape=((1 << 18) + 1,)))


@requirement(
    "COLL-ASYNC-03",
    "Work that has been waited for is completed.",
    source="torch.distributed.Work.is_completed",
)
@pytest.mark.parametrize(
    "collective",
    [
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "reduce_scatter_tensor",
        pytest.param("message", marks=pytest.mark.needs(features=["messages"])),
    ],
)
@pytest.mark.world(2)
def test_completed_after_wait(world: World, collective: str) -> None:
    """Ask is_completed() right after wait() and, on an accelerator, after a copy to the host."""

    def body(rank: Rank) -> None:
        tensor = torch.ones(4, device=rank.device)
        parts = [torch.ones_like(tensor) for _ in range(rank.size)]
        arguments = {
            "all_reduce": (tensor,),
            "all_gather": (parts, tensor),
            "reduce_scatter": (tensor, parts),
            "reduce_scatter_tensor": (tensor, torch.cat(parts)),
        }
        if collective == "message":
            work = dist.isend(tensor, 1) if rank.index == 0 else dist.irecv(tensor, 0)
        else:
            work = getattr(dist, collective)(*arguments[collective], async_op=True)
        assert work is not None
        work.wait()
        tensor.cpu()  # on an accelerator only this waits
        assert work.is_completed()

    world.run(body)


@requirement(
    "COLL-ASYNC-02",
    "Several works may be in flight and be waited for in any order.",
    source="torch.distributed.Work.wait",
)
@spmd(1, 2, 3)
def test_many_in_flight(rank: Rank) -> None:
    """Eight all_reduces are waited for in reverse order."""
    case = Case("all_reduce", shape=(1000,))
    tensors = [inputs(case, rank.size, rank.index, call)[0].to(rank.device) for call in range(8)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    for call, tensor in enumerate(tensors):
        assert_same(outputs(case, rank.size, rank.index, call)[0], tensor, f"call {call}")


@requirement(
    "COLL-PAIR-01",
    "Any collective is correct right after any other collective.",
    source="torch.distributed; pytorch/xla#3506",
)
@pytest.mark.world(2, 3)
def test_pairs(world: World) -> None:
    """Call every ordered pair of collectives back to back on one group."""
    every = every_collective(shape=(3,), root=1)
    assert_right(world, [case for first in every for second in every for case in (first, second)])


@requirement(
    "COLL-COALESCED-01",
    "Collectives issued under a coalescing manager give the same results as alone, once the manager has been "
    "waited for.",
    source="torch.distributed: _coalescing_manager",
)
@spmd(1, 2, 3)
def test_coalesced(rank: Rank) -> None:
    """Coalesce three calls with different sizes of each collective that can be coalesced."""
    for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"):
        cases = [Case(name, shape=(count,)) for count in (1, 4, 33)]
        given = [inputs(case, rank.size, rank.index)[0].to(rank.device) for case in cases]
        expected = [outputs(case, rank.size, rank.index)[0] for case in cases]
        results = given if name == "all_reduce" else [torch.full_like(e, -1).to(rank.device) for e in expected]
        with coalescing_manager(async_ops=True) as manager:
            for tensor, out in zip(given, results, strict=True):
                getattr(dist, name)(*((tensor,) if name == "all_reduce" else (out, tensor)))
        manager.wait()
        for case, right, tensor in zip(cases, expected, results, strict=True):
            assert_same(right, tensor, str(case))


@requirement(
    "COLL-COALESCED-02",
    "all_reduce_coalesced reduces each tensor of a list as all_reduce does.",
    source="torch.distributed.all_reduce_coalesced",
)
@spmd(1, 2, 3)
def test_all_reduce_coalesced(rank: Rank) -> None:
    """Reduce tensors of different sizes; matrices, numbers, nothing; complex ones, beside real ones too; one tensor."""
    for shapes in MIXED:
        cases = [Case("all_reduce", shape=shape, dtype=dtype) for dtype, shape in shapes]
        tensors = moved((inputs(case, rank.size, rank.index)[0] for case in cases), rank.device)
        dist.all_reduce_coalesced(tensors)
        for case, tensor in zip(cases, tensors, strict=True):
            assert_same(outputs(case, rank.size, rank.index)[0], tensor, str(case))
    case = Case("all_reduce", shape=(3, 5))
    (alone,) = moved(inputs(case, rank.size, rank.index), rank.device)
    dist.all_reduce_coalesced(alone)  # a tensor for a list of one
    assert_same(outputs(case, rank.size, rank.index)[0], alone, "a tensor alone")


@requirement(
    "COLL-COALESCED-03",
    "all_gather_coalesced gathers each tensor of a list as all_gather does.",
    source="torch.distributed.all_gather_coalesced",
)
@spmd(1, 2, 3)
def test_all_gather_coalesced(rank: Rank) -> None:
    """Gather tensors of different sizes; matrices, numbers and nothing; complex tensors alone and beside real ones."""
    for shapes in MIXED:
        cases = [Case("all_gather", shape=shape, dtype=dtype) for dtype, shape in shapes]
        tensors = moved((inputs(case, rank.size, rank.index)[0] for case in cases), rank.device)
        gathered = [[torch.full_like(tensor, -1) for tensor in tensors] for _ in range(rank.size)]
        dist.all_gather_coalesced(gathered, tensors)
        for number, case in enumerate(cases):
            for sender, right in enumerate(outputs(case, rank.size, rank.index)):
                assert_same(right, gathered[sender][number], f"{case} from rank {sender}")


@requirement(
    "COLL-FUNC-01",
    "A functional collective returns what the regular collective writes to its output.",
    source="torch.distributed._functional_collectives: its functions",
)
@requirement(
    "COLL-FUNC-16",
    "A functional collective leaves its input unchanged.",
    source="torch.distributed._functional_collectives: its functions",
)
@pytest.mark.parametrize("collective", FUNCTIONAL)
@pytest.mark.world(1, 2, 3, 4)
@pytest.mark.each_choice
def test_functional(world: World, collective: str, thorough: bool) -> None:
    """Test every dtype at many counts, on the default group."""
    base = Case(collective, form="functional")
    dtypes = [dtype for dtype in DTYPES if not (dtype.is_complex and collective == "all_to_all_single")]
    assert_right(world, [*swept(base, dtypes, thorough), *shaped(base, [(1,), (3, 5), (2, 3, 4)])])


OF_LARGE = [
    *(("functional", name) for name in FUNCTIONAL),
    *(("async", name) for name in FUNCTIONAL),
    *(("coalesced", name) for name in COALESCED),
]
"""Forms of calls, and the collectives that have them."""


@requirement(
    "COLL-FORM-7202",
    "Each form of a collective is correct for large tensors, in every call.",
    source="torch.distributed: async_op; torch.distributed._functional_collectives: its functions",
)
@pytest.mark.parametrize(("form", "collective"), OF_LARGE)
@pytest.mark.world(2)
def test_large(world: World, form: str, collective: str, thorough: bool) -> None:
    """Call with about 1 and 4 MiB for each rank, and with exactly 4 MiB, in rows as well."""
    base = Case(collective, form=form)
    exact = [(1 << 20,), (1 << 10, 1 << 10)]
    assert_right(world, [*repeated(base, thorough), *shaped(base, exact)])


@requirement(
    "COLL-FUNC-08",
    "The functional all_to_all_single accepts complex tensors, as the regular one does.",
    source="torch.distributed._functional_collectives: all_to_all_single",
)
@pytest.mark.world(2)
def test_functional_complex_exchange(world: World) -> None:
    """Exchange complex64 numbers in equal chunks."""
    assert_right(world, [Case("all_to_all_single", form="functional", dtype=torch.complex64)])


@requirement(
    "COLL-FUNC-02",
    "A functional collective accepts views with any strides.",
    source="torch.distributed._functional_collectives: its functions",
)
@pytest.mark.parametrize("layout", ["offset", "column", "transposed", "expanded"])
@pytest.mark.parametrize("collective", [name for name in FUNCTIONAL if name not in ("all_reduce", "broadcast")])
@pytest.mark.world(2, 3)
def test_functional_layouts(world: World, collective: str, layout: str) -> None:
    """The input is a view of a larger buffer."""
    assert_right(world, [Case(collective, form="functional", layout=layout, shape=(4, 3), repeats=2)])


@requirement(
    "COLL-FUNC-03",
    "The functional all_reduce and broadcast accept views with any strides.",
    source="torch.distributed._functional_collectives: all_reduce",
)
@pytest.mark.parametrize("layout", ["offset", "column", "transposed"])
@pytest.mark.parametrize("collective", ["all_reduce", "broadcast"])
@pytest.mark.world(2, 3)
def test_functional_in_place_layouts(world: World, collective: str, layout: str) -> None:
    """The input is a view of a larger buffer."""
    assert_right(world, [Case(collective, form="functional", layout=layout, shape=(4, 3), repeats=2)])


@requirement(
    "COLL-FUNC-04",
    "The functional all_to_all_single exchanges chunks of different sizes.",
    source="torch.distributed._functional_collectives: all_to_all_single",
)
@pytest.mark.world(1, 2, 3)
def test_functional_uneven(world: World) -> None:
    """Chunks have 0, 1 or 2 rows."""
    assert_right(world, shaped(Case("all_to_all_single", form="functional", uneven=True, repeats=3), [(1,), (1, 3)]))


@requirement(
    "COLL-FUNC-05",
    "A functional collective gathers or scatters along any dimension.",
    source="torch.distributed._functional_collectives.all_gather_tensor, reduce_scatter_tensor",
)
@spmd(1, 2, 3)
def test_functional_dimensions(rank: Rank) -> None:
    """Gather and scatter a matrix along dimension 1."""
    parts = [torch.arange(6.0, device=rank.device).reshape(2, 3) + 100 * i for i in range(rank.size)]
    whole = functional.wait_tensor(functional.all_gather_tensor(parts[rank.index], 1, rank.group))
    assert_same(torch.cat(parts, dim=1), whole, "gathered")
    back = functional.wait_tensor(functional.reduce_scatter_tensor(whole, "sum", 1, rank.group))
    assert_same(parts[rank.index] * rank.size, back, "reduced and scattered")


@requirement(
    "COLL-FUNC-06",
    "The result of a functional collective is waited for automatically when it is first used.",
    source="torch.distributed._functional_collectives: AsyncCollectiveTensor, wait_tensor",
)
@spmd(1, 2, 3)
def test_functional_waits_when_used(rank: Rank) -> None:
    """Use the result of a large all_reduce at once."""
    ones = torch.ones(1 << 18, device=rank.device)
    total = functional.all_reduce(ones * (rank.index + 1), "sum", rank.group) + 1
    assert_same(ones * (rank.size * (rank.size + 1) / 2 + 1), total, "sum")


@requirement(
    "COLL-FUNC-07",
    "The gradient of a functional collective is the transposed collective of the gradients.",
    source="torch.distributed._functional_collectives: all_gather_tensor_autograd, reduce_scatter_tensor_autograd, "
    "all_to_all_single_autograd",
)
@spmd(1, 2, 3)
def test_functional_gradients(rank: Rank) -> None:
    """Compare all_gather, reduce_scatter and all_to_all_single with the formula."""
    size, me, device = rank.size, rank.index, rank.device
    weights = [torch.arange(3.0 * size, device=device) + 10 * i for i in range(size)]
    x = torch.arange(3.0, device=device).requires_grad_()
    (functional.all_gather_tensor_autograd(x, 0, rank.group) * weights[me]).sum().backward()
    assert x.grad is not None
    assert_same(sum(w[3 * me : 3 * me + 3] for w in weights), x.grad, "all_gather")
    short = [torch.arange(3.0, device=device) + 10 * i for i in range(size)]
    y = torch.arange(3.0 * size, device=device).requires_grad_()
    (functional.reduce_scatter_tensor_autograd(y, "sum", 0, rank.group) * short[me]).sum().backward()
    assert y.grad is not None
    assert_same(torch.cat(short), y.grad, "reduce_scatter")
    z = torch.arange(3.0 * size, device=device).requires_grad_()
    (functional.all_to_all_single_autograd(z, [3] * size, [3] * size, rank.group) * weights[me]).sum().backward()
    assert z.grad is not None
    assert_same(torch.cat([w[3 * me : 3 * me + 3] for w in weights]), z.grad, "all_to_all_single")
