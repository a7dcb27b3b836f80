"""Norms of DTensors over one dimension and over several, whichever is sharded, and other operators with weights."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from operator import gt
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.nn import functional

from fixtures.operators import close, floats
from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks import messages
from harness.stacks.limit import runs_with

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


def problems(
    what: str, function: Callable[..., Any], plain: list[torch.Tensor], mesh: Any, placements: Sequence[Placement]
) -> list[str]:
    """Return how results and gradients differ if the first argument is laid out and the others are replicated."""
    expected = function(*plain)
    expected.square().sum().backward()
    own: list[Any] = [
        distribute_tensor(x.detach(), mesh, [Replicate()] * mesh.ndim if i else placements).requires_grad_()
        for i, x in enumerate(plain)
    ]
    try:
        found = function(*own)
        found.square().sum().backward()
    except (RuntimeError, NotImplementedError) as error:
        return [f"{what}: {str(error).splitlines()[0]:.100}"]
    wrong = [] if close(expected, found.full_tensor()) else [f"{what}: values"]
    if not all(close(x.grad, y.grad.full_tensor()) for x, y in zip(plain, own, strict=True)):  # type: ignore[arg-type]
        wrong.append(f"{what}: gradients")
    return wrong


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

            def over_last(x: Any, *given: Any, shape: tuple[int, ...] = shape) -> Any:
                return norm(x, shape, *given)

            what = f"{placement} of {whole} with {weights} weights"
            wrong += problems(what, over_last, plain, rank.mesh(), [placement])
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


WHOLE = (Replicate(), Replicate())
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
    norm, there = NORMS[name][0], GIVEN[given]
    choices = [
        chosen
        for chosen in itertools.product((True, False), repeat=3)
        if any(chosen) and not any(map(gt, chosen, there))
    ]
    layouts = BESIDE + ALONG if name == "layer_norm" else BESIDE[::2]  # rms_norm along shards: TP-NORM-5045

    def body(rank: Rank) -> list[str]:
        mesh, wrong = rank.mesh(2, 2, names=("dp", "tp")), []
        x, gradient = (floats(4, 6, 3, start=start).to(rank.device) for start in (0, 2))
        whole = [x, *((floats(3) + i).to(rank.device) if there[i] else None for i in (1, 2))]
        for layout, trained in zip(layouts, itertools.cycle(choices), strict=False):
            what = f"{layout}, trained: {trained}"
            plain: list[Any] = [
                y if y is None else y.clone().requires_grad_(one) for y, one in zip(whole, trained, strict=True)
            ]
            own: list[Any] = [
                y if y is None else distribute_tensor(y, mesh, placements).requires_grad_(one)
                for y, placements, one in zip(whole, (layout, WHOLE, WHOLE), trained, strict=True)
            ]
            arriving, at = distribute_tensor(gradient, mesh, layout), messages.launched()
            expected = norm(plain[0], (3,), *plain[1 : 1 + max(NORMS[name][1])])
            expected.backward(gradient)
            try:
                found = norm(own[0], (3,), *own[1 : 1 + max(NORMS[name][1])])
                found.backward(arriving)
            except (RuntimeError, NotImplementedError) as error:
                wrong.append(f"{what}: {str(error).splitlines()[0]:.100}")
                continue
            if layout in BESIDE and messages.launched() != at:
                wrong.append(f"{what}: {messages.launched() - at} collectives")
            if not close(expected.detach(), found.full_tensor().detach()):
                wrong.append(f"{what}: values")
            for i, (y, of) in enumerate(zip(plain, own, strict=True)):
                if trained[i] and not (of.grad is not None and close(y.grad, of.grad.full_tensor())):
                    wrong.append(f"{what}: gradient {i}")
                if not trained[i] and of is not None and of.grad is not None:
                    wrong.append(f"{what}: a gradient {i} of what is frozen")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


WEIGHTED: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "layer_norm": (lambda x, weight, bias: functional.layer_norm(x, (6,), weight, bias), ((6,), (6,))),
    "rms_norm": (lambda x, weight: functional.rms_norm(x, (6,), weight), ((6,),)),
    "linear": (functional.linear, ((3, 6), (3,))),
    "matmul": (torch.matmul, ((6, 3),)),
    "sum": (torch.add, ((6,),)),
    "product": (torch.mul, ((6,),)),
}
"""Operators, and the shapes of the weights that they take after an input whose last dimension is six."""
PRODUCTS = ("linear", "matmul")
INNER = pytest.mark.skipif(runs_with("<2.12"), reason="unsupported: 2.11 refuses products of inputs sharded inside")
SPREAD: dict[int, list[tuple[tuple[int, ...], tuple[Placement, ...]]]] = {
    1: [(shape, (Shard(dim),)) for shape in ((4, 6), (2, 4, 6), (2, 2, 4, 6)) for dim in range(len(shape) - 1)],
    2: [((2, 2, 4, 6), over) for over in ((Shard(1), Shard(2)), (Replicate(), Shard(2)))],
}
"""Shapes of inputs and their placements on meshes of one dimension and of two."""


@requirement(
    "TP-WEIGHT-7007",
    "Weights that all parts of an input share have one device's gradients, whichever dimensions of the input are "
    "sharded.",
    source="torch.distributed.tensor.DTensor; torch.nn.functional: layer_norm, rms_norm, linear; torch: matmul, add",
)
@pytest.mark.parametrize("name", [pytest.param(name, marks=INNER if name in PRODUCTS else ()) for name in WEIGHTED])
@pytest.mark.world(2, 4)
def test_weights(world: World, name: str) -> None:
    """Shard each dimension before the last of inputs of two to four dimensions; with four ranks, two of them."""
    function, shapes = WEIGHTED[name]

    def body(rank: Rank) -> list[str]:
        wrong = []
        mesh = rank.mesh() if rank.size == 2 else rank.mesh(2, 2, names=("first", "second"))
        for whole, placements in SPREAD[mesh.ndim]:
            plain = [floats(*whole), *(floats(*shape, start=i) for i, shape in enumerate(shapes))]
            plain = [x.to(rank.device).requires_grad_() for x in plain]
            wrong += problems(f"{placements} of {whole}", function, plain, mesh, placements)
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))
