"""What a step communicates under each option of DistributedDataParallel, and what its gradients share memory with."""

from __future__ import annotations

import gc
import itertools
import math
import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from harness import Rank, World, requirement
from harness.stacks import messages, replicate

SOURCE = "torch.nn.parallel.DistributedDataParallel"
STEPS = 4
pytestmark = pytest.mark.usefixtures("with_buckets")


class Layers(nn.Module):
    """Three layers of 1 KiB each, a buffer of five numbers, and with ``unused`` a layer that no forward uses."""

    kept: torch.Tensor | None
    numbers: torch.Tensor

    def __init__(self, unused: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(4 if unused else 3))
        for layer in self.layers:
            nn.init.eye_(layer.weight)  # type: ignore[arg-type]
        self.register_buffer("numbers", torch.arange(5.0))
        self.keeps, self.kept = False, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:3]:
            x = layer(x)
        self.kept = x if self.keeps else None
        return x


@dataclass(frozen=True, kw_only=True)
class Says:
    """Options of DistributedDataParallel, and the messages of float32 that are sent with them, in KiB of gradients."""

    options: dict[str, Any]
    unused: bool = False
    """Whether the model has a layer that is not used."""
    made: list[tuple[str, int]] = field(default_factory=list)
    """What the constructor sends: operations, and numbers of elements."""
    sent: bool = True
    """Whether a forward sends the buffer."""
    first: list[int]
    """The buckets of the first step."""
    later: list[int]
    """The buckets of the last step."""
    maps: tuple[int, int] = (0, 0)
    """The number of all-reduces of integers, which say who uses what, in the first and in the last step."""


ALL, WITHOUT_BUFFERS, WITH_UNUSED = [("broadcast", 773)], [("broadcast", 768)], [("broadcast", 1029)]
SMALL = 1e-3  # MiB: a layer and a bit
TINY = 5e-4  # MiB: less than a layer
SAYS: dict[str, Says] = {
    "default": Says(options={}, made=ALL, first=[3], later=[3]),
    "none": Says(options={"bucket_cap_mb": None, "process_group": None}, made=ALL, first=[3], later=[3]),
    "small": Says(options={"bucket_cap_mb": SMALL}, made=ALL, first=[3], later=[2, 1]),
    "tiny": Says(options={"bucket_cap_mb": TINY}, made=ALL, first=[3], later=[1, 1, 1]),
    "large": Says(options={"bucket_cap_mb": 100}, made=ALL, first=[3], later=[3]),
    "find-unused": Says(
        options={"find_unused_parameters": True, "bucket_cap_mb": TINY},
        unused=True,
        made=WITH_UNUSED,
        first=[1, 1, 1, 1],
        later=[1, 1, 1, 1],
        maps=(1, 1),
    ),
    "find-none": Says(options={"find_unused_parameters": True}, made=ALL, first=[3], later=[3], maps=(1, 1)),
    "skip-unused": Says(
        options={"find_unused_parameters": True, "skip_all_reduce_unused_params": True, "bucket_cap_mb": TINY},
        unused=True,
        made=WITH_UNUSED,
        first=[1, 1, 1],
        later=[1, 1, 1],
        maps=(1, 1),
    ),
    "static": Says(
        options={"static_graph": True, "bucket_cap_mb": SMALL}, made=ALL, first=[3], later=[2, 1], maps=(1, 0)
    ),
    "static-find-unused": Says(
        options={"static_graph": True, "find_unused_parameters": True, "bucket_cap_mb": TINY},
        unused=True,
        made=WITH_UNUSED,
        first=[4],
        later=[1, 1, 1, 1],
        maps=(1, 0),
    ),
    "no-init": Says(options={"init_sync": False}, first=[3], later=[3]),
    "buffers": Says(options={"broadcast_buffers": True}, made=ALL, first=[3], later=[3]),
    "no-buffers-sent": Says(
        options={"broadcast_buffers": False}, made=WITHOUT_BUFFERS, sent=False, first=[3], later=[3]
    ),
    "views": Says(options={"gradient_as_bucket_view": True, "bucket_cap_mb": SMALL}, made=ALL, first=[3], later=[2, 1]),
    "views-static": Says(
        options={"gradient_as_bucket_view": True, "static_graph": True, "bucket_cap_mb": TINY},
        made=ALL,
        first=[3],
        later=[1, 1, 1],
        maps=(1, 0),
    ),
    "views-find-unused": Says(
        options={"gradient_as_bucket_view": True, "find_unused_parameters": True, "bucket_cap_mb": SMALL},
        unused=True,
        made=WITH_UNUSED,
        first=[2, 2],
        later=[2, 2],
        maps=(1, 1),
    ),
}
NEWER: dict[str, Says] = {
    "forward_sync_buffers": Says(options={"forward_sync_buffers": False}, made=ALL, sent=False, first=[3], later=[3]),
    "bucket_cap_mb_list": Says(options={"bucket_cap_mb_list": [TINY, SMALL]}, made=ALL, first=[2, 1], later=[1, 2]),
    "batched_grad_copy": Says(
        options={"batched_grad_copy": True, "bucket_cap_mb": SMALL}, made=ALL, first=[3], later=[2, 1]
    ),
}
"""Cases by the option that they need, which not every version of PyTorch has."""
LISTS: dict[str, Says] = {
    "list-and-size": Says(
        options={"bucket_cap_mb_list": [TINY, SMALL], "bucket_cap_mb": 100}, made=ALL, first=[2, 1], later=[1, 2]
    ),
    "falling": Says(options={"bucket_cap_mb_list": [SMALL, TINY]}, made=ALL, first=[1, 2], later=[2, 1]),
    "one": Says(options={"bucket_cap_mb_list": [TINY]}, made=ALL, first=[1, 1, 1], later=[1, 1, 1]),
    "empty": Says(options={"bucket_cap_mb_list": []}, made=ALL, first=[3], later=[3]),
    "empty-and-size": Says(
        options={"bucket_cap_mb_list": [], "bucket_cap_mb": TINY}, made=ALL, first=[3], later=[1, 1, 1]
    ),
}
"""Cases of bucket_cap_mb_list, which wins over bucket_cap_mb unless it is empty."""


def needs(option: str) -> pytest.MarkDecorator:
    return pytest.mark.needs(torch=f"{SOURCE}({option})")


def sent(since: dict[str, int]) -> list[tuple[str, str, int]]:
    """Return the messages since a mark: operations, dtypes and numbers of elements."""
    return [(m.op.split(":")[-1], m.dtype, math.prod(m.shape)) for m in messages.since(since)]


def step(rank: Rank, model: nn.Module) -> list[tuple[str, str, int]]:
    """Run a step, in which every gradient of rank r is r + 1, and return its messages."""
    before = messages.mark()
    model(torch.full((1, 16), 1.0 + rank.index, device=rank.device)).sum().backward()
    return sent(before)


def of(found: list[tuple[str, str, int]], op: str, dtype: str = "Float") -> list[int]:
    return [elements for name, kind, elements in found if name == op and kind == dtype]


def recorded(rank: Rank) -> bool:
    """Return whether the backend's collectives are recorded."""
    before = messages.mark()
    dist.all_reduce(torch.ones(1, device=rank.device))
    return bool(messages.since(before))


@requirement(
    "DDP-SENT-01",
    "A step reduces every gradient once, in buckets as large as bucket_cap_mb allows after the first step.",
    source=f"{SOURCE}: bucket_cap_mb, static_graph, find_unused_parameters, skip_all_reduce_unused_params",
)
@requirement(
    "DDP-SENT-02",
    "Ranks exchange which parameters they use with find_unused_parameters, or in the first step of a static graph.",
    source=f"{SOURCE}: find_unused_parameters, static_graph",
)
@requirement(
    "DDP-SENT-03",
    "The constructor sends parameters and buffers unless init_sync or broadcast_buffers says otherwise.",
    source=f"{SOURCE}: init_sync, broadcast_buffers, forward_sync_buffers",
)
@requirement(
    "DDP-SENT-04",
    "Without synchronization, steps reduce nothing, and forwards send no buffer after the first.",
    source=f"{SOURCE}: no_sync",
)
@pytest.mark.parametrize("option", ["", *(pytest.param(o, marks=needs(o)) for o in NEWER)])
@pytest.mark.world(2)
def test_messages(world: World, option: str) -> None:
    """Run four steps, two without synchronization and one with it, with each set of options in turn."""

    def body(rank: Rank) -> None:
        if not recorded(rank):
            return
        more = LISTS if option == "bucket_cap_mb_list" else {}
        for name, says in ({option: NEWER[option], **more} if option else SAYS).items():
            before = messages.mark()
            module = Layers(says.unused).to(rank.device)
            model: Any = DistributedDataParallel(module, **says.options)
            assert [(op, n) for op, dtype, n in sent(before) if dtype == "Float"] == says.made, name
            for number in range(STEPS):
                found = step(rank, model)
                if number in (0, STEPS - 1):
                    buckets = says.first if number == 0 else says.later
                    assert of(found, "all_reduce") == [256 * kib for kib in buckets], (name, number)
                    assert len(of(found, "all_reduce", "Int")) == says.maps[number > 0], (name, number)
                assert of(found, "broadcast") == [5] * says.sent, (name, number)
                for p in module.layers[:3].parameters():
                    assert torch.equal(p.grad, torch.full((16, 16), (rank.size + 1) / 2, device=rank.device)), name
                model.zero_grad()
            with model.no_sync():
                found = [*step(rank, model), *step(rank, model)]
            assert of(found, "all_reduce") + of(found, "all_reduce", "Int") == [], name
            assert of(found, "broadcast") == [5] * says.sent, name  # of the first alone
            found = step(rank, model)
            assert of(found, "all_reduce") == [256 * kib for kib in says.later], name
            for p in module.layers[:3].parameters():
                assert torch.equal(p.grad, torch.full((16, 16), 3 * (rank.size + 1) / 2, device=rank.device)), name
            before = messages.mark()
            with torch.no_grad():
                model(torch.ones(1, 16, device=rank.device))
            assert of(sent(before), "all_reduce") == [], name

    world.run(body)


class Wide(nn.Module):
    """Eight layers of 256 KiB each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


WIDE: dict[str, tuple[dict[str, Any], list[int]]] = {
    "default": ({}, [4, 4]),
    "1": ({"bucket_cap_mb": 1}, [4, 4]),
    "1.5": ({"bucket_cap_mb": 1.5}, [6, 2]),
    "1.25, views": ({"bucket_cap_mb": 1.25, "gradient_as_bucket_view": True}, [5, 3]),
    "1.75, static": ({"bucket_cap_mb": 1.75, "static_graph": True}, [7, 1]),
    "1.5, find": ({"bucket_cap_mb": 1.5, "find_unused_parameters": True}, [2, 6]),  # not rebuilt
    "default, find": ({"find_unused_parameters": True}, [4, 4]),
    "2": ({"bucket_cap_mb": 2}, [8]),
    "25": ({"bucket_cap_mb": 25}, [8]),
}
"""Options, and how many layers are in the buckets that are reduced one after the other in the third step."""


@requirement(
    "DDP-SENT-05",
    "With a bucket_cap_mb above 1, every bucket takes as much as it says, also the first one to be reduced.",
    source=f"{SOURCE}: bucket_cap_mb",
)
@pytest.mark.world(2)
def test_large_buckets(world: World) -> None:
    """By default the first bucket ends at 1 MiB; limits are above or below the 2 MiB of the model, or its size."""

    def body(rank: Rank) -> None:
        if not recorded(rank):
            return
        for name, (options, counts) in WIDE.items():
            made: list[Any] = [DistributedDataParallel, replicate.replicate]
            for make in made if name in ("default", "1.5") else made[:1]:
                model = make(Wide().to(rank.device), **options)
                for _ in range(3):
                    before = messages.mark()
                    model(torch.ones(1, 256, device=rank.device)).sum().backward()
                    found = of(sent(before), "all_reduce")
                assert found == [256 * 256 * count for count in counts], (name, make)

    world.run(body)


class Sizes(nn.Module):
    """Vectors, whose elements have the gradients of the input's sum, each vector those of a factor of its own."""

    def __init__(self, sizes: list[int], dtype: torch.dtype) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(torch.ones(size, dtype=dtype) for size in sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map a number to a number, with the first vectors used last."""
        parts = [vector.sum() * (i + 1) for i, vector in reversed(list(enumerate(self.vectors)))]
        return torch.stack(parts).sum() * x.to(parts[0].dtype)


FILLED: dict[str, dict[str, Any]] = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "find": {"find_unused_parameters": True},
}
CAPS = {"64 bytes": 64, "4 KiB": 2**12, "1 MiB": 2**20}
"""Sizes of buckets, of which the last is that of the first bucket, too, if no size is given."""


@requirement(
    "DDP-BUCKET-7000",
    "Gradients are averages whatever size a parameter has beside that of a bucket: less, the same or more.",
    source=f"{SOURCE}: bucket_cap_mb, gradient_as_bucket_view, static_graph, find_unused_parameters",
)
@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.world(2)
def test_filled_buckets(world: World, cap: str) -> None:
    """Parameters of a bucket's size, an element less or more, half or twice as many, and all, in three steps."""
    limit = CAPS[cap]

    def body(rank: Rank) -> None:
        dtypes = (torch.float32, torch.float64, torch.bfloat16) if limit < 2**20 else (torch.float32,)
        for (name, options), dtype in itertools.product(FILLED.items(), dtypes):
            fit = limit // dtype.itemsize
            for sizes in ([fit, fit // 2, fit // 2, fit + 1], [fit - 1, fit, 2 * fit, 1]):
                module = Sizes(sizes, dtype).to(rank.device)
                model = DistributedDataParallel(module, bucket_cap_mb=limit / 2**20, **options)
                for number in range(3):
                    model(torch.tensor(1.0 + rank.index + number, device=rank.device)).backward()
                    for i, vector in enumerate(module.vectors):
                        assert vector.grad is not None
                        wrong = vector.grad != (i + 1) * ((rank.size + 1) / 2 + number)
                        what = f"{name}, {dtype}, {sizes}, step {number}: parameter {i}"
                        assert not wrong.any(), f"{what}: {vector.grad[wrong][0].item()}"
                    model.zero_grad()

    world.run(body)


@requirement(
    "DDP-VIEW-01",
    "With gradient_as_bucket_view, gradients share the memory of their bucket under every other option.",
    source=f"{SOURCE}: gradient_as_bucket_view",
)
@requirement(
    "DDP-VIEW-02",
    "Without gradient_as_bucket_view, every gradient has memory of its own.",
    source=f"{SOURCE}: gradient_as_bucket_view",
)
@pytest.mark.parametrize("how", ["DDP", "replicate"])
@pytest.mark.world(1, 2)
def test_memory_of_gradients(world: World, how: str) -> None:
    """Two buckets hold three gradients; they are cleared to None or to zero, or not, between steps."""
    others: list[dict[str, Any]] = [
        {},
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"static_graph": True, "find_unused_parameters": True},
        {"broadcast_buffers": False},
    ]

    def body(rank: Rank) -> None:
        for views in (True, False):
            for other in others:
                options = {"gradient_as_bucket_view": views, "bucket_cap_mb": SMALL, **other}
                module = Layers().to(rank.device)
                model: Any = replicate.replicate(module, **options) if how == "replicate" else None
                model = model or DistributedDataParallel(module, **options)
                for number in range(STEPS):
                    step(rank, model)
                    where = (options, number)
                    gradients = [p.grad for p in module.parameters() if p.grad is not None]
                    assert [g.shape for g in gradients] == [(16, 16)] * 3, where
                    assert all(g.is_contiguous() and bool((g == (rank.size + 1) / 2).all()) for g in gradients), where
                    places = Counter(g.untyped_storage().data_ptr() for g in gradients)
                    for g in gradients:
                        together = places[g.untyped_storage().data_ptr()]
                        assert g.untyped_storage().nbytes() == 1024 * together, where
                    assert len(places) < 3 if views else len(places) == 3, where
                    model.zero_grad(set_to_none=number % 2 == 0)
                assert sorted(places.values()) == ([1, 2] if views else [1, 1, 1]), options

    world.run(body)


@requirement(
    "DDP-OUT-01",
    "Without find_unused_parameters, a forward returns the module's own output, but in a static graph's first step.",
    source=f"{SOURCE}: forward; static_graph",
)
@requirement(
    "DDP-OUT-02",
    "A step leaves no reference to its output or to its inputs.",
    source=f"{SOURCE}: forward",
)
@pytest.mark.parametrize("how", ["DDP", "replicate"])
@pytest.mark.world(1, 2)
def test_outputs(world: World, how: str) -> None:
    """Compare the output with what the module kept, in four steps, the last one unsynchronized, and an evaluation."""
    every: list[dict[str, Any]] = [
        {},
        {"static_graph": True},
        {"static_graph": True, "find_unused_parameters": True},
        {"gradient_as_bucket_view": True, "static_graph": True},
        {"find_unused_parameters": True},
    ]

    def body(rank: Rank) -> None:
        for options in every:
            module = Layers().to(rank.device)
            module.keeps = True
            model: Any = replicate.replicate(module, **options) if how == "replicate" else None
            model = model or DistributedDataParallel(module, **options)
            static, finds = options.get("static_graph"), options.get("find_unused_parameters")
            for number in range(5):
                where = (options, number)
                if number == 3 and how == "DDP":
                    model.require_backward_grad_sync = False
                elif number == 3:
                    model.set_requires_gradient_sync(False)
                with torch.set_grad_enabled(number < 4):
                    x = torch.full((1, 16), 1.0 + rank.index, device=rank.device)
                    output = model(x)
                if (static and number > 0) or not (static or finds):
                    assert output is module.kept, where
                assert torch.equal(output, module.kept), where
                if number < 4:
                    output.sum().backward()
                references = [weakref.ref(x), weakref.ref(output), weakref.ref(module.kept)]
                module.kept = output = x = None
                gc.collect()
                assert [r() for r in references] == [None] * 3, where

    world.run(body)
