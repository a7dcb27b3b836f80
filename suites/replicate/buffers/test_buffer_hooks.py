"""Hooks that synchronize the buffers of DistributedDataParallel, and the parameters and buffers that it ignores."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks import messages, replicate
from harness.stacks.replicate import HookLocation

SOURCE = "torch.nn.parallel.DistributedDataParallel: _register_buffer_comm_hook"
pytestmark = pytest.mark.usefixtures("with_buckets")


class Noting(nn.Module):
    """A layer and two buffers, which a forward replaces or changes in place; it notes what it does and sees."""

    level: torch.Tensor
    inner: Any

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.layer.weight)
        self.register_buffer("level", torch.full((2,), 1.0 + rank))
        self.inner = nn.Module()
        self.inner.register_buffer("count", torch.tensor(1 + rank))
        self.notes: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.notes.append(("forward", float(self.level[0]), int(self.inner.count)))
        self.level = self.level + 1
        self.inner.count += 1
        result: torch.Tensor = self.layer(x)
        return result


@requirement(
    "DDP-BUF-07",
    "A buffer hook runs before or after each forward, as registered, and after it by default.",
    source=f"{SOURCE}, comm_hook_location",
)
@requirement(
    "DDP-BUF-08",
    "A buffer hook receives its state and the current buffers by name, in the place of the broadcast.",
    source=SOURCE,
)
@requirement(
    "DDP-BUF-09",
    "A buffer hook is not called where buffers would not be sent.",
    source=f"{SOURCE}; no_sync, broadcast_buffers",
)
@pytest.mark.parametrize("where", [None, "PRE_FORWARD", "POST_FORWARD"])
@pytest.mark.world(2)
def test_location(world: World, where: str | None) -> None:
    """The hook sums buffers over ranks, in training, evaluation and without synchronization."""

    def body(rank: Rank) -> None:
        state: dict[str, int] = {"calls": 0}

        def hook(given: dict[str, int], buffers: dict[str, torch.Tensor]) -> None:
            given["calls"] += 1
            assert list(buffers) == ["level", "inner.count"]
            assert buffers["level"] is module.level
            assert buffers["inner.count"] is module.inner.count
            module.notes.append("hook")
            assert not torch.is_grad_enabled()
            for buffer in buffers.values():
                dist.all_reduce(buffer)

        first = where == "PRE_FORWARD"
        location = where and HookLocation[where]
        module = Noting(rank.index).to(rank.device)
        model: Any = DistributedDataParallel(module, init_sync=False)
        replicate.register_buffer_hook(model, state, hook, location)
        x = torch.full((1, 1), 1.0 + rank.index, device=rank.device)

        def call(*, backward: bool = True) -> list[Any]:
            module.notes.clear()
            before = messages.mark()
            output = model(x)
            sent = [m for m in messages.since(before) if "broadcast" in m.op and m.dtype != "Int"]
            assert sent == []  # DDP sends the order of gradients, once, as 32-bit integers
            if backward:
                output.sum().backward()
            return module.notes

        # levels are 1 and 2 at first, and their sum is 3
        if first:
            assert call() == ["hook", ("forward", 3.0, 3)]
            assert call() == ["hook", ("forward", 8.0, 8)]
        else:
            assert call() == [("forward", 1.0 + rank.index, 1 + rank.index), "hook"]  # 2 + 3
            assert call() == [("forward", 5.0, 5), "hook"]  # twice 6
        with torch.no_grad():
            model.eval()
            assert [note if note == "hook" else "forward" for note in call(backward=False)] == [
                *(["hook", "forward"] if first else ["forward", "hook"])
            ]
        model.train()
        with model.no_sync():
            state["calls"] = 0
            call(), call()
        assert state["calls"] <= 1
        assert float(module.layer.weight.grad[0, 0]) == 3.0 + 2 * (1.0 + rank.index)
        state["calls"] = 0
        call(), call()
        assert state["calls"] in (1, 2)  # the first forward decides for the next
        for other in ({"broadcast_buffers": False}, {}):
            plain: Any = DistributedDataParallel(
                Noting(0).to(rank.device) if other else nn.Linear(1, 1).to(rank.device), **other
            )
            replicate.register_buffer_hook(plain, state, lambda *_: 1 / 0, location)
            plain(x).sum().backward()
        with pytest.raises(AssertionError):
            replicate.register_buffer_hook(model, None, "hook", location)

    world.run(body)


@requirement(
    "DDP-BUF-10",
    "The futures that a buffer hook returns are complete at the end of the backward.",
    source=SOURCE,
)
@pytest.mark.world(2)
def test_futures(world: World) -> None:
    """A hook after the forward begins all-reduces and does not wait for them."""

    def body(rank: Rank) -> None:
        module = Noting(rank.index).to(rank.device)
        model: Any = DistributedDataParallel(module, init_sync=False)

        def hook(_: None, buffers: dict[str, torch.Tensor]) -> Any:
            return [dist.all_reduce(buffer, async_op=True).get_future() for buffer in buffers.values()]

        replicate.register_buffer_hook(model, None, hook, HookLocation.POST_FORWARD)
        level, count = [1.0, 2.0], [1, 2]
        for _ in range(3):
            model(torch.ones(1, 1, device=rank.device)).sum().backward()
            level, count = [sum(level) + 2] * 2, [sum(count) + 2] * 2
            assert module.level.tolist() == [level[0]] * 2
            assert int(module.inner.count) == count[0]

    world.run(body)


@requirement(
    "DDP-BUF-130",
    "In join(), ranks without a batch take part in buffer hooks, which run before or after the others' forwards.",
    source=f"{SOURCE}; torch.nn.parallel.DistributedDataParallel.join; pytorch/pytorch#65436",
)
@pytest.mark.parametrize("where", ["PRE_FORWARD", "POST_FORWARD"])
@pytest.mark.world(2)
def test_joined(world: World, where: str) -> None:
    """The ranks have one and two batches; their hooks average a buffer that sums inputs."""

    class Summing(nn.Module):
        seen: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1, bias=False)
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen += x.sum()
            result: torch.Tensor = self.layer(x)
            return result

    def average(_: None, buffers: dict[str, torch.Tensor]) -> None:
        for buffer in buffers.values():
            dist.all_reduce(buffer)
            buffer /= 2

    def body(rank: Rank) -> tuple[list[float], float]:
        module = Summing().to(rank.device)
        model: Any = DistributedDataParallel(module)
        replicate.register_buffer_hook(model, None, average, HookLocation[where])
        gradients = []
        with model.join():
            for _ in range(1 + rank.index):
                model.zero_grad()
                model(torch.full((1, 1), 1.0 + rank.index, device=rank.device)).sum().backward()
                gradients.append(float(module.layer.weight.grad))  # type: ignore[arg-type]
        return gradients, float(module.seen)

    seen = {"PRE_FORWARD": 1.5 + 2, "POST_FORWARD": (1.5 + 1.5 + 2) / 2}[where]
    assert_on_ranks([([1.5], seen), ([1.5, 1.0], seen)], world.run(body))


@requirement(
    "DDP-IGN-01",
    "Ignored parameters and buffers keep the values of their rank, as do gradients of ignored parameters.",
    source="torch.nn.parallel.DistributedDataParallel: _set_params_and_buffers_to_ignore_for_model",
)
@requirement(
    "DDP-IGN-293",
    "Ignored parameters and buffers may be on another device than the others.",
    source="torch.nn.parallel.DistributedDataParallel: _set_params_and_buffers_to_ignore_for_model; "
    "pytorch/pytorch#81136",
)
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
@pytest.mark.world(2)
def test_ignored(world: World, options: dict[str, bool]) -> None:
    """A layer, a buffer, what has other shapes on each rank or no values; then the layer is replaced by another."""

    class Model(nn.Module):
        def __init__(self, rank: int) -> None:
            super().__init__()
            self.first, self.second = self.made(rank), self.made(rank)
            self.odd = nn.Module()
            self.odd.register_parameter("own", nn.Parameter(torch.ones(1 + rank, 2)))
            self.odd.register_buffer("level", torch.zeros(2 + rank))

        @staticmethod
        def made(rank: int) -> nn.Linear:
            layer = nn.Linear(1, 1, bias=False)
            nn.init.constant_(layer.weight, 1.0 + rank)
            layer.register_buffer("level", torch.tensor(1.0 + rank))
            return layer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.first(x) + 2 * self.second(x)
            return result

    def body(rank: Rank) -> None:
        module = Model(rank.index).to(rank.device)
        module.far = nn.BatchNorm1d(2, device="meta")  # never used
        far = [name for name, _ in (*module.named_parameters(), *module.named_buffers()) if name.startswith("far.")]
        replicate.leave_alone(module, ["second.weight", "second.level", "odd.own", "odd.level", *far])
        model: Any = DistributedDataParallel(module, **options)
        own = 1.0 + rank.index
        for step in range(4):
            if step == 2:
                module.second = Model.made(rank.index).to(rank.device)
            held = [(layer.weight, layer.level) for layer in (module.first, module.second)]
            assert [(float(weight), float(level)) for weight, level in held] == [(1.0, 1.0), (own, own)], step
            assert [t.shape for t in module.odd.state_dict().values()] == [(1 + rank.index, 2), (2 + rank.index,)]
            before = messages.mark()
            model(torch.full((1, 1), own, device=rank.device)).sum().backward()
            sizes = [m.shape for m in messages.since(before) if m.dtype == "Float"]
            assert not sizes or sizes == [(1,), (1,)]  # a buffer, and a gradient
            assert module.odd.get_parameter("own").grad is None
            assert all(tensor.is_meta for tensor in module.far.state_dict().values())
            assert all(p.grad is None for p in module.far.parameters())
            assert [float(layer.weight.grad) for layer in (module.first, module.second)] == [1.5, 2 * own]
            model.zero_grad()

    world.run(body)


@requirement(
    "DDP-IGN-01",
    "Ignored parameters and buffers keep the values of their rank, as do gradients of ignored parameters.",
    source="torch.nn.parallel.DistributedDataParallel: _set_params_and_buffers_to_ignore_for_model",
)
@pytest.mark.world(2)
def test_ignored_of_the_root(world: World) -> None:
    """A parameter of the module itself is ignored, by its name in named_parameters()."""

    class Model(nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.own, self.layer = nn.Parameter(torch.full((1,), value)), nn.Linear(1, 1, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.layer(x) + self.own * x
            return result

    def body(rank: Rank) -> list[float]:
        module = Model(1.0 + rank.index).to(rank.device)
        replicate.leave_alone(module, ["own"])
        model = DistributedDataParallel(module)
        model(torch.full((1, 1), 1.0 + rank.index, device=rank.device)).sum().backward()
        return [module.own.item(), *(g.item() for g in replicate.gradients(module).values())]

    assert_on_ranks([[1.0, 1.0, 1.5], [2.0, 2.0, 1.5]], world.run(body))


class Scale(nn.Module):
    """A parameter and a buffer with the value of the rank, of any name, and modules beside them."""

    def __init__(self, value: float, **inner: nn.Module) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), value))
        self.register_buffer("level", torch.full((1,), value))
        for name, module in inner.items():
            self.add_module(name, module)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x * self.weight
        for module in self.children():
            result = result + module(x)
        return result


@requirement(
    "DDP-IGN-53",
    "Only what has the whole name that is given is ignored, not what has this name within its own.",
    source="torch.nn.parallel.DistributedDataParallel: _set_params_and_buffers_to_ignore_for_model",
)
@pytest.mark.world(2)
def test_names_within_names(world: World) -> None:
    """Ignore a layer whose name is the beginning, the end or the middle of the names of others, by turns."""
    names = ("head", "overhead", "heads", "overheads", "outer.head", "head.inner", "Head")

    def body(rank: Rank) -> None:
        own = 1.0 + rank.index
        for ignored in ("head", "outer.head", "head.inner", "overhead"):
            for what in ("weight", "level"):

                def made(**inner: nn.Module) -> Scale:
                    return Scale(own, **inner)

                others = {name: made() for name in ("overhead", "heads", "overheads", "Head")}
                module = made(head=made(inner=made()), outer=made(head=made()), **others).to(rank.device)
                replicate.leave_alone(module, [f"{ignored}.{what}"])
                model = DistributedDataParallel(module)
                model(torch.full((1, 1), own, device=rank.device)).sum().backward()
                for name in names:
                    one: Any = module.get_submodule(name)
                    is_own = {part: name == ignored and part == what for part in ("weight", "level")}
                    where = f"{ignored}.{what}: {name}"
                    assert one.weight.item() == (own if is_own["weight"] else 1.0), where
                    assert one.level.item() == (own if is_own["level"] else 1.0), where
                    assert one.weight.grad.item() == (own if is_own["weight"] else 1.5), where

    world.run(body)
