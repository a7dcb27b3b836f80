"""Whole steps that are compiled: forward, backward and optimizer in one function, with rates that a schedule sets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness import Rank, World, assert_same, dyadic, requirement
from harness.stacks import dynamo
from harness.stacks.collectives import functional
from harness.stacks.tracing import Tracer

AUTOGRAD = "torch/_dynamo/config.py: compiled_autograd; tutorial: Compiled Autograd"


class Layers(nn.Module):
    """Two layers, with a break of the graph between them or not."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.breaks = breaks
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        for number, parameter in enumerate(self.parameters()):
            with torch.no_grad():
                parameter.copy_(dyadic(*parameter.shape, key=number, dtype=torch.float32, span=2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map float[n, 3] to float[n, 3]."""
        x = self.layers[0](x).relu()
        if self.breaks:
            dynamo.graph_break()
        y: torch.Tensor = self.layers[1](x)
        return y


def averaged(model: nn.Module) -> None:
    """Have each gradient averaged over ranks once it was accumulated."""
    for parameter in model.parameters():

        def average(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            total = functional.all_reduce(parameter.grad, "sum", dist.group.WORLD)
            parameter.grad.copy_(total / dist.get_world_size())

        parameter.register_post_accumulate_grad_hook(average)


@requirement(
    "DYN-STEP-5560",
    "With compiled_autograd, a compiled step or a compiled call of backward has the backward in one graph, with the "
    "collectives of its hooks, also where the forward breaks.",
    source=AUTOGRAD,
)
@requirement(
    "DYN-STEP-5561",
    "With compiled_autograd, steps that are compiled have the gradients of uncompiled ones, also accumulated, and the "
    "backward is compiled once for all of them.",
    source=AUTOGRAD,
)
@pytest.mark.world(2, timeout=120)
def test_backwards(world: World) -> None:
    """Compile the step, the model and the backward, or the backward alone; accumulate in every other step."""

    def body(rank: Rank) -> None:
        def trained(way: str, breaks: bool, tracer: Tracer | None) -> list[torch.Tensor]:
            torch.compiler.reset()
            model, seen = Layers(breaks).to(rank.device), []
            averaged(model)

            def whole(x: torch.Tensor) -> torch.Tensor:
                loss = model(x).square().sum()
                loss.backward()
                return loss

            def apart(x: torch.Tensor) -> torch.Tensor:
                forward: Any = torch.compile(model, backend=tracer) if way == "both" else model
                loss = forward(x).square().sum()
                torch.compile(lambda: loss.backward(), backend=tracer)()
                return loss  # type: ignore[no-any-return]

            step: Any = whole
            if tracer is not None:
                step = torch.compile(whole, backend=tracer) if way == "step" else apart
            for number in range(3):
                x = dyadic(2, 3, key=(rank.index, number), dtype=torch.float32, span=2).to(rank.device)
                seen.append(step(x).detach())
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    seen.append(parameter.grad.clone())
                    if number % 2:
                        parameter.grad = None
            return seen

        for way, breaks in (("step", True), ("both", True), ("backward", False)):
            right, tracer = trained(way, breaks, None), Tracer("eager")
            with dynamo.settings(compiled_autograd=True):
                found = trained(way, breaks, tracer)
            for number, (one, other) in enumerate(zip(right, found, strict=True)):
                assert_same(one, other, f"{way}, {breaks}: {number}")
            reduces = [sum("all_reduce" in o.name for o in graph.operators) for graph in tracer.graphs]
            assert set(reduces) <= {0, 4}, f"{way}, {breaks}: a backward in parts: {reduces}"
            assert reduces.count(4) <= 2, f"{way}, {breaks}: {reduces}"

    world.run(body)


RATED: dict[str, Callable[[Any, torch.Tensor], torch.optim.Optimizer]] = {
    "SGD": lambda groups, lr: torch.optim.SGD(groups, lr=lr, momentum=0.5),
    "SGD with decay": lambda groups, lr: torch.optim.SGD(groups, lr=lr, momentum=0.5, weight_decay=0.5, nesterov=True),
    "Adam": lambda groups, lr: torch.optim.Adam(groups, lr=lr, betas=(0.5, 0.5)),
}
"""Optimizers whose rate is a tensor. What Adam makes of the rate is rounded."""

SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "SGD": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
    "SGD with decay": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 2.0**-step),
    "Adam": lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, 0.25, total_iters=4),
}


@requirement(
    "DYN-STEP-5562",
    "A compiled step of an optimizer whose rates are tensors has at each step the rate of the schedule.",
    source="tutorial: Running the compiled optimizer with an LR Scheduler; torch.optim.lr_scheduler",
)
@requirement(
    "DYN-STEP-5563",
    "A compiled step of an optimizer whose rates are tensors is not compiled again for another rate.",
    source="tutorial: Running the compiled optimizer with an LR Scheduler: 'wrap the LR in a tensor'",
)
@requirement(
    "DYN-STEP-5564",
    "A compiled step leaves in the optimizer the state of an uncompiled one, which another optimizer loads and goes on "
    "with.",
    source="torch.optim.Optimizer: state_dict, load_state_dict; tutorial: Compiling the optimizer with torch.compile",
)
@pytest.mark.world(2, timeout=120)
def test_rates(world: World) -> None:
    """Average gradients in six compiled steps with two groups of other rates; load the state after three."""

    def body(rank: Rank) -> None:
        def trained(name: str, compiles: bool) -> tuple[list[Any], list[int]]:
            torch.compiler.reset()
            parameters = [nn.Parameter(torch.arange(3.0, device=rank.device) + k) for k in range(2)]
            groups = [{"params": parameters[:1]}, {"params": parameters[1:], "lr": torch.tensor(0.25)}]
            optimizer = RATED[name](groups, torch.tensor(0.5))
            schedule, tracer, seen, counts = SCHEDULES[name](optimizer), Tracer("eager"), [], []

            def step() -> None:
                optimizer.step()
                schedule.step()

            call: Any = torch.compile(step, backend=tracer) if compiles else step
            for number in range(6):
                if number == 3:
                    state, rates = optimizer.state_dict(), schedule.state_dict()
                    optimizer = RATED[name]([{"params": [p]} for p in parameters], torch.tensor(7.0))
                    schedule = SCHEDULES[name](optimizer)
                    optimizer.load_state_dict(state)
                    schedule.load_state_dict(rates)
                for parameter in parameters:
                    parameter.grad = torch.full((3,), 1.0 + rank.index + number, device=rank.device)
                    dist.all_reduce(parameter.grad)
                call()
                counts.append(len(tracer.graphs))
                seen += [p.detach().clone() for p in parameters]
                seen += [torch.as_tensor(group["lr"]).clone() for group in optimizer.param_groups]
                seen += [v.clone() for p in parameters for v in optimizer.state[p].values() if v is not None]
            return seen, counts

        for name in RATED:
            (right, _), (found, counts) = trained(name, compiles=False), trained(name, compiles=True)
            for number, (one, other) in enumerate(zip(right, found, strict=True)):
                if name == "Adam":
                    torch.testing.assert_close(other, one)
                else:
                    assert_same(one, other, f"{name}: {number}")
            assert 0 < counts[1] == counts[2], f"{name}: {counts}"
            assert counts[4] == counts[5], f"{name}: {counts}"

    world.run(body)
