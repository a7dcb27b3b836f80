"""Optimizers that DistributedDataParallel runs for each bucket as soon as its gradients are averaged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from harness import Rank, World, requirement
from harness.stacks import replicate

SOURCE = "torch.nn.parallel.DistributedDataParallel: _register_fused_optim"
pytestmark = pytest.mark.usefixtures("with_buckets")


class Three(nn.Module):
    """Three parameters whose gradients are the input times one, two and three."""

    def __init__(self) -> None:
        super().__init__()
        self.every = nn.ParameterList(torch.full((3,), 1.0 + i) for i in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([(i + 1) * x * p.sum() for i, p in enumerate(self.every)]).sum()


OPTIMIZERS: list[tuple[Any, tuple[float, ...], dict[str, Any]]] = [
    (torch.optim.SGD, (0.5,), {}),
    (torch.optim.SGD, (), {"lr": 0.25, "momentum": 0.5, "weight_decay": 0.25, "nesterov": True}),
    (torch.optim.Adam, (0.5,), {"betas": (0.5, 0.75), "eps": 0.25}),
    (torch.optim.AdamW, (), {"lr": 0.5, "weight_decay": 0.5}),
]
"""Optimizers with arguments by position and by name."""
CHOSEN: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    "all by default": lambda every: None,
    "first": lambda every: every[:1],
    "last two": lambda every: iter(every[1:]),
    "all": tuple,
    "none": lambda every: [],
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"bucket_cap_mb": 1e-6},
    {"gradient_as_bucket_view": True},
    {"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-6, "find_unused_parameters": True},
]


@requirement(
    "DDP-FUSED-01",
    "An optimizer that is registered with DDP steps in the backward with averaged gradients, as it does on its own.",
    source=SOURCE,
)
@requirement(
    "DDP-FUSED-02",
    "An optimizer that is registered with DDP updates the parameters in optim_params alone, and all if it is left out.",
    source=f"{SOURCE}, optim_params",
)
@pytest.mark.world(2)
def test_fused(world: World) -> None:
    """Three steps of every optimizer for some or all of three parameters, in one bucket or in three."""

    def body(rank: Rank) -> None:
        number = 0
        for kind, arguments, keywords in OPTIMIZERS:
            for name, choose in CHOSEN.items():
                options = OPTIONS[number % len(OPTIONS)]
                number += 1
                module, alone = Three().to(rank.device), Three().to(rank.device)
                model: Any = DistributedDataParallel(module, **options)
                chosen = choose(list(module.every))
                replicate.optimize_buckets(model, kind, *arguments, parameters=chosen, **keywords)
                ours = choose(list(alone.every))
                ours = list(alone.every if ours is None else ours)
                optimizer = kind(ours, *arguments, foreach=False, **keywords) if ours else None
                for step in range(3):
                    model(torch.tensor(2.0 * rank.index + step, device=rank.device)).backward()
                    alone(torch.tensor(1.0 + step, device=rank.device)).backward()
                    for p, q in zip(module.every, alone.every, strict=True):
                        assert torch.equal(p.grad, q.grad), (name, step)
                    if optimizer:
                        optimizer.step()
                    for i, (p, q) in enumerate(zip(module.every, alone.every, strict=True)):
                        where = f"{kind.__name__} of {name}, {options}, step {step}, parameter {i}"
                        torch.testing.assert_close(p, q, msg=where)
                    model.zero_grad()
                    alone.zero_grad()

    world.run(body)


@requirement(
    "DDP-FUSED-03",
    "DDP refuses an optimizer that cannot update single parameters, and one beside a communication hook.",
    source=f"{SOURCE}, register_comm_hook",
)
@pytest.mark.world(1)
def test_refused(world: World) -> None:
    """Optimizers with and without a form for it, and hooks before and after; the model averages as before."""

    def body(rank: Rank) -> None:
        for kind in (torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.LBFGS):
            model: Any = DistributedDataParallel(Three().to(rank.device))
            with pytest.raises((RuntimeError, ValueError), match=r"step_param|functional"):
                replicate.optimize_buckets(model, kind)
            model(torch.tensor(3.0, device=rank.device)).backward()
            assert [p.grad.tolist() for p in model.parameters()] == [[3.0 * (i + 1)] * 3 for i in range(3)]
        first: list[Callable[[Any], None]] = [
            lambda model: model.register_comm_hook(None, allreduce_hook),
            lambda model: replicate.optimize_buckets(model, torch.optim.SGD, 0.5),
        ]
        for one in first:
            for other in first:
                model = DistributedDataParallel(Three().to(rank.device))
                one(model)
                with pytest.raises(RuntimeError, match=r"register_comm_hook|already"):
                    other(model)

    world.run(body)
