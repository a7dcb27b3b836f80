"""Buffers under DistributedDataParallel: ranks compute with those of rank 0."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import update_bn

from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks import replicate
from harness.stacks.replicate import HookLocation
from harness.stacks.training import launched, since

SOURCE = "torch.nn.parallel.DistributedDataParallel: forward_sync_buffers"


class Counting(nn.Module):
    """A model with three buffers that every training forward changes, on each rank by a different amount.

    ``rebound``: assign new tensors instead of changing the buffers in place.
    """

    level: torch.Tensor
    count: torch.Tensor
    flags: torch.Tensor

    def __init__(self, rank: int, *, rebound: bool) -> None:
        super().__init__()
        self.rank, self.rebound = rank, rebound
        self.layer = nn.Linear(1, 1, bias=False)
        self.register_buffer("level", torch.zeros(2))
        self.register_buffer("count", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("flags", torch.zeros(2, dtype=torch.bool))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute with the current buffers, then change them in training mode."""
        seen = self.level.sum() + self.count.sum() + self.flags.sum()
        result: torch.Tensor = self.layer(x) * 0 + seen
        if not self.training:
            return result
        if self.rebound:
            self.level, self.count = self.level + self.rank + 1, self.count + self.rank + 1
            self.flags = torch.full_like(self.flags, self.rank > 0)
        else:
            self.level += self.rank + 1
            self.count += self.rank + 1
            self.flags.fill_(self.rank > 0)
        return result


def seen(rank: Rank, model: nn.Module, calls: Sequence[str]) -> list[float]:
    """Run forwards of several kinds one after another and return their outputs."""
    outputs = []
    for call in calls:
        model.train(call != "evaluation")
        model.require_backward_grad_sync = call != "unsynced"  # type: ignore[assignment]
        with torch.set_grad_enabled(call != "evaluation"):
            outputs.append(float(model(torch.ones(1, 1, device=rank.device))))
    return outputs


@requirement(
    "DDP-BUF-02",
    "Before every forward, ranks receive the current buffers of rank 0.",
    source=SOURCE,
)
@pytest.mark.parametrize("rebound", [False, True], ids=["in-place", "rebound"])
@pytest.mark.world(2, 3)
def test_sent_before_every_forward(world: World, rebound: bool) -> None:
    """Training and evaluation alternate; each rank changes its buffers by a different amount."""
    calls = ["training", "training", "evaluation", "training", "evaluation"]
    right = [0.0, 4.0, 8.0, 8.0, 12.0]  # rank 0 adds one to each of four numbers, and its flags stay off

    def body(rank: Rank) -> list[float]:
        return seen(rank, DistributedDataParallel(Counting(rank.index, rebound=rebound).to(rank.device)), calls)

    assert_on_ranks([right] * world.size, world.run(body))


@requirement(
    "DDP-BUF-03",
    "Forwards without synchronization suspend the broadcast of buffers, which later forwards resume.",
    source="torch.nn.parallel.DistributedDataParallel: no_sync, require_forward_param_sync",
)
@pytest.mark.world(2)
def test_sent_again_after_accumulation(world: World) -> None:
    """Run two forwards without synchronization between others."""
    calls = ["training", "unsynced", "unsynced", "training", "training", "training"]

    def body(rank: Rank) -> list[float]:
        return seen(rank, DistributedDataParallel(Counting(rank.index, rebound=False).to(rank.device)), calls)

    first, second = world.run(body)
    assert first == [4.0 * i for i in range(len(calls))]
    assert second[:2] == first[:2]
    assert second[2] == 14.0  # from four numbers of one, which came before, rank 1 has added two to each, and has flags
    assert second[4:] == first[4:]


@requirement(
    "DDP-BUF-04",
    "With forward_sync_buffers=False, or else broadcast_buffers=False, ranks keep their own buffers, also in a join.",
    source=SOURCE,
)
@pytest.mark.world(2)
def test_not_sent_where_not_asked(world: World) -> None:
    """In three forwards, each rank continues from its own values."""

    def body(rank: Rank) -> list[float]:
        model = Counting(rank.index, rebound=False).to(rank.device)
        return seen(rank, DistributedDataParallel(model, broadcast_buffers=False), ["training"] * 3)

    assert_on_ranks([[0.0, 4.0, 8.0], [0.0, 10.0, 18.0]], world.run(body))


@requirement(
    "DDP-BUF-4857",
    "Setting broadcast_buffers or forward_sync_buffers of a DDP module decides whether later forwards send buffers.",
    source="torch/nn/parallel/distributed.py: DistributedDataParallel.broadcast_buffers, forward_sync_buffers",
)
@pytest.mark.usefixtures("with_buckets")
@pytest.mark.parametrize(
    "name",
    [
        "broadcast_buffers",
        pytest.param(
            "forward_sync_buffers",
            marks=pytest.mark.needs(torch="torch.nn.parallel.DistributedDataParallel(forward_sync_buffers)"),
        ),
    ],
)
@pytest.mark.world(2)
def test_set_later(world: World, name: str) -> None:
    """Turn the broadcast off before a forward and on again, twice; each rank adds r + 1 to four numbers."""

    def body(rank: Rank) -> list[float]:
        model: Any = DistributedDataParallel(Counting(rank.index, rebound=False).to(rank.device))
        outputs = []
        for value in (True, False, False, True, False):
            setattr(model, name, value)
            assert model.broadcast_buffers is value
            outputs += seen(rank, model, ["training"])
        return outputs

    assert_on_ranks([[0.0, 4.0, 8.0, 12.0, 16.0], [0.0, 10.0, 18.0, 12.0, 22.0]], world.run(body))


@requirement(
    "DDP-BUF-06",
    "With init_sync=False, buffers are still broadcast before the first forward.",
    source="torch.nn.parallel.DistributedDataParallel: init_sync",
)
@pytest.mark.world(2)
def test_sent_without_init_sync(world: World) -> None:
    """Buffers start with different values on each rank; run one forward."""

    def body(rank: Rank) -> list[float]:
        model = Counting(rank.index, rebound=False).to(rank.device)
        model.level += 1.0 + rank.index
        return seen(rank, DistributedDataParallel(model, init_sync=False), ["training"])

    assert_on_ranks([[2.0]] * 2, world.run(body))


@requirement(
    "DDP-BUF-05",
    "In a subgroup, buffers come from the first rank of the group.",
    source=SOURCE,
)
@pytest.mark.world(4)
def test_sent_within_the_group(world: World) -> None:
    """Use two groups of two ranks, one of them without rank 0."""

    def body(rank: Rank) -> list[float]:
        groups = [rank.subgroup([0, 1]), rank.subgroup([2, 3])]
        mine = next(group for group in groups if group is not None)
        model = Counting(rank.index, rebound=False).to(rank.device)
        outputs = seen(rank, DistributedDataParallel(model, process_group=mine), ["training"] * 3)
        dist.destroy_process_group(mine)
        return outputs

    assert_on_ranks([[0.0, 4.0, 8.0]] * 2 + [[0.0, 14.0, 26.0]] * 2, world.run(body))


class Scaled(nn.Module):
    """A parameter times its input and the number in a buffer, which the backward needs; a child and dtypes vary."""

    scale: torch.Tensor

    def __init__(self, more: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("scale", torch.full((2,), 4.0))
        self.register_buffer("number", torch.tensor(1))
        self.child = nn.Module()
        for i in range(more):
            self.child.register_buffer(f"float {i}", torch.zeros(2, i), persistent=i % 2 == 0)
            self.register_buffer(f"number {i}", torch.zeros(i, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * self.scale * x).sum()


@requirement(
    "DDP-BUF-11",
    "The broadcast of buffers before a forward leaves the graphs of earlier forwards usable.",
    source=f"{SOURCE}; torch/nn/parallel/distributed.py: _sync_buffers",
)
@pytest.mark.world(2)
def test_graphs_of_earlier_forwards(world: World) -> None:
    """Between a forward and its backward run others: one or two in training, one in evaluation or without gradients."""

    def body(rank: Rank) -> None:
        x = torch.tensor(1.0 + 2 * rank.index, device=rank.device)
        for kind in ("training", "evaluation", "no_grad", "inference", "two"):
            model: Any = DistributedDataParallel(Scaled().to(rank.device))
            for step in range(2):
                losses = [model(x)]
                model.train(kind != "evaluation")
                if kind in ("no_grad", "inference"):
                    with torch.no_grad() if kind == "no_grad" else torch.inference_mode():
                        model(x)
                else:
                    losses += [model(3 * x) for _ in range(2 if kind == "two" else 1)]
                model.train()
                sum(losses).backward()
                right = 8.0 * (1 + 3 * (len(losses) - 1))
                assert model.module.weight.grad.tolist() == [right] * 2, (kind, step)
                assert model.module.scale.tolist() == [4.0] * 2, (kind, step)
                model.zero_grad()

    world.run(body)


@requirement(
    "DDP-BUF-12",
    "A forward or the constructor broadcasts many buffers with as many collectives as one of each dtype.",
    source="torch/nn/parallel/distributed.py: broadcast_bucket_size",
)
@pytest.mark.usefixtures("with_buckets")
@pytest.mark.world(2)
def test_buffers_together(world: World) -> None:
    """Compare a model of two buffers with one of many, of two dtypes, in training and evaluation."""

    def body(rank: Rank) -> None:
        def issued(more: int) -> list[dict[tuple[int, ...], int]]:
            module = Scaled(more).to(rank.device)
            x, counts, before = torch.ones((), device=rank.device), [], launched()
            model = DistributedDataParallel(module)
            counts.append(since(before))
            for training in (True, True, False):
                model.train(training)
                before = launched()
                loss = model(x)
                counts.append(since(before))
                loss.backward()
            return counts

        assert issued(9) == issued(0)

    world.run(body)


@requirement(
    "DDP-BUF-04",
    "With forward_sync_buffers=False, or else broadcast_buffers=False, ranks keep their own buffers, also in a join.",
    source=SOURCE,
)
@pytest.mark.filterwarnings("ignore:.*broadcast_buffers")
@pytest.mark.usefixtures("with_buckets")
@pytest.mark.needs(torch="torch.nn.parallel.DistributedDataParallel(forward_sync_buffers)")
@pytest.mark.world(2)
def test_not_synchronized(world: World) -> None:
    """Each option alone, and both with the same or other values; two steps, and a join of one and two."""

    def body(rank: Rank) -> None:
        for forward in (None, True, False):
            for older in (None, True, False):
                options = {"forward_sync_buffers": forward, "broadcast_buffers": older}
                module = Counting(rank.index, rebound=False).to(rank.device)
                module.level += 10.0 * rank.index
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    model: Any = DistributedDataParallel(module, **options)
                told = [
                    w for w in caught if issubclass(w.category, FutureWarning) and "broadcast_buffers" in str(w.message)
                ]
                assert len(told) == (older is not None), options
                first = forward is not None or older is not False  # whether the constructor sends buffers
                synced = forward if forward is not None else older is not False
                level = 10.0 * rank.index * (not first)
                assert module.level.tolist() == [level] * 2, options
                for step in range(2):
                    model(torch.ones(1, 1, device=rank.device)).sum().backward()
                    if synced and step:  # that of rank 0, which this step changed
                        level = 1.0
                    level += rank.index + 1
                    assert module.level.tolist() == [level] * 2, (options, step)
                with model.join():
                    for _ in range(1 + rank.index):
                        model(torch.ones(1, 1, device=rank.device)).sum().backward()
                levels: list[Any] = [None, None]
                dist.all_gather_object(levels, module.level.tolist())
                assert (levels[0] == levels[1]) == bool(synced), options
                if not synced:
                    assert module.level.tolist() == [level + (1 + rank.index) ** 2] * 2, options

    world.run(body)


@requirement(
    "DDP-BUF-3500",
    "update_bn fills the running statistics that a replicated module has, so that DDP broadcasts them from then on.",
    source=f"{SOURCE}; torch.optim.swa_utils.update_bn",
)
@pytest.mark.world(2)
def test_updated_statistics(world: World) -> None:
    """Update norms of every kind twice with other data on each rank, and train; ranks then have those of rank 0."""

    def body(rank: Rank) -> None:
        norms = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2, affine=False), nn.BatchNorm1d(2, momentum=None))
        model: Any = DistributedDataParallel(norms.to(rank.device))
        before = dict(model.named_buffers())
        for number in range(2):
            x = torch.tensor([[1.0, 2.0], [3.0, 8.0]], device=rank.device) + 4 * rank.index + number
            update_bn([x], model)
            after = dict(model.named_buffers())
            assert after.keys() == before.keys()
            assert all(after[name] is before[name] for name in before), number
            assert torch.equal(norms[0].running_mean, x.mean(0)), number
            assert int(norms[0].num_batches_tracked) == 1, number
            for _ in range(2):  # the first forward after one without gradients broadcasts nothing
                model(torch.zeros(2, 2, device=rank.device)).sum().backward()
            ours = [buffer.clone() for buffer in model.buffers()]
            for buffer in model.buffers():
                dist.broadcast(buffer, 0)
            assert all(map(torch.equal, ours, model.buffers())), number

    world.run(body)


PARTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "all": lambda base: base,
    "transposed": lambda base: base.t(),
    "permuted": lambda base: base.view(2, 2, 6).permute(2, 0, 1),
    "rows": lambda base: base[::2],
    "columns": lambda base: base[:, 1:3],
    "column": lambda base: base[:, 1],
    "diagonal": lambda base: base.diagonal(),
    "later": lambda base: base.flatten()[3:9],
    "number": lambda base: base[1, 2],
    "nothing": lambda base: base[:0],
    "channels last": lambda base: base.view(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
}
"""Buffers that lie in the memory of a matrix of four rows and six columns, or have another order of elements."""
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.uint8, torch.int32, torch.int64, torch.bool]
DTYPES += [torch.float16, torch.int8, torch.complex64]
WHEN = {"made": 0, "training": 0, "evaluation": 0, "joined": 1}
"""When buffers are sent, and the rank whose buffers they are."""


def valued(like: torch.Tensor, rank: int) -> torch.Tensor:
    """Return values that no two neighbors have, nor two ranks for one element."""
    numbers = torch.arange(like.numel(), device=like.device).view(like.shape) + rank
    return (numbers % 2 if like.dtype == torch.bool else numbers).to(like.dtype)


class Laid(nn.Module):
    """A parameter, and buffers of every dtype as parts of other tensors, each of which a rank has filled."""

    def __init__(self, rank: Rank) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, device=rank.device))
        self.bases = {}
        for part, dtype in itertools.product(PARTS, DTYPES):
            name = f"{part} of {dtype}".replace(".", " ")
            self.bases[name] = torch.full((4, 6), 7, dtype=dtype, device=rank.device)
            self.register_buffer(name, PARTS[part](self.bases[name]))

    def fill(self, rank: int) -> None:
        for buffer in self.buffers():
            buffer.copy_(valued(buffer, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x


@requirement(
    "DDP-BUF-8453",
    "Buffers of any layout or dtype get the values that are broadcast, and no memory beside them changes.",
    source=SOURCE,
)
@pytest.mark.parametrize("when", WHEN)
@pytest.mark.world(2)
def test_layouts(world: World, when: str, request: pytest.FixtureRequest) -> None:
    """Ranks fill parts of tensors with other values before DDP is made, before a forward or before a join."""
    if when == "joined":
        request.getfixturevalue("with_buckets")

    def body(rank: Rank) -> list[str]:
        module, right = Laid(rank), Laid(rank)
        right.fill(WHEN[when])
        if when == "made":
            module.fill(rank.index)
        held = dict(module.named_buffers())
        model: Any = DistributedDataParallel(module)
        x = torch.ones(1, device=rank.device)
        if when != "made":
            module.fill(rank.index)
        if when == "training":
            model(x).sum().backward()
        elif when == "evaluation":
            with torch.no_grad():
                model.eval()(x)
        elif when == "joined":
            with model.join():
                for _ in range(1 + rank.index):
                    model(x).sum().backward()
        assert all(module.get_buffer(name) is buffer for name, buffer in held.items())
        return [
            name
            for name, buffer in right.named_buffers()
            if not torch.equal(held[name], buffer) or not torch.equal(module.bases[name], right.bases[name])
        ]

    assert_on_ranks([[]] * 2, world.run(body))


Register = Callable[[Any, torch.Tensor, bool], None]


def again(module: Any, tensor: torch.Tensor, persistent: bool) -> None:
    """Register a buffer, and then once more with the other persistence."""
    module.register_buffer("again", tensor.clone(), persistent=not persistent)
    module.register_buffer("again", tensor, persistent=persistent)


def shared(module: Any, tensor: torch.Tensor, persistent: bool) -> None:
    """Register one tensor in two modules, of which the second keeps it in the other way."""
    module.child.register_buffer("shared", tensor, persistent=persistent)
    module.several[0].register_buffer("other", tensor, persistent=not persistent)


PLACES: dict[str, Register] = {
    "own": lambda module, tensor, kept: module.register_buffer("own", tensor, persistent=kept),
    "of class Buffer": lambda module, tensor, kept: setattr(module, "set", nn.Buffer(tensor, persistent=kept)),
    "of a child": lambda module, tensor, kept: module.child.register_buffer("own", tensor, persistent=kept),
    "deeper": lambda module, tensor, kept: module.child.inner.register_buffer("own", tensor, persistent=kept),
    "in a list": lambda module, tensor, kept: module.several[1].register_buffer("own", tensor, persistent=kept),
    "again": again,
    "shared": shared,
    "later": lambda module, tensor, kept: module.child.register_buffer("later", tensor, persistent=kept),
}
"""Where a module has buffers."""


class Placed(nn.Module):
    """A parameter, and modules for buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.child, self.several = nn.Module(), nn.ModuleList(nn.Module() for _ in range(2))
        self.child.inner = nn.Module()
        self.register_buffer("none", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply float[1] by the parameter."""
        return self.weight * x


def from_rank_0(_: Any, buffers: dict[str, torch.Tensor]) -> None:
    """Broadcast the buffers in a hook."""
    for buffer in buffers.values():
        dist.broadcast(buffer, 0)


@requirement(
    "DDP-BUF-9090",
    "Each synchronization of buffers covers those of every part of a module, persistent or not.",
    source=f"{SOURCE}; torch.nn.Module.register_buffer: persistent",
)
@pytest.mark.parametrize("when", [*WHEN, "before", "after"])
@pytest.mark.parametrize("persistent", [True, False], ids=["persistent", "transient"])
@pytest.mark.world(2)
def test_all_buffers(world: World, persistent: bool, when: str, request: pytest.FixtureRequest) -> None:
    """Ranks fill buffers in every place with other values, before DDP is made, before each forward or in a join."""
    if when == "joined":
        request.getfixturevalue("with_buckets")

    def body(rank: Rank) -> None:
        module = Placed().to(rank.device)
        buffers = {place: torch.zeros(2, device=rank.device) for place in PLACES}

        def add(place: str) -> None:
            PLACES[place](module, buffers[place], persistent)

        def fill(number: int) -> None:
            for i, buffer in enumerate(buffers.values()):
                buffer.copy_(torch.tensor([10.0 * number + rank.index, i]))

        def check(number: int, source: int) -> None:
            found = {place: buffer.tolist() for place, buffer in buffers.items()}
            assert found == {place: [10.0 * number + source, i] for i, place in enumerate(buffers)}, number

        later = buffers.pop("later")
        for place in buffers:
            add(place)
        fill(0)
        model: Any = DistributedDataParallel(module)
        check(0, 0)
        x = torch.ones(1, device=rank.device)
        if when in ("before", "after"):
            where = HookLocation.PRE_FORWARD if when == "before" else HookLocation.POST_FORWARD
            replicate.register_buffer_hook(model, None, from_rank_0, where)
        if when != "made":
            buffers["later"] = later
            add("later")
        if when in ("training", "before", "after"):
            for number in range(1, 4):
                fill(number)
                model(x).sum().backward()
                check(number, 0)
        elif when == "evaluation":
            with torch.no_grad():
                fill(1)
                model.eval()(x)
                check(1, 0)
        elif when == "joined":
            with model.join():
                for number in range(1, 3 + rank.index):
                    fill(number)
                    model(x).sum().backward()
                    check(number, 1)  # the last of the ranks that still have a batch
            check(3, 1)
        saved = {name.removeprefix("module.") for name in model.state_dict()}
        for name, _ in module.named_buffers(remove_duplicate=False):
            assert (name in saved) == (persistent != (name == "several.0.other")), name

    world.run(body)
