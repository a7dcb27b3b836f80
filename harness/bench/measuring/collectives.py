"""Benchmarks of collectives: one case on every rank, whose values are checked before and after the timing.

Values come from the exact model (:mod:`harness.oracles.collectives`): a tile of it, repeated to the message size.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from harness.bench import figures
from harness.bench.figures import HSDP
from harness.bench.measuring.timing import Effort, Timing, copying, measure, visits
from harness.bench.records import Measurement, Series, pairs
from harness.oracles import collectives as model
from harness.oracles.collectives import IN_PLACE, REDUCING, Case
from harness.oracles.exact import difference
from harness.stacks.collectives import functional, issue_in, reduction
from harness.worlds.rank import Rank
from harness.worlds.world import World, node_of

_TILE = 4096
"""Maximum number of elements of the exact model; a larger message repeats them."""

MODES = ("sync", "async")
PLACES = ("in", "out")
HAVE_OUT_OF_PLACE = ("all_reduce",)
"""In-place collectives that also have an out-of-place form: the functional one, which returns a new tensor."""
HAVE_IN_PLACE = ("all_gather_into_tensor", "reduce_scatter_tensor")
"""Collectives with two tensors, one of which may be a part of the other."""
TWO_LEVELS = "reduce_scatter_tensor"
"""The collective of which there is a form on two levels."""


def shards_of(ranks: int, hosts: int = 1) -> int:
    """Return over how many neighbors HSDP shards: the ranks of a host, or else half of all, if that is whole.

    Otherwise it is the largest number below half that divides the ranks.
    """
    if hosts > 1 and ranks % hosts == 0:
        return ranks // hosts
    return next((count for count in range(ranks // 2, 0, -1) if ranks % count == 0), 1)


@dataclass(frozen=True)
class Timed:
    """A collective of one size, and how it is called."""

    collective: str
    bytes: int
    """Message size as nccl-tests counts it; rounded down to whole elements for every rank."""
    dtype: torch.dtype = torch.float32
    op: str = "SUM"
    mode: str = "sync"
    place: str = ""
    """``in`` or ``out``; empty: the collective's own form, in place or not."""
    in_flight: int = 1
    """Number of calls that are launched before the first is waited for; the time is that of one call."""
    group: tuple[int, ...] | None = None
    """Global ranks; None for all."""
    shards: int = 0
    """If not 0: a reduce_scatter among so many neighbors, then an all_reduce of its result among all who hold the same
    shard, as in HSDP."""
    payload: str = ""
    """Whose message it is, for people: a bucket of a model."""

    def __post_init__(self) -> None:
        own = "in" if self.collective in IN_PLACE else "out"
        other = {"in": HAVE_OUT_OF_PLACE, "out": HAVE_IN_PLACE}[own]
        if self.mode not in MODES or self.in_flight < 1 or (self.in_flight > 1 and self.mode == "sync"):
            raise ValueError(f"{self}: sync, or async with so many in flight")
        if self.place not in ("", own) and (self.place not in PLACES or self.collective not in other):
            raise ValueError(f"{self.collective} has no form that is {self.place!r} of place")
        if self.shards and (self.collective, self.mode, self.place, self.group) != (TWO_LEVELS, "sync", "", None):
            raise ValueError(f"two levels: {TWO_LEVELS} of the whole world, and no other form of it")
        if self.mode == "async" and self.functional:
            raise ValueError(f"{self.collective} out of place is waited for by itself")

    @property
    def functional(self) -> bool:
        """Whether the functional form is called."""
        return self.place == "out" and self.collective in IN_PLACE

    def case(self, size: int) -> Case:
        """Return the exact model's case for a group of ``size`` ranks.  Errors: ValueError if a rank has no element."""
        count = self.bytes // self.dtype.itemsize // figures.pieces(self.collective, size)
        if count < 1:
            raise ValueError(f"{self.bytes} bytes of {self.dtype} have no element for each of {size} ranks")
        op = self.op if self.collective in REDUCING else "SUM"
        return Case(self.collective, op, self.dtype, (count,), group=self.group, form="async")

    def message(self, size: int) -> int:
        """Return the actual message size in bytes for a group of ``size`` ranks."""
        return math.prod(self.case(size).shape) * self.dtype.itemsize * figures.pieces(self.collective, size)

    def series(self, world: World) -> Series:
        """Return the series of this collective in a world."""
        size = len(self.group) if self.group is not None else world.size
        variant = {
            "group": f"ranks {', '.join(map(str, self.group))} of {world.size}" if self.group is not None else "",
            "hosts": hosts_of(world, self.group),
            "in flight": str(self.in_flight) if self.in_flight > 1 else "",
            "mode": self.mode if self.mode != "sync" else "",
            "payload": self.payload,
            "place": self.place,
            "replicas": f"{world.size // self.shards} of {self.shards} shards" if self.shards else "",
        }
        return Series(
            operation=HSDP if self.shards else self.collective,
            bytes=self.message(size),
            dtype=str(self.dtype).removeprefix("torch."),
            op=self.op.lower() if self.collective in REDUCING else "",
            world=size,
            backend=world.spec.backend,
            device=world.spec.device,
            variant=pairs(variant),
        )


def hosts_of(world: World, members: Sequence[int] | None = None) -> str:
    """Return on how many hosts of a world some ranks are, or all: ``1 of 2``; empty if the world has one host."""
    size, hosts = world.size, world.spec.hosts
    if hosts == 1:
        return ""
    return f"{len({node_of(rank, size, hosts) for rank in members or range(size)})} of {hosts}"


@dataclass
class Found:
    """The result of a timed collective on one rank."""

    timing: Timing
    copy: float
    """Seconds in which the device copies as many bytes as must have come from other ranks."""
    problem: str
    """What is wrong with the values; empty: nothing."""


class Prepared:
    """A timed collective on this rank, ready to be called.  Values are checked now, and by :meth:`check`."""

    def __init__(self, rank: Rank, timed: Timed) -> None:
        self.timed = timed
        self.in_flight = timed.in_flight
        self._group = dist.new_group(list(timed.group)) if timed.group is not None else None
        self.members = list(timed.group) if timed.group is not None else list(range(rank.size))
        self.takes_part = rank.index in self.members
        self.problem = ""
        """What is wrong with the values; empty: nothing."""
        self.call: Callable[[], Any] = lambda: None
        """The call that is timed: one collective, or all that are in flight together."""
        self._sets: list[_Set | _TwoLevels] = []
        if timed.shards:
            self._sets = [_TwoLevels(rank, timed)]
            self.call = self._sets[0].call
            self.check("the first call")
        elif self.takes_part:
            case = timed.case(len(self.members))
            sets = [_Set(rank, case, self.members, timed, self._group) for _ in range(timed.in_flight)]
            self._sets = [*sets]
            self.call = _batch(sets) if timed.mode == "async" else sets[0].call
            self.check("the first call")

    def check(self, when: str) -> None:
        """Call once with the exact model's values, and add to ``problem`` how the outputs differ."""
        self.problem = "; ".join(filter(None, (self.problem, _checked(self.call, self._sets, when))))
        for one in self._sets:
            one.quiet()

    def copy(self) -> float:
        """Return the seconds in which the device copies as many bytes as must have come from other ranks."""
        like, size = self._sets[0], len(self.members)
        received = self.timed.message(size) * (size - 1) // size
        received = like.received if isinstance(like, _TwoLevels) else received
        return copying(like.ins[0] if like.ins else like.outs[0], received)

    def close(self) -> None:
        """Destroy the group that was made for it."""
        if self.takes_part and self._group is not None:
            dist.destroy_process_group(self._group)
        for one in self._sets:
            if isinstance(one, _TwoLevels):
                one.close()


def on_rank(rank: Rank, timed: Timed, effort: Effort) -> Found | None:
    """Time a collective on this rank.  Returns None if the rank is not in the group."""
    prepared = Prepared(rank, timed)
    if not prepared.takes_part:
        return None
    timing = measure(rank, {"": prepared.call}, prepared.members, effort)[""]
    timing.rounds = [[seconds / timed.in_flight for seconds in iterations] for iterations in timing.rounds]
    prepared.check("a call after the last that was timed")
    copy = prepared.copy()
    prepared.close()
    return Found(timing, copy, prepared.problem)


def timed_on(world: World, timed: Timed, effort: Effort) -> Measurement:
    """Time a collective on the ranks of a world.

    Errors: AssertionError if values are wrong on a rank; :class:`~harness.RanksFailed` if ranks fail.
    """
    __tracebackhide__ = True
    measurement = Measurement(series=timed.series(world), samples=[], started=time.time())
    copies = []
    for answers in visits(world, effort, lambda: world.run(on_rank, timed, effort)):
        results: list[Found] = [answer for answer in answers if answer is not None]
        wrong = [f"rank {i}: {answer.problem}" for i, answer in enumerate(answers) if answer and answer.problem]
        if wrong:
            raise AssertionError(f"{timed.collective} of {timed.bytes} bytes gives wrong values\n" + "\n".join(wrong))
        measurement.samples += merged([answer.timing.rounds for answer in results])
        measurement.first = measurement.first or max(answer.timing.first for answer in results)
        measurement.clock = results[0].timing.clock
        copies += [answer.copy for answer in results]
    measurement.refused = impossible(measurement, min(copies))
    return measurement


def merged(ranks: list[list[list[float]]]) -> list[list[list[float]]]:
    """Transpose ``[rank][round][iteration]`` to ``[round][iteration][rank]``."""
    return [[list(times) for times in zip(*rounds, strict=True)] for rounds in zip(*ranks, strict=True)]


def impossible(measurement: Measurement, copy: float) -> str:
    """Return why the figure is impossible; empty if it is possible.

    It is impossible if it is below ``copy``, the seconds for a copy of the bytes that must have come from other ranks.
    """
    if measurement.value >= copy:
        return ""
    size = measurement.series.bytes
    return (
        f"{measurement.value * 1e6:.3g} us for {size} bytes is less than a copy of what comes from other ranks "
        f"({copy * 1e6:.3g} us): not the time in which it was done"
    )


class _Set:
    """The tensors of one call, and the values that they must hold afterwards."""

    def __init__(self, rank: Rank, case: Case, members: list[int], timed: Timed, group: Any) -> None:
        size, member = len(members), members.index(rank.index)
        count = case.shape[0]
        times = next(t for t in range(-(-count // _TILE), count + 1) if count % t == 0)
        tile = replace(case, shape=(count // times,))
        spread = _spread(times, count // times)
        self._given = [spread(tensor).to(rank.device) for tensor in model.inputs(tile, size, member, 0)]
        self._right = [spread(tensor) for tensor in model.outputs(tile, size, member, 0)]
        self.ins = [tensor.clone() for tensor in self._given]
        in_place = case.collective in IN_PLACE
        self.outs = (
            (self.ins if self._right else [])
            if in_place
            else [torch.empty_like(right, device=rank.device) for right in self._right]
        )
        if timed.place == "in" and not in_place:
            self._overlay(case.collective, member, count)
        self._own = timed.functional
        self._reducing = case.collective in REDUCING and in_place
        if timed.functional:
            everyone = group if group is not None else dist.group.WORLD
            self.call: Callable[[], Any] = lambda: self._functional(everyone, case.op)
        else:
            options: dict[str, Any] = {"group": group}
            if case.collective in REDUCING:
                options["op"] = reduction(case.op)
            self.call = issue_in(case, self.ins, self.outs, options, members)
            self.launch = issue_in(case, self.ins, self.outs, {**options, "async_op": True}, members)

    def _functional(self, group: Any, op: str) -> None:
        self.outs = [functional.wait_tensor(functional.all_reduce(self.ins[0], op.lower(), group))]  # type: ignore[no-untyped-call]

    def _overlay(self, collective: str, member: int, count: int) -> None:
        """Make the input a part of the output, or the output a part of the input."""
        mine = slice(member * count, (member + 1) * count)
        if collective == "all_gather_into_tensor":
            self.ins = [self.outs[0].view(-1)[mine].view(self.ins[0].shape)]
        else:
            self.outs = [self.ins[0].view(-1)[mine].view(self.outs[0].shape)]

    def fill(self) -> None:
        """Fill the inputs with the exact model's values, and separate outputs with zeros."""
        for out in self.outs:
            out.zero_()
        for tensor, given in zip(self.ins, self._given, strict=True):
            tensor.copy_(given)

    def quiet(self) -> None:
        """Zero the inputs of an in-place reduction, so that repeated calls do not change them."""
        if self._reducing and not self._own:
            for tensor in self.ins:
                tensor.zero_()

    def problem(self) -> str:
        """Return how the outputs differ from the expected values; empty if they do not."""
        pairs = zip(self._right, self.outs, strict=True)
        return "; ".join(filter(None, (difference(right, out.cpu(), "output") for right, out in pairs)))


class _TwoLevels:
    """The tensors and groups of a reduction on two levels, and the values that it must give."""

    def __init__(self, rank: Rank, timed: Timed) -> None:
        size, shards = rank.size, timed.shards
        if size % shards:
            raise ValueError(f"{size} ranks can't be replicas of {shards} shards")
        replicas = size // shards
        self._made: list[Any] = []
        inner = self._group(rank, [list(range(r * shards, (r + 1) * shards)) for r in range(replicas)])
        outer = self._group(rank, [list(range(s, size, shards)) for s in range(shards)])
        whole = timed.case(size)
        count = whole.shape[0] * size // shards
        tile = replace(Case("all_reduce", timed.op, timed.dtype), shape=(min(count, _TILE),))
        tile = replace(tile, shape=(next(t for t in range(tile.shape[0], 0, -1) if count % t == 0),))
        spread = _spread(count * shards // tile.shape[0], tile.shape[0])
        self._given = spread(model.inputs(tile, size, rank.index, 0)[0]).to(rank.device)
        mine = rank.index % shards
        self._right = spread(model.outputs(tile, size, rank.index, 0)[0])[mine * count : (mine + 1) * count]
        self.ins = [self._given.clone()]
        self.outs = [torch.empty(count, dtype=timed.dtype, device=rank.device)]
        self.received = (shards > 1) * self.outs[0].nbytes + (replicas > 1) * self.outs[0].nbytes
        op, whole_gradient, shard = reduction(timed.op), self.ins[0], self.outs[0]

        def call() -> None:  # without self: a cycle would keep the groups until the garbage collector runs
            dist.reduce_scatter_tensor(shard, whole_gradient, op, group=inner)
            dist.all_reduce(shard, op, group=outer)

        self.call: Callable[[], Any] = call

    def _group(self, rank: Rank, every: list[list[int]]) -> Any:
        """Make groups on all ranks, and return the one with this rank."""
        groups = [rank.subgroup(members) for members in every]
        mine = next(group for group in groups if group is not None)
        self._made.append(mine)
        return mine

    def fill(self) -> None:
        """Fill the input with the exact model's values, and the output with zeros."""
        self.ins[0].copy_(self._given)
        self.outs[0].zero_()

    def quiet(self) -> None:
        """Leave the input as it is: repeated calls do not change it."""

    def problem(self) -> str:
        """Return how the output differs from the expected values; empty if it does not."""
        return difference(self._right, self.outs[0].cpu(), "output")

    def close(self) -> None:
        """Destroy the groups."""
        for group in self._made:
            dist.destroy_process_group(group)


def _spread(times: int, tile: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that repeats every tile of a tensor.

    Collectives work element by element, so their results repeat as well.
    """
    return lambda tensor: tensor.reshape(-1, tile).repeat(1, times).reshape(-1)


def _batch(sets: list[_Set]) -> Callable[[], None]:
    launches = [one.launch for one in sets]

    def batch() -> None:
        for work in [launch() for launch in launches]:
            work.wait()

    return batch


def _checked(call: Callable[[], Any], sets: Sequence[_Set | _TwoLevels], when: str) -> str:
    for one in sets:
        one.fill()
    call()
    return "; ".join(f"{when}: {problem}" for one in sets if (problem := one.problem()))
