"""Values at the limits of their dtype: infinities, NaNs, negative zeros, the largest and smallest numbers."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fixtures.tensors import moved
from harness import Rank, World, requirement
from harness.oracles.collectives import COLLECTIVES, FLOATS, IN_PLACE, REDUCING, Case, inputs, outputs
from harness.stacks.collectives import claimed, claimed_cases, functional, issue

MOVING = [name for name in COLLECTIVES if name not in REDUCING]
BITS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}


def bits(tensor: torch.Tensor) -> list[int]:
    """Return the bits of the elements as integers."""
    return list(tensor.contiguous().view(BITS[tensor.dtype]).reshape(-1).tolist())


def special(dtype: torch.dtype, rank: int, slot: int) -> torch.Tensor:
    """Return dtype[8]: the special values of the dtype, and a NaN that encodes sender and receiver."""
    smallest = torch.finfo(dtype).smallest_normal
    named = torch.tensor([float("nan")], dtype=dtype).view(BITS[dtype]) | (1 + 5 * rank + slot)
    plain = [float("inf"), -float("inf"), -0.0, smallest / 2, -smallest / 4, torch.finfo(dtype).max, float("nan")]
    return torch.cat([torch.tensor(plain, dtype=dtype), named.view(dtype)])


@requirement(
    "COLL-VALUE-01",
    "Collectives that only move data keep every bit of infinities, NaNs, negative zeros and subnormal numbers.",
    source="torch.distributed: its collectives",
)
@pytest.mark.parametrize("collective", MOVING)
@pytest.mark.world(2, 3)
def test_moved(world: World, collective: str) -> None:
    """Move every floating-point dtype, with NaNs that encode sender and receiver."""
    floats = claimed(FLOATS, collective)

    def body(rank: Rank) -> None:
        size, me = rank.size, rank.index
        for dtype in floats:
            mine = [special(dtype, me, slot) for slot in range(size)]
            to_me = [special(dtype, sender, me) for sender in range(size)]
            first = [special(dtype, sender, 0) for sender in range(size)]
            given, expected = {
                "broadcast": (mine[:1], first[:1]),
                "all_gather": (mine[:1], first),
                "all_gather_into_tensor": (mine[:1], [torch.cat(first)]),
                "gather": (mine[:1], first if me == 0 else []),
                "scatter": (mine if me == 0 else [], to_me[:1]),
                "all_to_all": (mine, to_me),
                "all_to_all_single": ([torch.cat(mine)], [torch.cat(to_me)]),
            }[collective]
            given = moved(given, rank.device)
            results = (
                given if collective in IN_PLACE else [torch.zeros_like(right, device=rank.device) for right in expected]
            )
            issue(Case(collective, dtype=dtype, form="async"), given, results, None).wait()
            assert [bits(right) for right in expected] == [bits(out.cpu()) for out in results], str(dtype)

    world.run(body)


@requirement(
    "COLL-VALUE-02",
    "A sum or average with one infinity is that infinity.",
    source="torch.distributed.ReduceOp; IEEE 754",
)
@requirement(
    "COLL-VALUE-06",
    "A sum or average with NaN, or with infinities of both signs, is NaN.",
    source="torch.distributed.ReduceOp; IEEE 754",
)
@pytest.mark.parametrize("op", ["SUM", "AVG"])
@pytest.mark.parametrize("collective", sorted(REDUCING))
@pytest.mark.world(2, 3)
def test_not_finite(world: World, collective: str, op: str) -> None:
    """One rank holds the infinity or NaN, or two ranks hold opposite infinities, in every floating-point dtype."""
    floats = claimed(FLOATS, collective, op)

    def body(rank: Rank) -> None:
        size, me = rank.size, rank.index
        last = me == size - 1
        infinity, nan = float("inf"), float("nan")
        mine = [infinity if last else 1.0, -infinity if me == 0 else 1.0, nan if last else 1.0, nan if me == 0 else 1.0]
        mine += [infinity if me == 0 else -infinity, float(size)]
        expected = [infinity, -infinity, nan, nan, nan, float(size * size if op == "SUM" else size)]
        for dtype in floats:
            tensor = torch.tensor(mine, dtype=dtype, device=rank.device)
            given = {
                "reduce_scatter": [tensor.clone() for _ in range(size)],
                "reduce_scatter_tensor": [tensor.repeat(size)],
            }.get(collective, [tensor])
            results = given if collective in IN_PLACE else [torch.zeros_like(tensor)]
            issue(Case(collective, op, dtype, (6,), form="async"), given, results, None).wait()
            if collective != "reduce" or me == 0:
                right, out = torch.tensor(expected, dtype=dtype), results[0].cpu()
                assert torch.equal(right.isnan(), out.isnan()), f"{dtype}: {out}"
                assert torch.equal(right.nan_to_num(7), out.nan_to_num(7)), f"{dtype}: {out}"

    world.run(body)


@requirement(
    "COLL-VALUE-03",
    "Sums are exact over the whole range of their dtype, from subnormal numbers to the largest finite ones.",
    source="torch.distributed.ReduceOp",
)
@pytest.mark.parametrize("collective", sorted(REDUCING))
@pytest.mark.world(2, 3)
def test_range(world: World, collective: str) -> None:
    """Exact sums of integers, scaled by a power of two, stay exact."""
    floats = claimed(FLOATS, collective, "SUM")

    def body(rank: Rank) -> None:
        for dtype in floats:
            case = Case(collective, dtype=dtype, shape=(33,), form="async")
            info = torch.finfo(dtype)
            largest = max(out.abs().max().double().item() for out in _sums(case, rank.size))
            for scale in (
                2.0 ** int(_exponent(info.max) - _exponent(largest)),
                info.smallest_normal,
                info.tiny * info.eps,
            ):
                given = [(tensor.double() * scale).to(dtype) for tensor in inputs(case, rank.size, rank.index)]
                given = moved(given, rank.device)
                expected = [(tensor.double() * scale).to(dtype) for tensor in outputs(case, rank.size, rank.index)]
                results = [torch.zeros_like(right, device=rank.device) for right in expected]
                results = given if collective in IN_PLACE else results
                issue(case, given, results, None).wait()
                for right, out in zip(expected, results, strict=False):  # reduce has a result only on its root
                    assert torch.equal(right, out.cpu()), f"{dtype}, times {scale}: {out}, expected {right}"

    world.run(body)


def extremes(rank: Rank, collective: str, op: str, who: int, dtype: torch.dtype) -> list[float]:
    """Return MAX or MIN of 1, 2, 3 and so on, with NaN on the rank ``who``; of reduce, only on the root."""
    size = rank.size
    tensor = torch.full((2,), float("nan") if rank.index == who else rank.index + 1.0, dtype=dtype, device=rank.device)
    given = {
        "reduce_scatter": [tensor.clone() for _ in range(size)],
        "reduce_scatter_tensor": [tensor.repeat(size)],
    }.get(collective, [tensor])
    results = given if collective in IN_PLACE else [torch.zeros_like(tensor)]
    issue(Case(collective, op, dtype, (2,), form="async"), given, results, None).wait()
    return list(results[0].tolist()) if collective != "reduce" or rank.index == 0 else []


@requirement(
    "COLL-VALUE-04",
    "MAX or MIN with NaN on one rank gives NaN or the result of all other ranks, so that no number is lost.",
    source="torch.distributed.ReduceOp; IEEE 754 (maximum, maximumNumber)",
)
@pytest.mark.parametrize("who", ["first", "middle", "last"])
@pytest.mark.parametrize("op", ["MAX", "MIN"])
@pytest.mark.parametrize("collective", sorted(REDUCING))
@pytest.mark.world(3, 4)
@pytest.mark.each_choice
def test_extremes_beside_nan(world: World, collective: str, op: str, who: str) -> None:
    """Ranks hold 1, 2, 3 and so on, except one that holds NaN, in every floating-point dtype."""
    floats = claimed(FLOATS, collective, op)

    def body(rank: Rank) -> None:
        bad = {"first": 0, "middle": 1, "last": rank.size - 1}[who]
        others = [member + 1.0 for member in range(rank.size) if member != bad]
        right = max(others) if op == "MAX" else min(others)
        for dtype in floats:
            values = extremes(rank, collective, op, bad, dtype)
            wrong = [x for x in values if x == x and x != right]
            assert not wrong, f"{dtype}: {op} with NaN on rank {bad} is {values[0]}, where NaN or {right} is right"

    world.run(body)


@requirement(
    "COLL-VALUE-05",
    "Whether MAX or MIN with NaN on one rank gives NaN does not depend on which rank holds it.",
    source="torch.distributed.ReduceOp; IEEE 754 (maximum, maximumNumber)",
)
@pytest.mark.parametrize("op", ["MAX", "MIN"])
@pytest.mark.parametrize("collective", sorted(REDUCING))
@pytest.mark.world(2, 3)
@pytest.mark.each_choice
def test_nan_of_each_rank(world: World, collective: str, op: str) -> None:
    """Each rank in turn holds the NaN."""
    floats = claimed(FLOATS, collective, op)

    def body(rank: Rank) -> None:
        for dtype in floats:
            nans = [[x != x for x in extremes(rank, collective, op, holder, dtype)] for holder in range(rank.size)]
            assert nans == nans[:1] * rank.size, f"{dtype}: {op} is NaN with that of ranks: {[f[:1] for f in nans]}"

    world.run(body)


def _sums(case: Case, size: int) -> list[torch.Tensor]:
    """Return the inputs and outputs of all ranks."""
    return [tensor for member in range(size) for tensor in (*inputs(case, size, member), *outputs(case, size, member))]


def _exponent(number: float) -> int:
    return int(torch.frexp(torch.tensor(number, dtype=torch.float64)).exponent)


@requirement(
    "COLL-VALUE-4807",
    "After all_reduce a tensor has the same bits on every rank, even if its sum depends on the order of the ranks.",
    source="torch.distributed.all_reduce: 'After the call tensor is going to be bitwise identical in all processes'",
)
@pytest.mark.parametrize("form", ["sync", "async", "list", "functional"])
@pytest.mark.world(3, 4)
def test_same_bits(world: World, form: str) -> None:
    """Reduce numbers of different magnitudes in each dtype that rounds, few of them and many."""
    cases = claimed_cases([Case("all_reduce", op, dtype) for op in ("SUM", "AVG", "PRODUCT") for dtype in FLOATS])

    def body(rank: Rank) -> dict[str, list[int]]:
        found = {}
        for case in cases:
            for count in (1, 7, 65, 1500):
                drawn = torch.Generator().manual_seed(rank.index)
                magnitudes = 10.0 ** torch.randint(-2, 3, (count,), generator=drawn)
                tensor = (torch.randn(count, generator=drawn) * magnitudes).to(case.dtype).to(rank.device)
                op = getattr(dist.ReduceOp, case.op)
                if form == "list":
                    dist.all_reduce_coalesced([tensor], op)
                elif form == "functional":
                    tensor = functional.wait_tensor(functional.all_reduce(tensor, case.op, dist.group.WORLD))
                elif (work := dist.all_reduce(tensor, op, async_op=form == "async")) is not None:
                    work.wait()
                found[f"{case}, {count}"] = bits(tensor.cpu())
        return found

    first, *others = world.run(body)
    for rank, found in enumerate(others, 1):
        assert [what for what in first if found[what] != first[what]] == [], f"differ on rank {rank}"
