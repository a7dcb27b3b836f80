"""Steps of optimizers that are compiled: they change parameters as uncompiled steps do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness import Rank, World, requirement
from harness.stacks import dynamo

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.5),
    "SGD with momentum": lambda groups: torch.optim.SGD(groups, lr=0.5, momentum=0.5, nesterov=True),
    "SGD with decay": lambda groups: torch.optim.SGD(groups, lr=0.5, weight_decay=0.25, maximize=True, foreach=False),
}
"""Optimizers whose steps are exact for powers of two."""

HAVING = ((True, False, False), (True, True, False), (False, True, True), (False, False, False))
"""Which of three parameters have gradients at each step."""


@requirement(
    "DYN-OPTIMIZER-3350",
    "A compiled optimizer step changes those parameters that have gradients at this step, whichever had them before.",
    source="torch.optim.Optimizer.step; tutorial: Compiling the optimizer with torch.compile",
)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.world(2)
def test_gradients(world: World, name: str) -> None:
    """Give gradients that are summed over ranks to other parameters at each step, of one group or of two."""

    def trained(rank: Rank, *, compiles: bool) -> list[Any]:
        parameters = [nn.Parameter(torch.full((2,), 2.0**k, device=rank.device)) for k in range(3)]
        optimizer = OPTIMIZERS[name]([{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.25}])
        step: Callable[[], Any] = optimizer.step
        if compiles:
            step = dynamo.compiled(optimizer.step, backend="eager", fullgraph=False)[0]
        seen = []
        for number, having in enumerate(HAVING):
            for parameter, has in zip(parameters, having, strict=True):
                gradient = torch.full((2,), 1.0 + rank.index + number, device=rank.device)
                dist.all_reduce(gradient)
                parameter.grad = gradient if has else None
            step()
            seen.append([parameter.tolist() for parameter in parameters])
        return seen

    def body(rank: Rank) -> None:
        assert trained(rank, compiles=True) == trained(rank, compiles=False)

    world.run(body)


AVERAGING: tuple[tuple[Callable[..., torch.optim.Optimizer], float], ...] = (
    (torch.optim.Adam, 0.5),
    (torch.optim.AdamW, 0.0),
    (torch.optim.NAdam, 0.25),
    (torch.optim.Adamax, 0.75),
)
"""Optimizers with first betas on both sides of one half, for which averages of small whole numbers are exact."""


@requirement(
    "DYN-OPTIMIZER-5000",
    "A compiled step averages gradients by each first beta, whether its optimizer works with foreach or not.",
    source="torch.optim.Adam: betas, foreach; tutorial: Compiling the optimizer with torch.compile",
)
@pytest.mark.parametrize("foreach", [True, False], ids=["foreach", "loop"])
@pytest.mark.world(2)
def test_averages(world: World, foreach: bool) -> None:
    """Step twice with sums of gradients over ranks, and read the averages; without foreach, of the first optimizer."""

    def body(rank: Rank) -> list[str]:
        wrong = []
        for kind, beta in AVERAGING if foreach else AVERAGING[:1]:
            parameters = [nn.Parameter(torch.full((2,), 2.0**k, device=rank.device)) for k in range(2)]
            optimizer = kind(parameters, lr=0.5, betas=(beta, 0.5), foreach=foreach)
            step = dynamo.compiled(optimizer.step, backend="eager", fullgraph=False)[0]
            averages = [0.0, 0.0]
            for call in range(2):
                for k, parameter in enumerate(parameters):
                    parameter.grad = torch.full((2,), 1.0 + rank.index + call + k, device=rank.device)
                    dist.all_reduce(parameter.grad)
                    total = sum(1.0 + i + call + k for i in range(rank.size))
                    averages[k] = beta * averages[k] + (1 - beta) * total
                step()
            found = [optimizer.state[parameter]["exp_avg"].tolist() for parameter in parameters]
            if found != [[average] * 2 for average in averages]:
                wrong.append(f"{kind}, beta {beta}: {averages} expected, {found} found")
        return wrong

    for wrong in world.run(body):
        assert not wrong, "\n".join(wrong)
