"""Parametrized layers of replicated modules: several forwards, frozen weights, former state dicts."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm

from harness import Rank, World, dyadic, requirement
from harness.stacks.limit import runs_with

pytestmark = [pytest.mark.usefixtures("with_buckets"), pytest.mark.filterwarnings("ignore::FutureWarning")]


class Twice(nn.Module):
    """Double a parameter."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class Added(nn.Module):
    """Add two parameters."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y

    def right_inverse(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x / 4, x * 3 / 4


def registered(kind: type[nn.Module], layer: nn.Module) -> None:
    parametrize.register_parametrization(layer, "weight", kind())


KINDS: dict[str, Callable[[nn.Module], Any]] = {
    "one part": functools.partial(registered, Twice),
    "two parts": functools.partial(registered, Added),
    "weight_norm": weight_norm,
    "weight_norm of columns": functools.partial(weight_norm, dim=1),
    "spectral_norm": spectral_norm,
    "spectral_norm in three iterations": functools.partial(spectral_norm, n_power_iterations=3),
    "spectral_norm of columns": functools.partial(spectral_norm, dim=1),
    "orthogonal": orthogonal,
    "orthogonal by cayley": functools.partial(orthogonal, orthogonal_map="cayley"),
    "orthogonal by householder": functools.partial(orthogonal, orthogonal_map="householder"),
}
"""Functions that parametrize the weight of a layer."""
FORMER: dict[str, Callable[[nn.Module], Any]] = {
    "former weight_norm": nn.utils.weight_norm,
    "former spectral_norm": nn.utils.spectral_norm,
}


def model(rank: Rank) -> nn.Sequential:
    """Create two layers with an activation between them, which are the same on each rank."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).to(rank.device, torch.float64)
    with torch.no_grad():
        for i, parameter in enumerate(module.parameters()):
            parameter.copy_(dyadic(*parameter.shape, key=i, dtype=torch.float64))
    return module


def batch(rank: Rank, part: int, number: int) -> torch.Tensor:
    return dyadic(2, 4, key=(part, number), dtype=torch.float64).to(rank.device)


@requirement(
    "DDP-PARAMETRIZE-4840",
    "A backward after several forwards of a replicated module with a parametrized weight has one device's gradients.",
    source="torch.nn.utils.parametrizations; torch/nn/utils/parametrizations.py: 'backpropagating through two forward "
    "passes'; torch.nn.parallel.DistributedDataParallel",
)
@pytest.mark.world(2)
def test_several_forwards(world: World) -> None:
    """Subtract the results of two forwards, as for real and generated samples, with buffers sent or not."""

    def made(rank: Rank, kind: str) -> nn.Sequential:
        module = model(rank)
        torch.manual_seed(0)  # spectral_norm begins with random vectors
        (KINDS | FORMER)[kind](module[0])
        return module

    def body(rank: Rank) -> None:
        ways: list[dict[str, Any]] = [{"broadcast_buffers": False}]
        if runs_with(">=2.12"):  # before, the broadcast of a buffer counts as a change of it (DDP-BUF-11)
            ways.append({})
        for kind, options in zip([*KINDS, *FORMER], itertools.cycle(ways), strict=False):
            module, alone = made(rank, kind), made(rank, kind)
            replicated = DistributedDataParallel(module, **options)
            for step in range(2):
                replicated.zero_grad()
                alone.zero_grad()
                real, generated = (replicated(batch(rank, rank.index, number)).mean() for number in (0, 1))
                (real - 2 * generated).backward()
                for number, factor in ((0, 1), (1, -2)):
                    whole = torch.cat([batch(rank, part, number) for part in range(rank.size)])
                    (alone(whole).mean() * factor).backward()
                near = 256 * torch.finfo(torch.float64).eps
                for (name, p), q in zip(alone.named_parameters(), module.parameters(), strict=True):
                    what = f"{kind}, {options}, step {step}, {name}"
                    torch.testing.assert_close(q.grad, p.grad, rtol=near, atol=near, msg=lambda t, w=what: f"{w}: {t}")

    world.run(body)


@requirement(
    "DDP-PARAMETRIZE-4841",
    "All parts of a parametrized weight require gradients if the weight did, and training leaves frozen parts as they "
    "are.",
    source="torch.nn.utils.parametrize.register_parametrization; torch/nn/utils/parametrize.py: "
    "originali.requires_grad_(original.requires_grad)",
)
@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
@pytest.mark.world(2)
def test_frozen(world: World, frozen: bool) -> None:
    """Parametrize a weight in each way, and take two steps with the model."""

    def body(rank: Rank) -> None:
        for kind, parametrizes in KINDS.items():
            module = model(rank)
            module[0].requires_grad_(not frozen)
            parametrizes(module[0])
            parts = dict(module[0].parametrizations.named_parameters())  # type: ignore[union-attr,operator]
            assert parts, kind
            assert {name for name, p in parts.items() if p.requires_grad == frozen} == set(), kind
            before = {name: p.detach().clone() for name, p in parts.items()}
            replicated = DistributedDataParallel(module)
            sgd = torch.optim.SGD(replicated.parameters(), lr=0.25)
            for _ in range(2):
                sgd.zero_grad()
                replicated(batch(rank, rank.index, 0)).sum().backward()
                sgd.step()
            for name, p in parts.items():
                assert (p.grad is None) == frozen, (kind, name)
                assert torch.equal(p, before[name]) == frozen, (kind, name)

    world.run(body)


def normed(rank: Rank, norm: Callable[..., Any], start: float) -> nn.Sequential:
    """Create layers in two depths, which are normed by rows, by columns or as a whole, with values of their own."""
    module = nn.Sequential(
        norm(nn.Linear(4, 3), dim=0),
        nn.Sequential(norm(nn.Linear(3, 3), dim=None), nn.Sequential(norm(nn.Linear(3, 2), dim=1))),
    ).to(rank.device)
    with torch.no_grad():
        for i, parameter in enumerate(module.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape) % 5 + i + start)
    return module


@requirement(
    "DDP-PARAMETRIZE-4842",
    "A module with weight_norm loads state dicts of the former weight_norm, wherever the layer is in the model.",
    source="torch.nn.utils.weight_norm: 'Migration guide'; torch/nn/utils/parametrizations.py: weight_norm",
)
@pytest.mark.world(2)
def test_former_state_dicts(world: World) -> None:
    """Load layers alone, within others, or under DDP, and compare each part with what was saved."""

    def body(rank: Rank) -> None:
        wraps: dict[str, Callable[[nn.Sequential], Any]] = {
            "a layer": lambda module: module[0],
            "a model": lambda module: module,
            "under DDP": lambda module: DistributedDataParallel(module),
        }
        for what, wrap in wraps.items():
            old, new = wrap(normed(rank, nn.utils.weight_norm, 1)), wrap(normed(rank, weight_norm, 8))
            saved = old.state_dict()
            names = set(saved)
            new.load_state_dict(saved)
            assert set(saved) == names, what
            found = new.state_dict()
            for name, value in saved.items():
                for former, part in (("weight_g", "original0"), ("weight_v", "original1")):
                    name = name.replace(former, f"parametrizations.weight.{part}")
                assert torch.equal(found[name], value), f"{what}: {name}"
            assert len(found) == len(saved), what

    world.run(body)
