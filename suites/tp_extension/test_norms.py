"""Norms of DTensors over one dimension and over several, whichever is sharded."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn import functional

from fixtures.operators import close, floats
from harness import Rank, World, assert_on_ranks, requirement

OVER = {
    "the last": (((4, 6, 3), 1),),
    "the last of heads": (((2, 5, 4, 3), 1), ((2, 3, 4, 2, 3), 1)),
    "the last two of heads": (((2, 2, 4, 3, 5), 2),),
    "the last two": (((4, 6, 3), 2), ((4, 3, 6), 2)),
    "all": (((4, 6, 3), 3),),
}
"""Shapes, and how many of their last dimensions are normalized."""
NORMS: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "layer_norm": (functional.layer_norm, (0, 2)),
    "rms_norm": (functional.rms_norm, (0, 1)),
}
"""Norms, and how many tensors of weights they take: none, or a weight, or a weight and a bias."""


@requirement(
    "TP-NORM-5045",
    "A norm over the last dimensions of a DTensor has one device's results and gradients, for any placement.",
    source="torch.distributed.tensor.DTensor; torch.nn.functional: layer_norm, rms_norm",
)
@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.world(2)
def test_norms(world: World, name: str, over: str) -> None:
    """Shard each dimension, or none; with weights, and without."""
    norm, counts = NORMS[name]

    def body(rank: Rank) -> list[str]:
        wrong = []
        ways = [(whole, n, p) for whole, n in OVER[over] for p in (*map(Shard, range(len(whole))), Replicate())]
        for (whole, dimensions, placement), weights in itertools.product(ways, counts):
            shape = whole[-dimensions:]
            plain = [floats(*whole), *(floats(*shape) + i for i in range(weights))]
            plain = [x.to(rank.device).requires_grad_() for x in plain]
            expected = norm(plain[0], shape, *plain[1:])
            expected.square().sum().backward()
            own: list[Any] = [
                distribute_tensor(x.detach(), rank.mesh(), [Replicate() if i else placement]).requires_grad_()
                for i, x in enumerate(plain)
            ]
            what = f"{placement} of {whole} with {weights} weights"
            try:
                found = norm(own[0], shape, *own[1:])
                found.square().sum().backward()
            except (RuntimeError, NotImplementedError) as error:
                wrong.append(f"{what}: {str(error).splitlines()[0]:.100}")
                continue
            if not close(expected, found.full_tensor()):
                wrong.append(f"{what}: values")
            if not all(close(x.grad, y.grad.full_tensor()) for x, y in zip(plain, own, strict=True)):
                wrong.append(f"{what}: gradients")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))
