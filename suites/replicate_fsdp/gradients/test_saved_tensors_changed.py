"""Tensors that are changed after they were saved for the backward of a managed module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import allow_mutation_on_saved_tensors
from torch.nn.parallel import DistributedDataParallel

from fixtures.managed import ways
from harness import Rank, World, requirement
from harness.stacks import replicate_fsdp


@requirement(
    "RFSDP-SAVED-3803",
    "Under allow_mutation_on_saved_tensors, gradients are those of the tensors as they were in the forward.",
    source="torch.autograd.graph.allow_mutation_on_saved_tensors",
)
@pytest.mark.parametrize("way", ["DDP", "replicated", "sharded", "hybrid"])
@pytest.mark.world(2)
def test_changed_inputs(world: World, way: str) -> None:
    """Change the input of a layer between forward and backward, in two steps."""

    def body(rank: Rank) -> None:
        model: Any = nn.Linear(4, 2, device=rank.device)
        model = DistributedDataParallel(model) if way == "DDP" else ways(rank)[way](model)
        for _ in range(2):
            with allow_mutation_on_saved_tensors():
                x = torch.full((1, 4), 1.0 + rank.index, device=rank.device)
                y = model(x)
                x.zero_()
                y.sum().backward()
            gradients = replicate_fsdp.gradients(model.module if way == "DDP" else model)
            found = {name: gradient.flatten().tolist() for name, gradient in gradients.items()}
            assert found == {"weight": [1.5] * 8, "bias": [1.0] * 2}
            model.zero_grad()

    world.run(body)
