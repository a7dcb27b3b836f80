"""Scaling curves: what belongs to one, its efficiency, and its limit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harness import Rank, World
from harness.bench.measuring import limits
from harness.bench.measuring.timing import ONCE, Effort
from harness.bench.records import LINK, Measurement, Series
from harness.bench.scaling import COPY, Curve, curves, limit_at
from harness.bench.terminal import shown

MIB = 1 << 20
GB = 1e9


def reduced(ranks: int, size: int = MIB, **fields: Any) -> Series:
    return Series(operation="all_reduce", op="sum", dtype="float32", bytes=size, world=ranks, **fields)


def copied(ranks: int, size: int = MIB) -> Series:
    return Series(operation=COPY, bytes=size, world=ranks)


def step(ranks: int, metric: str = "time", **fields: Any) -> Series:
    return Series(operation="step.replicate", metric=metric, world=ranks, **fields)


def only(found: list[Curve]) -> Curve:
    (curve,) = found
    return curve


def test_efficiency_of_a_collective() -> None:
    """It is busbw against that of the fewest ranks: 4 ranks carry 1.5 times the message, 2 ranks once."""
    curve = only(curves({reduced(2): MIB / GB, reduced(4): 3 * MIB / GB}))
    assert (curve.operation, curve.name, curve.step, curve.link) == ("all_reduce", "1 MiB, float32", False, None)
    assert [(p.ranks, p.value, p.efficiency, p.limit) for p in curve.points] == [
        (2, pytest.approx(1.0), 1.0, None),
        (4, pytest.approx(0.5), pytest.approx(0.5), None),
    ]


def test_limits() -> None:
    """Memory's limit is the copy on as many ranks; the link's is the profile's."""
    figures = {
        reduced(2): 1.0,
        reduced(4): 1.0,
        copied(2): MIB / (8 * GB),
        copied(8): MIB / GB,
        Series(operation=LINK, metric=LINK, world=2): 50.0,
    }
    curve = only(curves(figures))
    assert [point.limit for point in curve.points] == [pytest.approx(8.0), None]
    assert curve.link == 50.0


@pytest.mark.parametrize(("size", "limit"), [(1, 8.0), (1 << 10, 8.0), (1 << 15, 4.0), (1 << 20, 2.0), (1 << 30, 2.0)])
def test_limit_between_sizes(size: int, limit: float) -> None:
    """It is interpolated on logarithmic scales, and stays the same beyond what was measured."""
    assert limit_at([(1 << 10, 8.0), (1 << 20, 2.0)], size) == pytest.approx(limit)
    assert limit_at([(5, 3.0)], size) == 3.0
    assert limit_at([], size) is None


def test_what_is_no_curve() -> None:
    """One rank does not communicate, and neither groups nor messages of models are on as many ranks or bytes."""
    group, payload = (("group", "ranks 0, 1 of 4"),), (("payload", "llama"),)
    alone = {reduced(1): 1.0, reduced(2): 1.0}
    grouped = {reduced(2, variant=group): 1.0, reduced(4, variant=group): 1.0}
    of_models = {reduced(2, variant=payload): 1.0, reduced(4, variant=payload): 1.0}
    other_sizes = {reduced(2, 1 << 20): 1.0, reduced(4, 1 << 21): 1.0}
    for figures in (alone, grouped, of_models, other_sizes, {copied(2): 1.0, copied(4): 1.0}, {}):
        assert curves(figures) == []


def test_rounded_sizes_are_one_curve() -> None:
    """A message for three ranks is rounded down to whole elements, and stays in its curve."""
    whole = {"operation": "all_gather_into_tensor", "dtype": "float32"}
    figures = {Series(bytes=size, world=ranks, **whole): 1.0 for ranks, size in ((2, 1 << 16), (3, (1 << 16) - 4))}
    assert [point.ranks for point in only(curves(figures)).points] == [2, 3]


def test_few_sizes_of_many() -> None:
    """Of a sweep there are the sizes nearest to 64 KiB and 1 MiB, and the largest."""
    figures = {reduced(ranks, 8 << (2 * i)): 1.0 for ranks in (2, 4) for i in range(11)}
    assert [curve.name.partition(",")[0] for curve in curves(figures)] == ["32 KiB", "512 KiB", "8 MiB"]


def test_efficiency_of_a_step() -> None:
    """It is the time on the fewest ranks over the time; its limit is that of the compute alone."""
    figures = {
        step(1): 1.0,
        step(2): 2.0,
        step(4): 8.0,
        step(1, "compute"): 0.5,
        step(2, "compute"): 0.5,
        step(4, "compute"): 1.0,
        step(4, "exposed"): 7.0,
    }
    curve = only(curves(figures))
    assert curve.step
    assert [point.efficiency for point in curve.points] == [1.0, 0.5, 0.125]
    assert [curve.best(point) for point in curve.points] == [1.0, 1.0, 0.5]
    assert only(curves({step(1): 1.0, step(2): 2.0})).best(curve.points[0]) is None


def test_in_the_terminal() -> None:
    """A column for each number of ranks, with figure, efficiency and the share of the limit."""
    figures = {reduced(2): MIB / GB, reduced(4): 3 * MIB / GB, copied(4): MIB / (50 * GB), step(1): 1e-3, step(2): 4e-3}
    measured = [Measurement(series=series, samples=[[[value]]]) for series, value in figures.items()]
    lines = [" ".join(line.split()) for line in shown(measured, 120, color=False)]
    assert "scaling of how 2 ranks 4 ranks" in lines
    assert "all_reduce 1 MiB, float32 1 100% 0.5 50% (1%)" in lines
    assert "replicate 1 ms 100% 4 ms 25%" in lines


def test_measured_limits(two: World) -> None:
    """Each size has a figure: the mean of each round.  The link is a constant."""
    effort = Effort(rounds=3, visits=2, seconds=0.001, least=2, most=5, warm=0.01)
    found = limits.timed_on(two, effort, link=25.0)
    assert [(m.series.operation, m.series.bytes, m.series.world) for m in found] == [
        *((COPY, size, 2) for size in limits.SIZES),
        (LINK, 0, 2),
    ]
    assert all([len(one) for one in m.samples] == [1] * 6 for m in found[:-1])
    assert found[-1].value == 25.0
    assert len(limits.timed_on(two, ONCE)) == len(limits.SIZES)


def loses_an_element(rank: Rank) -> None:
    """From now on copies of more than a MiB on rank 1 lose their last element."""
    right = torch.Tensor.copy_

    def wrong(target: torch.Tensor, source: torch.Tensor, *args: Any) -> torch.Tensor:
        right(target, source, *args)
        if rank.index == 1 and source.nbytes > MIB:
            target.view(-1)[-1] = 0
        return target

    torch.Tensor.copy_ = wrong


def test_wrong_copies(two: World) -> None:
    """A copy that loses an element is no limit."""
    two.run(loses_an_element)
    with pytest.raises(AssertionError, match=r"copy in memory is wrong\nrank 1: copies of \[16777216\] bytes"):
        limits.timed_on(two, ONCE)
