"""The exact model of collectives, without processes: against tables made by hand, and what its data must be like."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import reduce
from typing import Any

import pytest
import torch

from harness.oracles import collectives as model
from harness.oracles.collectives import (
    COLLECTIVES,
    IN_PLACE,
    LAYOUTS,
    Case,
    gaps,
    inputs,
    lay,
    outputs,
    poison,
    reduce_exactly,
    rows,
    settled,
)
from harness.oracles.exact import assert_same
from suites.collectives.cases import DTYPES, FUNCTIONAL, OPS, crossed, crossing, dtypes_of

PAIRS = [pytest.param(op, dtype, id=f"{op}-{str(dtype)[6:]}") for op in OPS for dtype in dtypes_of(op)]


# tables made by hand


def given_by_hand(case: Case, size: int, member: int, slot: int, call: int) -> torch.Tensor:
    """Rank m's element for receiver s at place i is 100 m + 10 s + i."""
    return torch.tensor([100 * member + 10 * slot + i for i in range(2)])


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (Case("all_reduce"), [[[300, 303]], [[300, 303]], [[300, 303]]]),
        (Case("all_reduce", "MAX"), [[[200, 201]], [[200, 201]], [[200, 201]]]),
        (Case("all_reduce", "PRODUCT"), [[[0, 20301]], [[0, 20301]], [[0, 20301]]]),
        (Case("reduce", root=1), [[], [[300, 303]], []]),
        (Case("broadcast", root=2), [[[200, 201]], [[200, 201]], [[200, 201]]]),
        (Case("all_gather"), [[[0, 1], [100, 101], [200, 201]]] * 3),
        (Case("all_gather_into_tensor"), [[[0, 1, 100, 101, 200, 201]]] * 3),
        (Case("all_gather_into_tensor", stacked=True), [[[[0, 1], [100, 101], [200, 201]]]] * 3),
        (Case("gather", root=2), [[], [], [[0, 1], [100, 101], [200, 201]]]),
        (Case("scatter", root=1), [[[100, 101]], [[110, 111]], [[120, 121]]]),
        (Case("reduce_scatter"), [[[300, 303]], [[330, 333]], [[360, 363]]]),
        (Case("reduce_scatter_tensor"), [[[300, 303]], [[330, 333]], [[360, 363]]]),
        (Case("reduce_scatter", "MIN"), [[[0, 1]], [[10, 11]], [[20, 21]]]),
        (
            Case("all_to_all"),
            [
                [[0, 1], [100, 101], [200, 201]],
                [[10, 11], [110, 111], [210, 211]],
                [[20, 21], [120, 121], [220, 221]],
            ],
        ),
        (
            Case("all_to_all_single"),
            [[[0, 1, 100, 101, 200, 201]], [[10, 11, 110, 111, 210, 211]], [[20, 21, 120, 121, 220, 221]]],
        ),
    ],
    ids=str,
)
def test_three_ranks(monkeypatch: pytest.MonkeyPatch, case: Case, expected: list[Any]) -> None:
    """What each of three ranks must hold, for inputs that are easy to follow."""
    monkeypatch.setattr(model, "piece", given_by_hand)
    case = replace(case, dtype=torch.int64, shape=(2,))
    assert [[tensor.tolist() for tensor in outputs(case, 3, member)] for member in range(3)] == expected


@pytest.mark.parametrize(
    ("op", "dtype", "given", "expected"),
    [
        ("SUM", torch.int8, [[100, -100], [27, -28]], [127, -128]),
        ("SUM", torch.bool, [[0, 0, 1, 1], [0, 1, 0, 1]], [0, 1, 1, 1]),
        ("PRODUCT", torch.bool, [[0, 0, 1, 1], [0, 1, 0, 1]], [0, 0, 0, 1]),
        ("MIN", torch.bool, [[0, 0, 1, 1], [0, 1, 0, 1]], [0, 0, 0, 1]),
        ("MAX", torch.bool, [[0, 0, 1, 1], [0, 1, 0, 1]], [0, 1, 1, 1]),
        ("BXOR", torch.bool, [[0, 0, 1, 1], [0, 1, 0, 1]], [0, 1, 1, 0]),
        ("MAX", torch.int64, [[-1, -(2**63), 2**63 - 1], [1, -1, -1]], [1, -1, 2**63 - 1]),
        ("MIN", torch.uint8, [[255, 3], [1, 200]], [1, 3]),
        ("BAND", torch.int32, [[-1, 6], [5, 3]], [5, 2]),
        ("BOR", torch.int32, [[-2, 6], [1, 3]], [-1, 7]),
        ("BXOR", torch.int32, [[-1, 6], [1, 3]], [-2, 5]),
        ("AVG", torch.float32, [[1, 2, -3], [2, 2, -4]], [1.5, 2, -3.5]),
        ("AVG", torch.complex64, [[1 + 2j], [3 - 4j]], [2 - 1j]),
        ("PREMUL_SUM", torch.float32, [[1, 2], [3, -5]], [8, -6]),
        ("PRODUCT", torch.float16, [[3, -2], [-3, -2], [0.5, 1]], [-4.5, 4]),
    ],
)
def test_reductions(op: str, dtype: torch.dtype, given: list[Any], expected: list[Any]) -> None:
    """Each reduction, of numbers that can be done in the head."""
    found = reduce_exactly(op, [torch.tensor(row, dtype=dtype) for row in given])
    assert_same(torch.tensor(expected, dtype=dtype), found, op)


@pytest.mark.parametrize(
    ("op", "dtype", "given"),
    [("SUM", torch.int8, [100, 100]), ("SUM", torch.float16, [2048, 1]), ("AVG", torch.float32, [0, 1, 0])],
)
def test_what_is_not_exact_is_no_model(op: str, dtype: torch.dtype, given: list[float]) -> None:
    """Sums that the dtype can't represent are the model's mistake, and not taken for an answer."""
    with pytest.raises(AssertionError, match="can't be represented"):
        reduce_exactly(op, [torch.tensor([number], dtype=dtype) for number in given])


def test_uneven_exchange_by_hand() -> None:
    """Row counts of the first call on three ranks, sender by sender."""
    assert [[rows(Case("all_to_all"), s, r, 0) for r in range(3)] for s in range(3)] == [
        [0, 2, 1],
        [1, 0, 2],
        [2, 1, 0],
    ]


# what the data must be like


def contributions(op: str, dtype: torch.dtype, size: int, count: int = 300) -> list[torch.Tensor]:
    return [inputs(Case("all_reduce", op, dtype, (count,)), size, member)[0] for member in range(size)]


def fold(op: str, tensors: list[torch.Tensor]) -> torch.Tensor:
    """From left to right, every step in the tensors' own dtype, as a ring does it."""
    if tensors[0].dtype == torch.bool:
        op = {"SUM": "BOR", "MAX": "BOR", "PRODUCT": "BAND", "MIN": "BAND"}.get(op, op)
    steps = {
        "PRODUCT": torch.mul,
        "MIN": torch.minimum,
        "MAX": torch.maximum,
        "BAND": torch.bitwise_and,
        "BOR": torch.bitwise_or,
        "BXOR": torch.bitwise_xor,
    }
    found = reduce(steps.get(op, torch.add), tensors)
    return found / len(tensors) if op == "AVG" else found


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize(("op", "dtype"), PAIRS)
def test_exact_in_any_order(op: str, dtype: torch.dtype, size: int) -> None:
    """However ranks are ordered, and in a tree as well, arithmetic in the dtype itself gives the model's bits."""
    given = contributions(op, dtype, size)
    expected = reduce_exactly(op, given)
    for order in itertools.islice(itertools.permutations(given), 0, None, max(1, size * 2 - 3)):
        assert_same(expected, fold(op, list(order)), f"{op} from left to right")
    if op == "AVG":
        assert_same(expected, fold("SUM", [part / size for part in given]), "AVG, divided first")
    elif size > 3:
        assert_same(expected, fold(op, [fold(op, given[:2]), fold(op, given[2:])]), f"{op} of two halves")


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("dtype", dtypes_of("AVG"), ids=str)
def test_average_is_exact_however_it_is_made(dtype: torch.dtype, size: int) -> None:
    """Divided first or last, or multiplied with the rounded 1/size first or last: the same bits, no false alarm."""
    given = contributions("AVG", dtype, size, 20_000)
    expected, factor = reduce_exactly("AVG", given), torch.tensor(1 / size, dtype=dtype)
    total = fold("SUM", given)
    assert_same(expected, total / size, "divided last")
    assert_same(expected, fold("SUM", [part / size for part in given]), "divided first")
    assert_same(expected, total * factor, "multiplied last")
    assert_same(expected, fold("SUM", [part * factor for part in given]), "multiplied first")


def by_reciprocals(case: Case, size: int, call: int) -> torch.Tensor:
    """Average as NCCL does: multiply by the rounded reciprocal and add, with one rounding for both."""
    factor = torch.tensor(1 / size, dtype=torch.float64).to(case.dtype).double()
    total = torch.zeros(case.shape, dtype=case.dtype)
    for member in range(size):
        total = (total.double() + inputs(case, size, member, call)[0].double() * factor).to(case.dtype)
    return total


@pytest.mark.parametrize("size", [2, 3, 4, 5, 7])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_averages_by_reciprocals(dtype: torch.dtype, size: int) -> None:
    """What rounding explains is settled, for sizes that need it; a contribution that is missing or twice is not."""
    case = Case("all_reduce", "AVG", dtype=dtype, shape=(500,))
    (right,) = outputs(case, size, 0, 0)
    rounded = by_reciprocals(case, size, 0)
    power_of_two = size in (2, 4)
    assert torch.equal(rounded, right) == power_of_two
    assert torch.equal(settled(case, size, 0, 0, right, rounded), right)
    given = inputs(case, size, 1, 0)[0].double() / size
    for wrong in (right.double() + given, right.double() - given):
        found = settled(case, size, 0, 0, right, wrong.to(dtype))
        assert (found != right).double().mean() > 0.8
    for other in (right.double(), right[1:]):  # neither of the dtype nor of the shape: left to the comparison
        assert settled(case, size, 0, 0, right, other) is other
    summed = replace(case, op="SUM")
    assert torch.equal(settled(summed, size, 0, 0, right, rounded), rounded)


@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize(("op", "dtype"), PAIRS)
def test_no_contribution_is_the_answer(op: str, dtype: torch.dtype, size: int) -> None:
    """A reduction that leaves a rank with its own data, or with another's, or leaves one rank out, is seen."""
    given = contributions(op, dtype, size, 66)
    expected = reduce_exactly(op, given)
    for left_out in range(size):
        assert not torch.equal(expected, given[left_out])
        assert not torch.equal(expected, fold(op, [*given[:left_out], *given[left_out + 1 :]]))


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize(("op", "dtype"), PAIRS)
def test_ops_are_told_apart(op: str, dtype: torch.dtype, size: int) -> None:
    """Another op than the one asked for gives another answer; booleans have only three."""
    given = contributions(op, dtype, size, 66)
    expected = fold(op, given)
    same = [{"SUM", "MAX", "BOR"}, {"PRODUCT", "MIN", "BAND"}] if dtype == torch.bool else []
    for other in OPS:
        if other != op and dtype in dtypes_of(other) and not any({op, other} <= kinds for kinds in same):
            assert not torch.equal(expected, fold(other, given)), other


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64])
@pytest.mark.parametrize("op", ["MIN", "MAX"])
def test_extremes_are_compared(op: str, dtype: torch.dtype) -> None:
    """Among the values are -1 and the least and greatest, and reading them without sign gives another answer."""
    given = contributions(op, dtype, 3)
    everything = set(torch.cat(given).tolist())
    assert {-1, torch.iinfo(dtype).min, torch.iinfo(dtype).max} <= everything
    lowest = torch.iinfo(dtype).min
    assert not torch.equal(reduce_exactly(op, given), fold(op, [part ^ lowest for part in given]) ^ lowest)


@pytest.mark.parametrize("op", ["MIN", "MAX"])
def test_half_precision_reaches_its_end(op: str) -> None:
    """65504 and -65504 take part."""
    assert {65504.0, -65504.0} <= set(torch.cat(contributions(op, torch.float16, 3)).tolist())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("collective", ["broadcast", "all_gather", "scatter", "all_to_all", "all_to_all_single"])
def test_moved_data_are_distinct(collective: str, dtype: torch.dtype) -> None:
    """Neighbours, ranks, receivers and calls have different data; wide dtypes have no value twice on a rank."""
    case = Case(collective, dtype=dtype, shape=(66,))
    found = [tuple(t.tolist()) for r in range(3) for c in range(2) for t in inputs(replace(case, root=r), 3, r, c)]
    assert len(set(found)) == len(found)
    for values in found:
        if dtype.itemsize >= 4:
            assert len(set(values)) == len(values)
        elif dtype != torch.bool:
            assert all(a != b for a, b in itertools.pairwise(values))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_moved_data_are_finite(dtype: torch.dtype) -> None:
    """No NaN, so that equal means equal bits, and no infinity."""
    values = inputs(Case("broadcast", dtype=dtype, shape=(70_000,)), 2, 0)[0]
    assert torch.isfinite(values).all()


@pytest.mark.parametrize(("op", "dtype"), [p for p in PAIRS if p.values[0] in ("SUM", "MAX")])
def test_reduced_data_are_distinct(op: str, dtype: torch.dtype) -> None:
    """Ranks, receivers and calls have different data."""
    case = Case("reduce_scatter", op, dtype, (66,))
    found = [tuple(t.tolist()) for member in range(5) for call in range(3) for t in inputs(case, 5, member, call)]
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != torch.bool], ids=str)
def test_poison_is_no_answer(dtype: torch.dtype) -> None:
    """An output that was not written, nearly everywhere differs from what must be there."""
    for collective in ("all_gather", "scatter", "all_to_all", "reduce_scatter"):
        (expected, *_) = outputs(Case(collective, dtype=dtype, shape=(66,)), 3, 1)
        assert int((expected == poison((66,), dtype)).sum()) <= 6


# how collectives hang together


@pytest.mark.parametrize("op", ["SUM", "MAX", "BXOR"])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_reduced_parts_make_the_whole(op: str, size: int) -> None:
    """What ranks hold after reduce_scatter_tensor, put together, is the reduction of the whole inputs."""
    case = Case("reduce_scatter_tensor", op, torch.int32, (3, 2))
    parts = [outputs(case, size, member)[0] for member in range(size)]
    whole = fold(op, [inputs(case, size, member)[0] for member in range(size)])
    assert_same(whole, torch.cat(parts), "parts")


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_gathering_undoes_scattering(size: int) -> None:
    """What the members hold after scatter is the root's list."""
    case = Case("scatter", root=size - 1)
    for member, given in enumerate(inputs(case, size, size - 1)):
        assert_same(given, outputs(case, size, member)[0], f"rank {member}")


@pytest.mark.parametrize("uneven", [False, True], ids=["even", "uneven"])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_exchange_is_a_transposition(size: int, uneven: bool) -> None:
    """What i gives j is what j has from i, in both forms of all_to_all, and no row is lost."""
    case = Case("all_to_all", shape=(1, 3), uneven=uneven)
    for i, j in itertools.product(range(size), repeat=2):
        assert_same(inputs(case, size, i, 1)[j], outputs(case, size, j, 1)[i], f"from {i} to {j}")
    single = replace(case, collective="all_to_all_single")
    given = torch.cat([inputs(single, size, member)[0] for member in range(size)])
    found = torch.cat([outputs(single, size, member)[0] for member in range(size)])
    assert_same(given.sort(dim=0).values, found.sort(dim=0).values, "rows")


@pytest.mark.parametrize("layout", ["contiguous", "expanded"])
@pytest.mark.parametrize("stacked", [False, True], ids=["joined", "stacked"])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_parts_are_cut_from_the_whole(size: int, stacked: bool, layout: str) -> None:
    """What a receiver gets of reduce_scatter_tensor is the reduction of the slices that are its own."""
    if stacked and layout == "expanded":
        layout = "column"
    case = Case("reduce_scatter_tensor", "SUM", torch.int32, (3, 2), layout, stacked=stacked)
    for member in range(size):
        wholes = [inputs(case, size, sender)[0].reshape(size, 3, 2)[member] for sender in range(size)]
        assert_same(fold("SUM", wholes), outputs(case, size, member)[0], f"rank {member}")


# memory


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.float32, torch.complex64], ids=str)
@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 3, 2), (0,), (2, 0), (1,)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS[:4])
def test_views_show_the_value(layout: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """A view shows the value, and writing it changes nothing else in its buffer."""
    value = inputs(Case("all_gather", dtype=dtype, shape=shape), 2, 1)[0]
    view, buffer = lay(value, layout)
    assert torch.equal(value, view)
    before = gaps(view, buffer)
    view.copy_(torch.ones_like(view))
    assert_same(before, gaps(view, buffer), "gaps")


@pytest.mark.parametrize(
    ("layout", "strides", "offset"),
    [
        ("contiguous", (4, 1), 0),
        ("offset", (4, 1), 3),
        ("column", (12, 3), 1),
        ("transposed", (1, 3), 0),
        ("expanded", (0, 1), 0),
    ],
)
def test_strides(layout: str, strides: tuple[int, ...], offset: int) -> None:
    """Each layout of three rows of four lies in memory as it says."""
    view, buffer = lay(torch.ones(3, 4), layout)
    assert (view.stride(), view.storage_offset()) == (strides, offset)
    assert view.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()


@pytest.mark.parametrize("layout", ["offset", "column"])
def test_every_gap_is_watched(layout: str) -> None:
    """A change of any one element that the view does not show is seen."""
    view, buffer = lay(torch.arange(5.0), layout)
    before = gaps(view, buffer)
    shown = {view.storage_offset() + i * view.stride(0) for i in range(5)}
    for place in range(buffer.numel()):
        flat = buffer.view(-1)
        old = flat[place].clone()
        flat[place] = 0.25
        assert torch.equal(before, gaps(view, buffer)) == (place in shown)
        flat[place] = old


def test_lazy_views() -> None:
    """conjugate and negative are views that show the value and store another."""
    numbers = torch.tensor([1 + 2j, -3 - 4j])
    view, buffer = lay(numbers, "conjugate")
    assert view.is_conj()
    assert view.resolve_conj().tolist() == [1 + 2j, -3 - 4j]
    assert buffer.tolist() == [1 - 2j, -3 + 4j]
    view, _ = lay(torch.tensor([1.0, -2.0]), "negative")
    assert view.is_neg()
    assert view.tolist() == [1, -2]


def test_expanded_values_repeat() -> None:
    """What is expanded along the first dimension has equal rows there, and different ones across ranks."""
    case = Case("all_gather", shape=(3, 4), layout="expanded")
    first, second = inputs(case, 2, 0)[0], inputs(case, 2, 1)[0]
    assert first[0].tolist() == first[1].tolist() == first[2].tolist()
    assert first.tolist() != second.tolist()


# cases


@pytest.mark.parametrize(
    "bad",
    [
        {"collective": "all_sum"},
        {"op": "sum"},
        {"layout": "diagonal"},
        {"out_layout": "expanded"},
        {"form": "late"},
        {"root_as": "local"},
        {"layout": "expanded"},
    ],
    ids=str,
)
def test_bad_cases(bad: dict[str, Any]) -> None:
    """A case that can't be is refused when it is written."""
    with pytest.raises(ValueError, match=next(iter(bad.values()))):
        Case(**{"collective": "all_reduce", **bad})


def test_a_case_says_what_it_is() -> None:
    """Everything that the answer depends on is named."""
    case = Case(
        "reduce", "MAX", torch.int8, (2, 3), "column", group=(2, 0), root=1, root_as="group", form="async", repeats=2
    )
    assert str(case) == "reduce(int8[2, 3], MAX, root 1 (group), group [2, 0], input column, async)"


def test_groups_are_ordered() -> None:
    """Ranks of a group ascend, as new_group has them."""
    assert Case("reduce", group=(3, 0, 2)).ranks(4) == [0, 2, 3]
    assert Case("reduce").ranks(3) == [0, 1, 2]


@pytest.mark.parametrize("forms", [["sync", "async"], ["functional"]], ids=str)
@pytest.mark.parametrize("layouts", [["contiguous", "offset"], ["expanded"]], ids=str)
@pytest.mark.parametrize("collective", [name for name in COLLECTIVES if name not in IN_PLACE])
def test_crossings_leave_no_pair_out(collective: str, layouts: list[str], forms: list[str]) -> None:
    """Any two values that are together in the full product are together in a pairwise list, and none else are; a
    case without elements, or in a group of one rank, does not count: it tells nothing."""

    def pairs(thorough: bool) -> set[Any]:
        fields = ("op", "dtype", "layout", "out_layout", "group", "form", "root_as")
        cases = crossing(collective, 3, thorough, layouts=layouts, forms=forms)
        telling = [case for case in cases if 0 not in case.shape and len(case.ranks(3)) > 1]
        return {p for case in telling for p in itertools.combinations([(f, getattr(case, f)) for f in fields], 2)}

    assert pairs(False) == pairs(True)
    assert (pairs(True) == set()) == (forms == ["functional"] and collective not in FUNCTIONAL)


def test_crossed_by_hand() -> None:
    """Three axes of two values need four rows; what does not fit is nowhere."""
    axes = {"a": "xy", "b": "xy", "c": "xy"}
    assert len(crossed(axes)) == 4
    found = crossed(axes, lambda row: row.get("a") != "x" or row.get("b") != "x")
    assert {(row["a"], row["b"]) for row in found} == {("x", "y"), ("y", "x"), ("y", "y")}
    assert {(row["b"], row["c"]) for row in found} == set(itertools.product("xy", repeat=2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8], ids=str)
def test_a_thousand_ranks(dtype: torch.dtype) -> None:
    """What ranks give differs and is expected as it was given, also where their numbers are no values of the dtype.

    pytorch/pytorch#125874 was an alarm about ranks above 256 that bfloat16 does not have.
    """
    size = 1024
    case = Case("all_gather_into_tensor", dtype=dtype, shape=(66,))
    given = {member: inputs(case, size, member)[0] for member in (0, 1, 255, 256, 257, 511, 512, 513, 1022, 1023)}
    whole = outputs(case, size, 0)[0].reshape(size, 66)
    for member, tensor in given.items():
        assert_same(tensor, whole[member], f"rank {member}")
    assert len({tuple(tensor.tolist()) for tensor in given.values()}) == len(given)
