"""Checkpoints in compiled code that draw random numbers, of tensors and of DTensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from harness import Rank, World, assert_same, requirement
from harness.stacks import dynamo

DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: functional.dropout(x, 0.5),
    "rand_like": lambda x: x * torch.rand_like(x),
    "randint_like": lambda x: x * torch.randint_like(x.detach(), 0, 100),
    "bernoulli": lambda x: x * torch.bernoulli(x.detach() / 4),
    "uniform_": lambda x: x * torch.empty_like(x).uniform_(1.0, 2.0),
}
"""Products of a tensor with random numbers."""


def _tensor(rank: Rank) -> Tensor:
    return torch.full((4, 8), 2.0, device=rank.device)


LAYOUTS: dict[str, Callable[[Rank], Tensor]] = {
    "tensor": _tensor,
    "shards": lambda rank: distribute_tensor(_tensor(rank), rank.mesh(), [Shard(0)], src_data_rank=None),
}


def _own(x: Tensor) -> Tensor:
    return x.detach().to_local() if isinstance(x, DTensor) else x.detach()


@requirement(
    "DYN-CKPT-6102",
    "The backward of a compiled checkpoint draws the random numbers of its forward again, as preserve_rng_state says.",
    source="torch.utils.checkpoint.checkpoint: preserve_rng_state; torch.compile",
)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("layout", [*LAYOUTS])
@pytest.mark.world(2)
def test_drawn_again(world: World, layout: str, backend: str) -> None:
    """Multiply tensors of twos with numbers of many kinds in one checkpoint: each gradient has half of the product."""

    def products(*given: Tensor) -> list[Tensor]:
        return [draw(x) for draw, x in zip(DRAWS.values(), given, strict=True)]

    def run(given: list[Tensor]) -> list[Tensor]:
        found: list[Tensor] = checkpoint(products, *given, use_reentrant=False)
        return found

    def body(rank: Rank) -> None:
        compiled: Any = dynamo.compiled(run, backend=backend)[0]
        for how, function in {"uncompiled": run, "compiled": compiled}.items():
            torch.manual_seed(7)
            given = [LAYOUTS[layout](rank).requires_grad_() for _ in DRAWS]
            results = function(given)
            sum((y.sum() for y in results[1:]), results[0].sum()).backward()
            for name, x, y in zip(DRAWS, given, results, strict=True):
                assert x.grad is not None
                assert_same(_own(y) / 2, _own(x.grad), f"{name}, {how}")

    world.run(body)
