"""loss_parallel where each sample has several targets: those of a sequence, or of the points of an image."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel

from fixtures.tensors import numbers
from harness import Rank, World, requirement

SHAPES = {
    "sequences": [(2, 6, 4), (3, 6, 1)],
    "lines": [(2, 6, 1, 4), (2, 6, 4, 1)],
    "images": [(2, 6, 2, 2), (2, 6, 2, 3)],
    "volumes": [(2, 6, 2, 2, 3)],
}
"""Shapes of logits by what they are of; classes are the second dimension."""


@requirement(
    "TP-LOSS-6600",
    "In loss_parallel, the cross-entropy of several targets for each sample has one device's loss and gradient.",
    source="torch.distributed.tensor.parallel.loss_parallel; torch.nn.functional.cross_entropy: '(N, C, d1, ...)'",
)
@pytest.mark.parametrize("kind", ["rest", "images"])
@pytest.mark.world(2)
def test_losses(world: World, kind: str) -> None:
    """Shard logits over the six classes; leave a target out, and take the mean, the sum, or each loss."""

    def body(rank: Rank) -> None:
        for name, shapes in SHAPES.items():
            for shape in shapes if (name == "images") == (kind == "images") else ():
                logits = (numbers(*shape) % 7 / 4).double().to(rank.device)
                targets = ((numbers(shape[0], *shape[2:]) ** 2) % 6).long().to(rank.device)
                targets.view(-1)[2] = -100
                for reduction in "mean", "sum", "none":
                    plain = logits.clone().requires_grad_()
                    expected = nn.functional.cross_entropy(plain, targets, reduction=reduction)
                    expected.sum().backward()
                    own: Any = distribute_tensor(logits, rank.mesh(), [Shard(1)], src_data_rank=None).requires_grad_()
                    with loss_parallel():
                        loss: Any = nn.functional.cross_entropy(own, targets, reduction=reduction)
                        loss.sum().backward()
                    what = f"{reduction} over {shape}"
                    assert torch.allclose(loss.full_tensor(), expected.detach(), rtol=1e-12, atol=1e-12), what
                    assert plain.grad is not None
                    near = torch.allclose(own.grad.full_tensor(), plain.grad, rtol=1e-12, atol=1e-12)
                    assert near, f"the gradient of the {what} differs"

    world.run(body)
