"""Timing on ranks: what is measured, how it is checked, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import Rank, World, WorldSpec
from harness.bench.measuring import stepping, steps
from harness.bench.measuring.collectives import Found, Timed, impossible, merged, on_rank, timed_on
from harness.bench.measuring.timing import ONCE, Effort, HostClock, Timing, measure
from harness.bench.records import Measurement
from harness.stacks import messages

LITTLE = Effort(rounds=2, visits=1, seconds=0.002, least=3, most=5, warm=0.01)


@pytest.mark.parametrize(
    ("timed", "says"),
    [
        ({"collective": "all_reduce", "bytes": 8, "mode": "sometimes"}, "sync, or async"),
        ({"collective": "all_reduce", "bytes": 8, "in_flight": 4}, "sync, or async"),
        ({"collective": "broadcast", "bytes": 8, "place": "out"}, "broadcast has no form"),
        ({"collective": "gather", "bytes": 8, "place": "in"}, "gather has no form"),
        ({"collective": "all_reduce", "bytes": 8, "place": "out", "mode": "async"}, "waited for by itself"),
    ],
)
def test_what_can_not_be_timed(timed: dict[str, object], says: str) -> None:
    """It is refused before any rank starts."""
    with pytest.raises(ValueError, match=says):
        Timed(**timed)  # type: ignore[arg-type]


def test_a_message_without_an_element_for_each_rank() -> None:
    """It is refused: there would be nothing to time."""
    with pytest.raises(ValueError, match="have no element for each of 4 ranks"):
        Timed("all_gather_into_tensor", 8).case(4)


def test_messages_are_whole_elements() -> None:
    """A size is rounded down to whole elements for every rank, and the series says what is left."""
    assert Timed("all_gather_into_tensor", 1 << 10).message(3) == 1020
    assert Timed("all_reduce", 10).message(3) == 8


@pytest.mark.parametrize("bad", [{"rounds": 0}, {"least": 0}, {"least": 9, "most": 8}, {"seconds": -1.0}])
def test_what_is_no_effort(bad: dict[str, float]) -> None:
    """It is refused."""
    with pytest.raises(ValueError, match="not an effort"):
        Effort(**bad)  # type: ignore[arg-type]


def test_merged() -> None:
    """Ranks' samples are turned so that an iteration has every rank's time."""
    assert merged([[[1, 2], [3]], [[4, 5], [6]]]) == [[[1, 4], [2, 5]], [[3, 6]]]


def test_the_clock_counts_every_call() -> None:
    """As many times as calls, each of the call's own length."""
    calls: list[int] = []
    found = HostClock().iterate(lambda: calls.append(1), 7)
    assert len(found) == len(calls) == 7
    assert all(seconds >= 0 for seconds in found)


CASES = [
    *(Timed(name, 1 << 10) for name in ("all_reduce", "broadcast", "gather", "reduce_scatter_tensor", "all_to_all")),
    Timed("all_reduce", 1 << 10, mode="async", in_flight=3),
    Timed("all_reduce", 40_000, torch.bfloat16, place="out"),
    Timed("all_gather_into_tensor", 1 << 10, place="in"),
    Timed("reduce_scatter_tensor", 1 << 10, place="in"),
    Timed("all_reduce", 1 << 10, group=(1,)),
]


def test_rounds_and_ranks(two: World) -> None:
    """Every rank's time of every iteration of every round is kept, and the first call apart."""
    for timed in CASES:
        found = timed_on(two, timed, LITTLE)
        members = len(timed.group) if timed.group else 2
        assert [len(ranks) for one in found.samples for ranks in one] == [members] * len(found.iterations())
        assert len(found.samples) == 2
        assert 6 <= len(found.iterations()) <= 10
        assert found.first > 0
        assert found.series.bytes == timed.message(members)


def test_fresh_ranks_for_every_visit(two: World) -> None:
    """Figures come from as many sets of ranks as visits, rounds one after the other."""
    before = two.started
    effort = Effort(rounds=2, visits=3, seconds=0, least=2, most=2, warm=0)
    assert len(timed_on(two, Timed("all_reduce", 8), effort).samples) == 6
    assert two.started - before == 2
    found = {m.series.metric: m for m in stepping.timed_on(two, STEP, effort)}
    assert len(found["time"].samples) == len(found["exposed"].samples) == 6
    assert len(found["collectives"].samples) == 1
    compiled = stepping.timed_on(two, steps.Step("replicate", pairs=1, width=8, rows=1, compiler="eager"), effort)
    assert len(compiled[0].samples) == 6
    assert two.started - before == 4


def loses_the_last(rank: Rank) -> None:
    """From now on all_reduce of 4097 elements and more leaves the last as it was on rank 1."""
    right = dist.all_reduce

    def wrong(tensor: torch.Tensor, *args: object, **options: object) -> object:
        kept = tensor.view(-1)[-1].clone()
        work = right(tensor, *args, **options)
        if rank.index == 1 and tensor.numel() > 4096:
            tensor.view(-1)[-1] = kept
        return work

    dist.all_reduce = wrong


def idle_on_zeros(rank: Rank) -> None:
    """From now on all_reduce does nothing where its tensor holds nothing but zeros."""
    right = dist.all_reduce

    def wrong(tensor: torch.Tensor, *args: object, **options: object) -> object:
        return right(tensor, *args, **options) if tensor.view(-1)[0] else None

    dist.all_reduce = wrong


def test_wrong_values_are_no_figure(two: World) -> None:
    """A collective that loses an element fails, and the rank is named."""
    two.run(loses_the_last)
    timed_on(two, Timed("all_reduce", 1 << 10), ONCE)
    with pytest.raises(AssertionError, match=r"wrong values\nrank 1: the first call: output: 1 of 32768 elements"):
        timed_on(two, Timed("all_reduce", 1 << 17), ONCE)


def test_what_can_not_be_is_refused(two: World) -> None:
    """A time in which the message could not even be copied is refused as an artefact."""
    assert not timed_on(two, Timed("all_reduce", 32 << 20), LITTLE).refused
    two.run(idle_on_zeros)
    found = timed_on(two, Timed("all_reduce", 32 << 20), LITTLE)
    assert "is less than a copy of what comes from other ranks" in found.refused


def test_a_copy_is_the_limit() -> None:
    """As fast as a copy is possible, faster is not."""
    series = Timed("all_reduce", 8).series(_World())  # type: ignore[arg-type]
    assert not impossible(Measurement(series=series, samples=[[[1.0]]]), 1.0)
    assert impossible(Measurement(series=series, samples=[[[0.9]]]), 1.0)


class _World:
    size = 2
    spec = WorldSpec(2)


def test_members_alone_take_part(two: World) -> None:
    """A rank outside of the group has nothing to say."""
    found = two.run(on_rank, Timed("all_reduce", 8, group=(0,)), ONCE)
    assert isinstance(found[0], Found)
    assert found[1] is None


def in_turns(rank: Rank) -> tuple[list[str], dict[str, Timing]]:
    order: list[str] = []
    calls = {name: (lambda name=name: order.append(name)) for name in "ab"}
    found = measure(rank, calls, [0, 1], Effort(rounds=2, seconds=0, least=1, most=1, warm=0))
    return order, found


def test_calls_are_timed_in_turns(two: World) -> None:
    """A round of each, then the next round of each, so that a slow minute is nobody's alone."""
    order, found = two.run(in_turns)[1]
    assert "".join(order).endswith("aabbaabb")
    assert [len(found[name].rounds) for name in "ab"] == [2, 2]


def seen(rank: Rank) -> tuple[list[messages.Message], int]:
    mark, before = messages.mark(), messages.launched()
    dist.all_reduce(torch.zeros(3, 5, dtype=torch.float64))
    dist.broadcast(torch.zeros(7, dtype=torch.int8), 0)
    return messages.since(mark), messages.launched() - before


def test_messages_are_seen(two: World) -> None:
    """Which collectives were launched since, of what, on whom; and as many by the groups' own count."""
    for found, launched in two.run(seen):
        assert [(m.op, m.shape, m.bytes, m.members) for m in found] == [
            ("all_reduce", (3, 5), 120, (0, 1)),
            ("broadcast", (7,), 7, (0, 1)),
        ]
        assert launched == 2


STEP = steps.Step("replicate", pairs=2, width=32, rows=2)


def by_metric(world: World, step: steps.Step) -> dict[str, Measurement]:
    return {m.series.metric: m for m in stepping.timed_on(world, step, LITTLE)}


@pytest.mark.parametrize("bad", [{"stack": "none"}, {"pairs": 0}, {"micro_batches": 0}])
def test_what_is_no_step(bad: dict[str, object]) -> None:
    """It is refused before any rank starts."""
    with pytest.raises(ValueError, match="no stack|whole numbers"):
        steps.Step(**{"stack": "replicate", **bad})  # type: ignore[arg-type]


def test_a_step_and_what_it_is_made_of(two: World) -> None:
    """The whole, compute and communication, what is exposed; one bucket of all parameters is launched once."""
    found = by_metric(two, STEP)
    assert list(found) == ["time", "compute", "communication", "exposed", "collectives", "bytes"]
    assert found["collectives"].value == 1
    assert found["bytes"].value == 2 * 2 * (32 * 32 + 32) * 4
    whole, compute, exposed = (found[name].rounds() for name in ("time", "compute", "exposed"))
    assert exposed == [max(0.0, a - b) for a, b in zip(whole, compute, strict=True)]


def test_accumulation_saves_collectives(two: World) -> None:
    """Four micro-batches averaged each launch four times as many as the last alone."""
    counts = [
        by_metric(two, steps.Step("replicate", pairs=2, width=32, rows=2, micro_batches=4, synced=synced))
        for synced in (True, False)
    ]
    assert [c["collectives"].value for c in counts] == [4, 1]


def twice(rank: Rank) -> None:
    """From now on DDP's gradients are twice what they should be."""
    from torch.nn.parallel import DistributedDataParallel

    right = DistributedDataParallel.__init__

    def init(self: DistributedDataParallel, *args: object, **options: object) -> None:
        right(self, *args, **options)  # type: ignore[arg-type]
        for parameter in self.module.parameters():
            parameter.register_hook(lambda gradient: 2 * gradient)

    DistributedDataParallel.__init__ = init  # type: ignore[method-assign, assignment]


def own(state: Any, bucket: Any) -> Any:
    """Leave a rank's gradients as they are."""
    found: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    found.set_result(bucket.buffer())
    return found


def never(rank: Rank) -> None:
    """From now on DDP does not average gradients."""
    from torch.nn.parallel import DistributedDataParallel

    right = DistributedDataParallel.__init__

    def init(self: DistributedDataParallel, *args: object, **options: object) -> None:
        right(self, *args, **options)  # type: ignore[arg-type]
        own.__annotations__ = {}  # DDP does not read those that are text
        self.register_comm_hook(None, own)

    DistributedDataParallel.__init__ = init  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize("wrong", [twice, never])
def test_wrong_gradients_are_no_figure(two: World, wrong: Callable[[Rank], None]) -> None:
    """A step that trains wrongly fails, however fast: gradients are doubled, or those of a rank's own rows alone."""
    two.run(wrong)
    with pytest.raises(AssertionError, match="gives wrong gradients"):
        stepping.timed_on(two, STEP, ONCE)


@pytest.mark.parametrize("stack", steps.STACKS)
def test_gradients_are_checked_after_steps(two: World, stack: str) -> None:
    """A model that was trained is compared with one of the same parameters, and a wrong parameter is seen."""
    step = steps.Step(stack, pairs=2, width=32, rows=2)
    assert two.run(trained, step) == [("", True)] * 2


def trained(rank: Rank, step: steps.Step) -> tuple[str, bool]:
    found = stepping.Prepared(rank, step)
    found.call()
    found.check("later")
    right = found.problem
    found.module.register_forward_hook(lambda module, given, output: 2 * output)
    found.check("at the end")
    return right, found.problem.startswith("at the end: the gradient of ")
