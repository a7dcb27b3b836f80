"""Gradients of several micro-batches under composable DDP, with and without synchronization."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fixtures.layers import layer
from fixtures.micro_batches import PATTERNS, average, given
from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks import replicate


@requirement(
    "REPL-ACC-01",
    "Gradients accumulated over micro-batches, with or without synchronization, are the average over ranks of "
    "their sum.",
    source="torch/distributed/_composable/replicate.py: DDP.set_requires_gradient_sync",
)
@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.world(2, 3)
def test_patterns(world: World, pattern: str, views: bool) -> None:
    """Run two steps of every pattern."""

    def body(rank: Rank) -> list[Any]:
        model = replicate.apply(layer(), rank, gradient_as_bucket_view=views)
        gradients = []
        for _ in range(2):
            for number, sync in enumerate(pattern):
                model.set_requires_gradient_sync(sync == "+")
                x = torch.full((1, 2), given(rank.index, rank.size, number), device=rank.device)
                model(x).sum().backward()
            gradients.append(replicate.gradients(model)["weight"].flatten().tolist())
            model.zero_grad()
        return gradients

    right = average(world.size, len(pattern))
    assert_on_ranks([[[right] * 4] * 2] * world.size, world.run(body))


TIED: list[dict[str, bool]] = [
    {},
    {"gradient_as_bucket_view": True},
    {"find_unused_parameters": True},
    {"static_graph": True},
]


class Tied(nn.Module):
    """A weight that two layers share or, with ``within``, that one layer has under two names.

    ``left_out``: another such weight is never used.
    """

    def __init__(self, within: bool, left_out: bool = False) -> None:
        super().__init__()
        if left_out:
            self.left, self.out = layer(), layer()
            self.out.weight = self.left.weight
        self.first = layer()
        if within:
            self.first.register_parameter("other", self.first.weight)
        else:
            self.second = layer()
            self.second.weight = self.first.weight
        self.within = within

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map float[rows, 2] to float[rows, 2]: twice the sum of its columns."""
        if self.within:
            return self.first(x) + nn.functional.linear(x, self.first.other)
        return self.first(x) + self.second(x)  # type: ignore[no-any-return]


@requirement(
    "REPL-PAR-05",
    "A parameter with two names has the average over ranks of its whole gradient in every step.",
    source="torch/distributed/_composable/replicate.py: _ReplicateState._collect_params; pytorch/pytorch#41324",
)
@pytest.mark.parametrize("options", TIED, ids=str)
@pytest.mark.parametrize("within", [False, True], ids=["two-modules", "one-module"])
@pytest.mark.world(2, 3)
def test_two_names(world: World, within: bool, options: dict[str, bool]) -> None:
    """Two modules share a parameter, or one has two names for it; beside it, another may be unused under both."""

    def body(rank: Rank) -> list[Any]:
        with rank.device:  # moving a module may create new parameters, and two for a shared one
            tied = Tied(within, left_out=bool({"find_unused_parameters", "static_graph"} & options.keys()))
        model = replicate.apply(tied, rank, **options)
        gradients = []
        for number in range(3):
            x = torch.full((1, 2), given(rank.index, rank.size, number), device=rank.device)
            loss = model(x).sum()
            loss *= 2  # in place
            loss.backward()
            gradients.append([g.flatten().tolist() for g in replicate.gradients(model).values()])
            model.zero_grad()
        return gradients

    right = [[[4 * average(world.size, 1) * 10**number] * 4] for number in range(3)]
    assert_on_ranks([right] * world.size, world.run(body))


@requirement(
    "REPL-FROZEN-01",
    "A frozen parameter stays frozen: no gradient, same value.",
    source="torch/distributed/_composable/replicate.py: _ReplicateState.init",
)
@pytest.mark.world(1, 2)
def test_frozen(world: World) -> None:
    """Freeze the first of two layers for two steps."""

    def body(rank: Rank) -> list[Any]:
        module = nn.Sequential(layer(), layer())
        module[0].requires_grad_(False)
        model = replicate.apply(module, rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for number in range(2):
            optimizer.zero_grad()
            model(torch.full((1, 2), given(rank.index, rank.size, number), device=rank.device)).sum().backward()
            optimizer.step()
        frozen, trained = model.parameters()
        return [frozen.requires_grad, frozen.grad, frozen.flatten().tolist(), trained.requires_grad]

    assert_on_ranks([[False, None, [1.0] * 4, True]] * world.size, world.run(body))
