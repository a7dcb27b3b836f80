"""Schedules of the learning rates of sharded and of replicated parameters."""

from __future__ import annotations

import io
import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from fixtures.managed import ways
from fixtures.rates import HALVING, SCHEDULES, Plateau
from harness import Rank, World, requirement

Shape = tuple[int, ...] | None
SHAPES: tuple[Shape, ...] = (None, (), (1,))
"""Shapes of learning rates that are tensors, or None for numbers."""


def layer(rank: Rank, way: str = "sharded") -> Any:
    """Create a managed layer of a weight and a bias."""
    return ways(rank)[way](nn.Linear(4, 2, device=rank.device))


def give(model: Any) -> None:
    """Set the gradients of the parameters to ones."""
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)


def scheduled(model: Any, name: str, shape: Shape) -> tuple[torch.optim.Optimizer, Any]:
    """Create SGD of two groups, whose rates are 1 and 0.5, with a schedule."""
    rates = [rate if shape is None else torch.full(shape, rate) for rate in (1.0, 0.5)]
    groups = [{"params": [p], "lr": rate} for p, rate in zip(model.parameters(), rates, strict=True)]
    sgd = torch.optim.SGD(groups, momentum=0.5)
    return sgd, SCHEDULES[name](sgd)


@requirement(
    "RFSDP-RATE-3200",
    "A scheduled learning rate that is a tensor stays one, with the values of a rate that is a number.",
    source="torch.optim.lr_scheduler; torch.optim.SGD: lr (float, Tensor)",
)
@requirement(
    "RFSDP-RATE-3500",
    "A schedule changes a learning rate that is a tensor of one element in place, whatever its shape is.",
    source="torch.optim.lr_scheduler; torch/optim/lr_scheduler.py: _update_param_group_val",
)
@requirement(
    "RFSDP-RATE-3201",
    "A schedule whose state is saved and read with weights_only=True goes on in another schedule as it would have.",
    source="torch.optim.lr_scheduler.LRScheduler: state_dict, load_state_dict; torch.load: weights_only",
)
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.world(2)
def test_schedules(world: World, name: str) -> None:
    """Six steps of two groups with other rates; save and load after three of them."""

    def body(rank: Rank) -> None:
        model = layer(rank)
        seen: dict[Shape, list[list[float]]] = {}
        for shape in SHAPES:
            sgd, schedule = scheduled(model, name, shape)
            given = [group["lr"] for group in sgd.param_groups]
            seen[shape] = []
            for step in range(6):
                give(model)
                sgd.step()
                schedule.step()
                seen[shape].append([float(group["lr"]) for group in sgd.param_groups])
                for group, rate in zip(sgd.param_groups, given, strict=True):
                    assert isinstance(group["lr"], float) if shape is None else group["lr"] is rate, (shape, step)
                if step == 2:
                    file = io.BytesIO()
                    torch.save({"rates": schedule.state_dict(), "sgd": sgd.state_dict()}, file)
            file.seek(0)
            saved = torch.load(file, weights_only=True)
            other, again = scheduled(model, name, shape)
            other.load_state_dict(saved["sgd"])
            again.load_state_dict(saved["rates"])
            for step in range(3, 6):
                other.step()
                again.step()
                found = [float(group["lr"]) for group in other.param_groups]
                torch.testing.assert_close(found, seen[shape][step], rtol=1e-6, atol=1e-6)
        for shape in SHAPES:
            torch.testing.assert_close(seen[shape], seen[None], rtol=1e-6, atol=1e-6)

    world.run(body)


RESUMED = [
    "LambdaLR",
    "MultiplicativeLR",
    "LinearLR",
    "ExponentialLR",
    "PolynomialLR",
    "CosineAnnealingLR",
    "CosineAnnealingWarmRestarts",
    "CyclicLR",
    "OneCycleLR",
]
"""Schedules that take last_epoch; PyTorch's StepLR, MultiStepLR and ConstantLR change the rate as they are made."""


@requirement(
    "RFSDP-RATE-3501",
    "A schedule that is made with last_epoch, for an optimizer with the state after that epoch, goes on as the one "
    "before.",
    source="torch.optim.lr_scheduler: last_epoch (int)",
)
@pytest.mark.parametrize("name", RESUMED)
@pytest.mark.world(2)
def test_resumed(world: World, name: str) -> None:
    """Resume after each of five epochs, with rates that are numbers or tensors."""

    def body(rank: Rank) -> None:
        model = layer(rank)

        def rates(optimizer: torch.optim.Optimizer, schedule: Any, count: int) -> list[float]:
            found = [float(optimizer.param_groups[0]["lr"])]
            for _ in range(count):
                optimizer.step()
                schedule.step()
                found.append(float(optimizer.param_groups[0]["lr"]))
            return found

        for shape, epochs in itertools.product((None, ()), range(1, 6)):

            def made(shape: Shape = shape) -> torch.optim.Optimizer:
                return torch.optim.SGD(model.parameters(), lr=1.0 if shape is None else torch.full(shape, 1.0))

            whole, first, second = made(), made(), made()
            right = rates(whole, SCHEDULES[name](whole), 6)
            rates(first, SCHEDULES[name](first), epochs)
            second.load_state_dict(first.state_dict())
            found = rates(second, SCHEDULES[name](second, last_epoch=epochs - 1), 6 - epochs)
            torch.testing.assert_close(found, right[epochs:], rtol=1e-6, atol=1e-6)

    world.run(body)


@requirement(
    "RFSDP-RATE-3502",
    "A SequentialLR runs each of its schedules from that schedule's own beginning, also if the first is a chain.",
    source="torch.optim.lr_scheduler: SequentialLR, ChainedScheduler",
)
@pytest.mark.world(2)
def test_sequences(world: World) -> None:
    """Each schedule halves the rate in every epoch; the second one begins with the third epoch, a third one later."""

    def body(rank: Rank) -> None:
        model = layer(rank)
        later = ["LambdaLR", "ExponentialLR"]  # PyTorch's SequentialLR cannot begin a chain at a milestone
        for first, second, third in itertools.product(HALVING, later, later):
            sgd = torch.optim.SGD(model.parameters(), lr=1.0)
            schedules = [HALVING[name](sgd) for name in (first, second, third)]
            schedule = lr_scheduler.SequentialLR(sgd, schedules, [3, 5])
            found = []
            for _ in range(7):
                found.append(sgd.param_groups[0]["lr"])
                sgd.step()
                schedule.step()
            assert found == [1.0, 0.5, 0.25, 1.0, 0.5, 1.0, 0.5], (first, second, third)

    world.run(body)


@requirement(
    "RFSDP-RATE-3503",
    "ReduceLROnPlateau reduces the rates of all groups down to min_lr, also of one that the optimizer gets later.",
    source="torch.optim.lr_scheduler.ReduceLROnPlateau: min_lr; torch.optim.Optimizer.add_param_group",
)
@pytest.mark.world(2)
def test_added_group(world: World) -> None:
    """Add the group before the first step or after it, with rates that are numbers or tensors."""

    def body(rank: Rank) -> None:
        for way, shape, before in itertools.product(ways(rank), SHAPES, (True, False)):
            weight, bias = layer(rank, way).parameters()
            rates: list[Any] = [rate if shape is None else torch.full(shape, rate) for rate in (1.0, 4.0)]
            sgd = torch.optim.SGD([weight], lr=rates[0])
            schedule = Plateau(sgd, factor=0.5, patience=0, min_lr=0.25)
            for number in range(5):
                if number == (0 if before else 1):
                    sgd.add_param_group({"params": [bias], "lr": rates[1]})
                schedule.step()
            found = [float(group["lr"]) for group in sgd.param_groups]
            assert found == [0.25, 0.25], f"{way}, {shape}, {before=}: {found}"

    world.run(body)
