"""Averaged gradients of several dtypes: clipped and unscaled together, in whatever order they are."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

from harness import Rank, World, requirement

pytestmark = pytest.mark.usefixtures("with_buckets")
LARGEST: dict[torch.dtype, float] = {
    torch.float16: 2.0**10,
    torch.bfloat16: 2.0**18,
    torch.float32: 2.0**18,
    torch.float64: 2.0**18,
}
"""Dtypes of parameters, and factors of their gradients; a norm of the others is infinite in float16."""
NORMS = (1.0, 2.0, math.inf)


class Weighed(nn.Module):
    """A parameter of four elements for each dtype, which has a gradient of the input times a factor."""

    def __init__(self, dtypes: tuple[torch.dtype, ...], factors: list[float]) -> None:
        super().__init__()
        self.factors = factors
        self.every = nn.ParameterList(torch.full((4,), 16.0, dtype=dtype) for dtype in dtypes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        terms = [(p.double() * x * f).sum() for p, f in zip(self.every, self.factors, strict=True)]
        return torch.stack(terms).sum()


def given(rank: Rank) -> torch.Tensor:
    """Return an input whose average over two ranks is 1.5."""
    return torch.full((4,), 1.0 + rank.index, dtype=torch.float64, device=rank.device)


@requirement(
    "DDP-DTYPES-4849",
    "Gradients of several dtypes are clipped by the norm of all of them, in the widest dtype, whichever is the first.",
    source="torch.nn.utils: clip_grad_norm_, get_total_norm, clip_grads_with_norm_, clip_grad_value_",
)
@pytest.mark.world(2)
def test_clipping(world: World) -> None:
    """Clip gradients of two dtypes by each norm, at once or apart, with loops or foreach functions, and by value."""

    def body(rank: Rank) -> None:
        ways = itertools.cycle(itertools.product((None, True, False), (False, True)))  # each norm meets some of them
        for dtypes in itertools.permutations(LARGEST, 2):
            own = [1.5 * LARGEST[dtype] for dtype in dtypes]
            model = DistributedDataParallel(Weighed(dtypes, [LARGEST[d] for d in dtypes]).to(rank.device))
            parameters: list[Any] = list(model.parameters())
            widest = torch.promote_types(*dtypes)

            def backward(model: nn.Module = model) -> None:
                model.zero_grad()
                model(given(rank)).backward()

            for norm in NORMS:
                foreach, apart = next(ways)
                what = f"{dtypes}, {norm=}, {foreach=}, {apart=}"
                backward()
                options: dict[str, Any] = {"foreach": foreach}
                if apart:
                    total = get_total_norm([p.grad for p in parameters], norm, **options)
                    clip_grads_with_norm_(parameters, 2.0, total, **options)
                else:
                    total = clip_grad_norm_(parameters, 2.0, norm, **options)
                largest = max(own)
                right = largest if norm == math.inf else sum(4 * g**norm for g in own) ** (1 / norm)
                assert total.dtype == widest, f"{what}: {total.dtype}"
                assert float(total) == pytest.approx(right, rel=8 * torch.finfo(widest).eps), what
                for p, g in zip(parameters, own, strict=True):
                    near = 8 * torch.finfo(p.dtype).eps
                    assert p.grad.tolist() == pytest.approx([2 * g / (right + 1e-6)] * 4, rel=near, abs=0), (
                        f"{what}, {p.dtype}"
                    )
            for bound in (256.0, 2.0**11):
                foreach, _ = next(ways)
                backward()
                clip_grad_value_(parameters, bound, foreach=foreach)
                for p, g in zip(parameters, own, strict=True):
                    assert p.grad.tolist() == [min(g, bound)] * 4, f"{dtypes}, {foreach=}, value {bound}"

    world.run(body)


@requirement(
    "DDP-DTYPES-4850",
    "A GradScaler unscales gradients of every dtype, with unscale_ or in step.",
    source="torch.amp.GradScaler: unscale_, step",
)
@requirement(
    "DDP-DTYPES-4851",
    "With a GradScaler, a gradient that is not finite skips the step, whichever of the gradients' dtypes it has.",
    source="torch.amp.GradScaler: step, update",
)
@pytest.mark.world(2)
def test_scaling(world: World) -> None:
    """Step with finite gradients, and with one of each dtype in turn that is not finite on one rank."""

    def body(rank: Rank) -> None:
        for dtypes in itertools.permutations((torch.bfloat16, torch.float32, torch.float64)):
            model = DistributedDataParallel(Weighed(dtypes, [1.0, 2.0, 4.0]).to(rank.device))
            parameters: list[Any] = list(model.parameters())
            sgd = torch.optim.SGD(parameters, lr=1.0)
            values = [16.0] * 3
            for bad, unscales in itertools.product((None, 0, 1, 2), (True, False)):
                what = f"{dtypes}, {bad=}, {unscales=}"
                scaler = torch.amp.GradScaler(rank.device.type, init_scale=16.0, growth_interval=1)
                model.zero_grad()
                model.module.factors = [f * (math.inf if i == bad else 1) for i, f in enumerate((1.0, 2.0, 4.0))]
                scaler.scale(model(given(rank))).backward()
                if unscales:
                    scaler.unscale_(sgd)
                    found = [p.grad[0].item() for i, p in enumerate(parameters) if i != bad]
                    assert found == [1.5 * f for i, f in enumerate((1.0, 2.0, 4.0)) if i != bad], what
                scaler.step(sgd)
                scaler.update()
                if bad is None:
                    values = [v - 1.5 * f for v, f in zip(values, (1.0, 2.0, 4.0), strict=True)]
                assert [p[0].item() for p in parameters] == values, what
                assert scaler.get_scale() == (32.0 if bad is None else 8.0), what

    world.run(body)
