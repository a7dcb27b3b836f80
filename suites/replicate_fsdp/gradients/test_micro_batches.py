"""Gradients of several micro-batches under FSDP-replicate, with and without synchronization."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fixtures.layers import layer
from fixtures.micro_batches import PATTERNS, average, given
from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks import replicate_fsdp


@requirement(
    "RFSDP-ACC-02",
    "Gradients accumulated over micro-batches, with or without synchronization, are the average over ranks of "
    "their sum.",
    source="torch.distributed.fsdp.FSDPModule: set_requires_gradient_sync",
)
@pytest.mark.parametrize("groups", [False, True], ids=["one-group", "three-groups"])
@pytest.mark.world(2, 3)
def test_patterns(world: World, groups: bool) -> None:
    """Run two steps of every pattern; the layers' outputs are added."""

    def body(rank: Rank) -> dict[str, list[Any]]:
        gradients: dict[str, list[Any]] = {}
        for pattern in PATTERNS:
            model: Any = replicate_fsdp.apply(Branches(), rank, groups=groups)
            gradients[pattern] = []
            for _ in range(2):
                for number, sync in enumerate(pattern):
                    model.set_requires_gradient_sync(sync == "+")
                    x = torch.full((1, 2), given(rank.index, rank.size, number), device=rank.device)
                    model(x, (0, 1)).sum().backward()
                gradients[pattern].append([g.flatten().tolist() for g in replicate_fsdp.gradients(model).values()])
                model.zero_grad()
        return gradients

    right = {pattern: [[[average(world.size, len(pattern))] * 4] * 2] * 2 for pattern in PATTERNS}
    assert_on_ranks([right] * world.size, world.run(body))


class Branches(nn.Module):
    """Two layers, of which each forward uses the given ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = layer(), layer()

    def forward(self, x: torch.Tensor, used: tuple[int, ...]) -> torch.Tensor:
        """Map float[rows, 2] to float[rows, 2]: the sum of the used layers' outputs, or twice the input."""
        both = (self.first, self.second)
        return torch.stack([both[i](x) for i in used]).sum(0) if used else x * 2


@requirement(
    "RFSDP-ACC-03",
    "Gradients accumulated without synchronization are averaged even for parameters that the synchronized micro-"
    "batch does not use.",
    source="torch/distributed/fsdp/_fully_shard: FSDPParamGroup.post_backward",
)
@pytest.mark.parametrize("last", [(1,), ()], ids=["another-layer", "no-layer"])
@pytest.mark.parametrize("groups", [False, True], ids=["one-group", "three-groups"])
@pytest.mark.world(2, 3)
def test_unused_at_last(world: World, groups: bool, last: tuple[int, ...]) -> None:
    """The first layer runs without synchronization, the second or none with it, in three steps."""

    def body(rank: Rank) -> list[Any]:
        model: Any = replicate_fsdp.apply(Branches(), rank, groups=groups)
        x = torch.full((1, 2), given(rank.index, rank.size, 0), device=rank.device, requires_grad=True)
        gradients = []
        for _ in range(3):
            for synced, used in ((False, (0,)), (True, last)):
                model.set_requires_gradient_sync(synced)
                model(x, used).sum().backward()
            gradients.append([g.flatten().tolist() for g in replicate_fsdp.gradients(model).values()])
            model.zero_grad()
        return gradients

    right = average(world.size, 1)
    assert_on_ranks([[[[right] * 4] * (1 + len(last))] * 3] * world.size, world.run(body))


@requirement(
    "RFSDP-UNUSED-02",
    "A parameter that was never used has no gradient, and the optimizer leaves it unchanged.",
    source="torch/distributed/fsdp/_fully_shard: FSDPParamGroup.post_backward",
)
@pytest.mark.parametrize("groups", [False, True], ids=["one-group", "three-groups"])
@pytest.mark.world(1, 2)
def test_never_used(world: World, groups: bool) -> None:
    """The second layer is idle in two steps of SGD with weight decay, which changes every parameter with a gradient."""

    def body(rank: Rank) -> list[Any]:
        model: Any = replicate_fsdp.apply(Branches(), rank, groups=groups)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5, weight_decay=0.5)
        for number in range(2):
            optimizer.zero_grad()
            x = torch.full((1, 2), given(rank.index, rank.size, number), device=rank.device)
            model(x, (0,)).sum().backward()
            optimizer.step()
        weights = replicate_fsdp.parameters(model)
        return [model.second.weight.grad, weights["second.weight"].flatten().tolist()]

    assert_on_ranks([[None, [1.0] * 4]] * world.size, world.run(body))


@requirement(
    "RFSDP-FROZEN-01",
    "A frozen parameter stays frozen and has no gradient, while others are averaged.",
    source="torch/distributed/fsdp/_fully_shard/_fsdp_param.py: FSDPParam",
)
@pytest.mark.parametrize("groups", [False, True], ids=["one-group", "three-groups"])
@pytest.mark.world(1, 2)
def test_frozen(world: World, groups: bool) -> None:
    """Freeze the first of two used layers for two backwards."""

    def body(rank: Rank) -> list[Any]:
        module = Branches()
        module.first.requires_grad_(False)
        model: Any = replicate_fsdp.apply(module, rank, groups=groups)
        for number in range(2):
            x = torch.full((1, 2), given(rank.index, rank.size, number), device=rank.device)
            model(x, (0, 1)).sum().backward()
        flags = {name: (p.requires_grad, p.grad is None) for name, p in model.named_parameters()}
        return [flags, replicate_fsdp.gradients(model)["second.weight"].flatten().tolist()]

    flags = {"first.weight": (False, True), "second.weight": (True, False)}
    assert_on_ranks([[flags, [average(world.size, 2)] * 4]] * world.size, world.run(body))


@requirement(
    "RFSDP-INIT-01",
    "Replicating a model, its first forward and its first backward leave the random number generator's state "
    "unchanged.",
    source="torch/distributed/_composable/replicate_with_fsdp.py: replicate",
)
@pytest.mark.world(2)
def test_random_state(world: World) -> None:
    """Random numbers drawn after a first step equal those drawn without a model."""

    def body(rank: Rank) -> list[float]:
        module = Branches()
        torch.manual_seed(rank.index)
        model = replicate_fsdp.apply(module, rank)
        model(torch.ones(1, 2, device=rank.device), (0, 1)).sum().backward()
        drawn: Any = torch.rand(3).tolist()
        return list(drawn)

    for rank, numbers in enumerate(world.run(body)):
        torch.manual_seed(rank)
        assert numbers == torch.rand(3).tolist()
