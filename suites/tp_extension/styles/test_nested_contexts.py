"""Contexts of tensor parallelism inside of one another."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel

from fixtures.operators import close, floats
from harness import Rank, World, assert_on_ranks, requirement


@requirement(
    "TP-LOSS-5046",
    "A loss in nested blocks of loss_parallel has one device's value and gradient, before the inner block as after it.",
    source="torch.distributed.tensor.parallel.loss_parallel",
)
@pytest.mark.parametrize("when", ["inside", "before", "after", "after an error"])
@pytest.mark.world(2)
def test_nested_loss_parallel(world: World, when: str) -> None:
    """Take the loss inside of the second context, or in the first one before or after it."""

    def body(rank: Rank) -> list[bool]:
        labels = torch.tensor([1, 5, 2], device=rank.device)
        plain = floats(3, 6).to(rank.device).requires_grad_()
        expected = nn.functional.cross_entropy(plain, labels)
        expected.backward()
        own = distribute_tensor(plain.detach(), rank.mesh(), [Shard(1)]).requires_grad_()

        def loss() -> Any:
            found: Any = nn.functional.cross_entropy(own, labels)
            found.backward()
            return found

        with loss_parallel():
            if when == "before":
                found = loss()
            with suppress(ZeroDivisionError), loss_parallel():
                if when == "inside":
                    found = loss()
                if when == "after an error":
                    raise ZeroDivisionError
            if when.startswith("after"):
                found = loss()
        gradient: Any = own.grad
        return [close(expected, found.full_tensor()), close(plain.grad, gradient.full_tensor())]  # type: ignore[arg-type]

    assert_on_ranks([[True, True]] * world.size, world.run(body))
