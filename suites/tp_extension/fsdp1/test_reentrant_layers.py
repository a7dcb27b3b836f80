"""Several layers of one FSDP1 module whose backward computes their forwards again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import ShardingStrategy

from fixtures.wrapped import STRATEGIES, Weight, own, wrapped
from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks.dynamo import checkpointed

WHOLE = STRATEGIES[2:]
CASES: dict[str, tuple[int, bool, tuple[ShardingStrategy, ...], tuple[bool, ...]]] = {
    "one": (1, True, STRATEGIES, (False, True)),
    "not reentrantly": (3, False, STRATEGIES, (False, True)),
    "whole and flat": (3, True, WHOLE, (False,)),
    "whole": (3, True, WHOLE, (True,)),
    "two": (2, True, STRATEGIES[:2], (False, True)),
    "three": (3, True, STRATEGIES[:2], (False, True)),
}
"""The number of layers, whether they are checkpointed reentrantly, strategies, and original parameters or not."""


@requirement(
    "TP-GRAD-4605",
    "The gradients of layers that are checkpointed within one FSDP module, reentrantly or not, are averaged.",
    source="torch/distributed/fsdp/_runtime_utils.py: 'For multiple applications of reentrant AC across submodules "
    "sharing the same FlatParameter'; pytorch/pytorch#89781",
)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.world(2)
def test_layers_of_one_module(world: World, case: str) -> None:
    """Train layers one after the other, of flat parameters or of original ones."""
    number, reentrant, strategies, originals = CASES[case]

    def body(rank: Rank) -> list[Any]:
        wrong = []
        for strategy in strategies:
            for original in originals:
                layers = [checkpointed(Weight(4, 0.25), reentrant=reentrant) for _ in range(number)]
                model = wrapped(rank, nn.Sequential(*layers), sharding_strategy=strategy, use_orig_params=original)
                try:
                    x = torch.full((1,), 1.0 + rank.index, device=rank.device, requires_grad=True)
                    model(x).sum().backward()
                except RuntimeError as e:
                    wrong.append(f"{strategy}, {original=}: RuntimeError: {e}")
                    continue
                if own(model) != {0.375}:  # the mean of a quarter of 1 and of 2
                    wrong.append(f"{strategy}, {original=}: {own(model)}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))
