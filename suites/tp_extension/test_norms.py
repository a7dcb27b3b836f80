"""Norms of DTensors over one dimension and over several, whichever is sharded."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.nn import functional

from fixtures.operators import close, floats
from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks import messages

OVER = {
    "the last": (((4, 6, 3), 1),),
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
    placements: tuple[Placement, ...] = (Shard(0), Shard(1), Shard(2), Replicate())

    def body(rank: Rank) -> list[str]:
        wrong = []
        for (whole, dimensions), weights, placement in itertools.product(OVER[over], counts, placements):
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


GIVEN: dict[str, tuple[bool, ...]] = {
    "alone": (True, False, False),
    "with a weight": (True, True, False),
    "with a bias": (True, False, True),
    "with both": (True, True, True),
}
"""Whether there is an input, a weight and a bias."""
BESIDE: tuple[tuple[Placement, ...], ...] = (
    (Shard(0), Shard(1)),
    (Shard(1), Shard(0)),
    (Shard(0), Shard(0)),
    (Replicate(), Shard(1)),
    (Shard(0), Replicate()),
)
"""Placements over two mesh dimensions that leave the last dimension whole."""
ALONG: tuple[tuple[Placement, ...], ...] = ((Shard(0), Shard(2)), (Shard(2), Replicate()), (Shard(2), Shard(2)))
"""Those that do not."""


@requirement(
    "TP-NORM-7150",
    "Over two mesh dimensions, a norm has one device's gradients, whichever of its input, weight and bias are trained.",
    source="torch.distributed.tensor.DTensor; torch.nn.functional: layer_norm, rms_norm; pytorch/pytorch#187373",
)
@requirement(
    "TP-NORM-7151",
    "A norm over dimensions that are whole on each rank communicates nothing, forward or backward.",
    source="torch.distributed.tensor.DTensor: issue communications whenever necessary",
)
@pytest.mark.parametrize(
    ("name", "given"),
    [("layer_norm", given) for given in GIVEN] + [("rms_norm", given) for given in ("alone", "with a weight")],
)
@pytest.mark.world(4)
def test_frozen(world: World, name: str, given: str) -> None:
    """Train each choice of what there is, of which the rest is frozen and gets no gradient; shard each dimension."""
    norm = NORMS[name][0]
    choices = [
        trained
        for trained in itertools.product((True, False), repeat=3)
        if any(trained) and all(there or not chosen for there, chosen in zip(GIVEN[given], trained, strict=True))
    ]
    layouts = BESIDE + (ALONG if name == "layer_norm" else ())  # rms_norm of such shards: TP-NORM-5045

    def body(rank: Rank) -> list[str]:
        mesh, wrong = rank.mesh(2, 2, names=("dp", "tp")), []
        gradient = floats(4, 6, 3, start=2).to(rank.device)
        for placements, trained in zip(layouts, itertools.cycle(choices), strict=False):
            plain: list[Any] = [
                x.to(rank.device).requires_grad_(chosen) if there else None
                for x, there, chosen in zip(
                    (floats(4, 6, 3), floats(3) + 1, floats(3) + 2), GIVEN[given], trained, strict=True
                )
            ]
            own: list[Any] = [
                distribute_tensor(x.detach(), mesh, [Replicate()] * 2 if i else placements).requires_grad_(trained[i])
                if GIVEN[given][i]
                else None
                for i, x in enumerate(plain)
            ]
            arriving = distribute_tensor(gradient, mesh, placements)
            of = 3 if name == "layer_norm" else 2
            expected, at = norm(plain[0], (3,), *plain[1:of]), messages.launched()
            expected.backward(gradient)
            what = f"{placements}, trained: {trained}"
            try:
                found = norm(own[0], (3,), *own[1:of])
                found.backward(arriving)
            except (RuntimeError, NotImplementedError) as error:
                wrong.append(f"{what}: {str(error).splitlines()[0]:.100}")
                continue
            if placements in BESIDE and messages.launched() != at:
                wrong.append(f"{what}: {messages.launched() - at} collectives")
            if not close(expected.detach(), found.full_tensor().detach()):
                wrong.append(f"{what}: values")
            for x, y in zip(plain, own, strict=True):
                if x is None:
                    continue
                if (x.grad is None) != (y.grad is None) or x.grad is not None and not close(x.grad, y.grad.full_tensor()):
                    wrong.append(f"{what}: gradient")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))
