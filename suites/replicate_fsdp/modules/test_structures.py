"""Modules that share layers, take and return lists, or have buffers beside ignored parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fixtures.layers import layer
from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks import replicate_fsdp
from harness.stacks.replicate_fsdp import MESH, replicate

SOURCE = "torch/distributed/_composable/replicate_with_fsdp.py: replicate"


def read(model: nn.Module) -> dict[str, list[float]]:
    return {name: gradient.flatten().tolist() for name, gradient in replicate_fsdp.gradients(model).items()}


class Buffered(nn.Module):
    """A weight, an ignored weight, and a buffer that both are multiplied with."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.ignored = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        self.register_buffer("scale", torch.tensor([2.0, 3.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (self.weight + self.ignored) * self.scale


@requirement(
    "RFSDP-APPLY-10",
    "replicate moves parameters and buffers to the device of the mesh.",
    source=SOURCE,
)
@pytest.mark.parametrize("nested", [False, True], ids=["root", "nested"])
@pytest.mark.world(1, 2)
def test_moved(world: World, nested: bool) -> None:
    """Replicate a module that is on the host, alone or inside another, and run a step."""

    def body(rank: Rank) -> tuple[set[str], dict[str, list[float]]]:
        inner = Buffered()
        model = nn.Sequential(inner) if nested else inner
        if nested:
            replicate(inner, **{MESH: rank.mesh()})
        replicate(model, **{MESH: rank.mesh()})
        devices = {str(each.device.type) for each in (*model.parameters(), *model.buffers())}
        model(torch.full((2,), 1.0 + rank.index, device=rank.device)).sum().backward()
        assert devices == {rank.device.type}
        return {name.rpartition(".")[2] for name in dict(model.named_parameters())}, {
            name.rpartition(".")[2]: gradient for name, gradient in read(model).items()
        }

    mean = (world.size + 1) / 2
    gradient = [2.0 * mean, 3.0 * mean]
    expected = ({"weight", "ignored"}, {"weight": gradient, "ignored": gradient})
    assert_on_ranks([expected] * world.size, world.run(body))


@requirement(
    "RFSDP-IGN-03",
    "A buffer beside ignored parameters keeps its value, and the module computes with it.",
    source=f"{SOURCE}, ignored_params",
)
@pytest.mark.parametrize("every", [False, True], ids=["one-ignored", "all-ignored"])
@pytest.mark.world(2)
def test_buffers_beside_ignored(world: World, every: bool) -> None:
    """Ignore one of two parameters, or both; the buffer differs between ranks."""

    def body(rank: Rank) -> tuple[list[float], dict[str, list[float]]]:
        inner = Buffered().to(rank.device)
        inner.scale += rank.index
        model = nn.Sequential(inner, layer(rank.device))
        ignored = {inner.ignored, inner.weight} if every else {inner.ignored}
        replicate(model, **{MESH: rank.mesh()}, ignored_params=ignored)
        model(torch.ones(2, device=rank.device)).sum().backward()
        return inner.scale.tolist(), read(model)

    def expected(rank: int) -> tuple[list[float], dict[str, list[float]]]:
        scale, own, average = [2.0 + rank, 3.0 + rank], [2 * (2.0 + rank), 2 * (3.0 + rank)], [5.0, 7.0]
        return scale, {
            "0.weight": own if every else average,
            "0.ignored": own,
            "1.weight": [5.0, 7.0] * 2,
        }

    assert_on_ranks([expected(rank) for rank in range(2)], world.run(body))


@requirement(
    "RFSDP-OUT-04",
    "A module may take a list and return it with its results, whose gradients are averaged.",
    source=f"{SOURCE}: a replicated module is called like its class",
)
@pytest.mark.parametrize("grown", [False, True], ids=["replaced", "appended"])
@pytest.mark.world(2)
def test_list_in_and_out(world: World, grown: bool) -> None:
    """The module replaces or appends an element; the loss is computed from the list that it returns, in two steps."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer()

        def forward(self, xs: list[torch.Tensor]) -> list[torch.Tensor]:
            y = self.layer(xs[0])
            if grown:
                xs.append(y)
            else:
                xs[-1] = y
            return xs

    def body(rank: Rank) -> list[tuple[int, dict[str, list[float]]]]:
        model = replicate_fsdp.apply(Model(), rank, groups=False)
        steps = []
        for _ in range(2):
            ys = model([torch.full((1, 2), 1.0 + rank.index, device=rank.device)])
            assert type(ys) is list
            ys[-1].sum().backward()
            steps.append((len(ys), read(model)))
            model.zero_grad()
        return steps

    assert_on_ranks([[(2 if grown else 1, {"layer.weight": [1.5] * 4})] * 2] * 2, world.run(body))


@requirement(
    "RFSDP-TIED-02",
    "A replicated module under two replicated parents has the whole gradient of both uses.",
    source=SOURCE,
)
@pytest.mark.world(1, 2)
def test_two_parents(world: World) -> None:
    """Two containers, each replicated, hold one replicated layer; each container is used once, in two steps."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            shared = layer()
            self.first, self.second = nn.Sequential(shared, layer()), nn.Sequential(shared, layer())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.first(x) + self.second(x)
            return result

    def body(rank: Rank) -> list[dict[str, list[float]]]:
        model: Any = Model().to(rank.device)
        for module in (model.first[0], model.first, model.second, model):
            replicate(module, **{MESH: rank.mesh()})
        steps = []
        for _ in range(2):
            model(torch.full((1, 2), 1.0 + rank.index, device=rank.device)).sum().backward()
            steps.append(read(model))
            model.zero_grad()
        return steps

    mean = (world.size + 1) / 2
    own = {"first.0.weight": [4 * mean] * 4, "first.1.weight": [2 * mean] * 4, "second.1.weight": [2 * mean] * 4}
    assert_on_ranks([[own] * 2] * world.size, world.run(body))
