"""Behavior of composable DDP that generated programs avoid because PyTorch has defects there."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks import replicate


@requirement(
    "REPL-BUF-01",
    "With broadcast_buffers=True, the default, ranks have the buffers of rank 0 after a forward.",
    source="torch/distributed/_composable/replicate.py: replicate passes its options on to DistributedDataParallel",
)
@pytest.mark.parametrize("options", [{}, {"broadcast_buffers": True}], ids=["default", "asked"])
@pytest.mark.world(2, 3)
def test_buffers(world: World, options: dict[str, bool]) -> None:
    """A buffer starts with a different value on each rank."""

    class Model(nn.Module):
        scale: torch.Tensor

        def __init__(self, first: float) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("scale", torch.full((4,), first))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.layer(x) * self.scale
            return result

    def body(rank: Rank) -> list[float]:
        model = replicate.apply(Model(1.0 + rank.index), rank, **options)
        model(torch.ones(1, 4, device=rank.device))
        return [float(x) for x in model.get_buffer("scale")]

    assert_on_ranks([[1.0] * 4] * world.size, world.run(body))


@requirement(
    "REPL-GRAD-04",
    "A step that skips a module averages the gradients of the other modules, or raises an error.",
    source="torch.nn.parallel.DistributedDataParallel: find_unused_parameters; pytorch/pytorch#128949",
)
@pytest.mark.parametrize("find", [True, False], ids=["found", "not-looked-for"])
@pytest.mark.world(2)
def test_unused_module(world: World, find: bool) -> None:
    """Run one backward with a layer that no output uses."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.used(x)
            return result

    def body(rank: Rank) -> str | list[float]:
        model = replicate.apply(Model(), rank, find_unused_parameters=find)
        try:
            model(torch.full((1, 2), 1.0 + rank.index, device=rank.device)).sum().backward()
        except RuntimeError:
            return "an error"
        return replicate.gradients(model)["used.weight"].flatten().tolist()

    ends = world.run(body)
    assert_on_ranks([[1.5, 1.5]] * 2, ends, or_all=["an error"] * 2)


@requirement(
    "REPL-STATIC-01",
    "With static_graph=True, gradients accumulate locally without synchronization and are averaged with it.",
    source="torch.nn.parallel.DistributedDataParallel: static_graph; pytorch/pytorch#143580",
)
@pytest.mark.parametrize("synced_first", [True, False], ids=["synced-first", "unsynced-first"])
@pytest.mark.world(2)
def test_static_graph(world: World, synced_first: bool) -> None:
    """Run a step of two micro-batches, the first unsynchronized, optionally after a synchronized step."""

    def body(rank: Rank) -> list[float]:
        model = replicate.apply(nn.Linear(2, 1, bias=False), rank, static_graph=True)
        for synced in ([True] if synced_first else []) + [False, True]:
            model.set_requires_gradient_sync(synced)
            model(torch.full((1, 2), 1.0 + rank.index, device=rank.device)).sum().backward()
        return replicate.gradients(model)["weight"].flatten().tolist()

    assert_on_ranks([[4.5 if synced_first else 3.0] * 2] * 2, world.run(body))


@requirement(
    "REPL-STATIC-02",
    "With static_graph=True, parameters that the loss never uses have no gradient, while the others have the average.",
    source="torch.nn.parallel.DistributedDataParallel: static_graph; pytorch/pytorch#97030",
)
@pytest.mark.parametrize("unused", ["output", "module"])
@pytest.mark.world(2)
def test_static_graph_unused(world: World, unused: str) -> None:
    """The loss skips an output, or no output uses a module; run three steps."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.used(x), self.unused(x) if unused == "output" else x

    def body(rank: Rank) -> list[dict[str, float]]:
        model = replicate.apply(Model(), rank, static_graph=True)
        gradients = []
        for _ in range(3):
            model(torch.full((1, 1), 1.0 + rank.index, device=rank.device))[0].sum().backward()
            gradients.append({name: float(g) for name, g in replicate.gradients(model).items()})
            model.zero_grad()
        return gradients

    assert_on_ranks([[{"used.weight": 1.5}] * 3] * 2, world.run(body))


@requirement(
    "REPL-STATE-01",
    "The full state dict of a model and its optimizer can be loaded back.",
    source="torch/distributed/checkpoint/state_dict.py: set_state_dict",
)
@pytest.mark.world(1, 2)
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_stateless_optimizer(world: World, momentum: float) -> None:
    """SGD without momentum has an empty state."""

    def body(rank: Rank) -> None:
        model = replicate.apply(nn.Linear(4, 4), rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=momentum)
        options = StateDictOptions(full_state_dict=True)
        saved, state = get_state_dict(model, optimizer, options=options)
        set_state_dict(model, optimizer, model_state_dict=saved, optim_state_dict=state, options=options)

    world.run(body)


@requirement(
    "REPL-HOOK-01",
    "A communication hook sees the index of each bucket, and whether it is the last one.",
    source="torch.distributed.GradBucket: index, is_last",
)
@pytest.mark.parametrize("static", [False, True], ids=["plain", "static"])
@pytest.mark.world(2)
def test_hook_buckets(world: World, static: bool) -> None:
    """Two layers of two dtypes fill two buckets in the first backward."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.second(self.first(x).double())
            return result

    def body(rank: Rank) -> list[tuple[int, bool]]:
        buckets: list[tuple[int, bool]] = []

        def noted(bucket: dist.GradBucket) -> dist.GradBucket:
            buckets.append((bucket.index(), bucket.is_last()))
            return bucket

        model = replicate.apply(Model(), rank, static_graph=static)
        model.register_comm_hook(None, lambda state, bucket: allreduce_hook(rank.group, noted(bucket)))
        model(torch.ones(1, 2, device=rank.device)).sum().backward()
        return buckets

    assert_on_ranks([[(0, False), (1, True)]] * 2, world.run(body))


@requirement(
    "REPL-FREEZE-01",
    "A step after a layer was frozen averages the gradients of the other layers, or raises an error.",
    source="torch.nn.parallel.DistributedDataParallel: find_unused_parameters",
)
@pytest.mark.parametrize("find", [True, False], ids=["found", "not-looked-for"])
@pytest.mark.world(2)
def test_frozen_later(world: World, find: bool) -> None:
    """Run one step with two layers, then one with the second frozen."""

    def body(rank: Rank) -> str | list[float]:
        model = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(2)))
        for parameter in model.parameters():
            nn.init.ones_(parameter)
        replicate.apply(model, rank, find_unused_parameters=find)
        x = torch.full((1, 1), 1.0 + rank.index, device=rank.device)
        model(x).sum().backward()
        model.zero_grad()
        model[1].requires_grad_(False)
        try:
            model(x).sum().backward()
        except RuntimeError:
            return "an error"
        return replicate.gradients(model)["0.weight"].flatten().tolist()

    assert_on_ranks([[1.5]] * 2, world.run(body), or_all=["an error"] * 2)


@requirement(
    "REPL-CHANGED-01",
    "A model whose parameters change after its first step has averaged gradients, or raises an error.",
    source="torch.nn.Module.load_state_dict: assign; torch.nn.Module.double",
)
@pytest.mark.parametrize("change", ["assigned", "cast", "thawed", "copied", "written"])
@pytest.mark.world(2)
def test_changed(world: World, change: str) -> None:
    """Assign or copy a state dict, cast to float64, unfreeze a layer, or write values; then two more steps."""

    def body(rank: Rank) -> str | list[list[float]]:
        model = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(2)))
        for parameter in model.parameters():
            nn.init.ones_(parameter)
        model[1].requires_grad_(change != "thawed")
        replicate.apply(model, rank)
        x = torch.full((1, 1), 1.0 + rank.index, device=rank.device)
        model(x).sum().backward()
        if change in ("assigned", "copied"):
            state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            model.load_state_dict(state, assign=change == "assigned")
        elif change == "written":
            for parameter in model.parameters():
                nn.init.ones_(parameter)
        elif change == "cast":
            model.double()
        else:
            model[1].requires_grad_(True)
        gradients = []
        for _ in range(2):
            model.zero_grad()
            try:
                model(x.to(model[1].weight.dtype)).sum().backward()  # type: ignore[arg-type]
            except RuntimeError:
                return "an error"
            gradients.append([float(g) for g in replicate.gradients(model).values()])
        return gradients

    assert_on_ranks([[[1.5, 1.5]] * 2] * 2, world.run(body), or_all=["an error"] * 2)
