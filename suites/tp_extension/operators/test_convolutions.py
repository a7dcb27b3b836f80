"""Convolutions of DTensors that are replicated, pending, or sharded over the batch or the width, with every option."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor

from fixtures.placements import MORE_OPERATORS
from harness import Rank, World, assert_on_ranks, assert_same, dyadic, requirement

pytestmark = pytest.mark.needs(torch=MORE_OPERATORS)
LAYERS: dict[str, tuple[type[nn.Module], dict[str, Any], tuple[int, ...]]] = {
    "line": (nn.Conv1d, {"kernel_size": 3, "padding": 1}, (4, 4, 7)),
    "image": (nn.Conv2d, {"kernel_size": 3, "padding": 1}, (4, 4, 5, 6)),
    "larger steps": (nn.Conv2d, {"kernel_size": 4, "stride": 4}, (2, 4, 8, 12)),
    "a kernel for each channel": (nn.Conv2d, {"kernel_size": 3, "padding": 1, "groups": 4}, (4, 4, 5, 6)),
    "gaps": (nn.Conv2d, {"kernel_size": (2, 3), "dilation": 2, "bias": False}, (3, 4, 5, 6)),
    "volume": (nn.Conv3d, {"kernel_size": 2, "padding": 1}, (2, 4, 3, 4, 3)),
    "transposed": (nn.ConvTranspose2d, {"kernel_size": 3, "stride": 2}, (2, 4, 3, 4)),
}
"""Layers of four channels with their options, and the sizes of their inputs."""


@requirement(
    "TP-CONV-01",
    "A convolution of a DTensor that is replicated or sharded over the batch has one device's output and gradients, "
    "with any options.",
    source="torch.distributed.tensor.DTensor; torch.nn: Conv1d, Conv2d, Conv3d; test_convolution_ops.py",
)
@pytest.mark.world(2)
def test_convolutions(world: World) -> None:
    """Inputs require a gradient or not; the gradient of the output arrives in the output's layout."""

    def body(rank: Rank) -> None:
        for name, (kind, options, shape) in LAYERS.items():
            plain: Any = kind(4, 4, **options).to(rank.device)
            with torch.no_grad():
                for key, parameter in enumerate(plain.parameters()):
                    parameter.copy_(dyadic(*parameter.shape, key=key, dtype=torch.float32, span=2))
            x = dyadic(*shape, key="x", dtype=torch.float32, span=2).to(rank.device)
            for layout in Replicate(), Shard(0):
                for grad in False, True:
                    what = f"{name}, {layout}, {grad=}"
                    plain.zero_grad()
                    one = x.clone().requires_grad_(grad)
                    right = plain(one)
                    weights = dyadic(*right.shape, key="w", dtype=torch.float32, span=2).to(rank.device)
                    (right * weights).sum().backward()
                    layer = distribute_module(copy.deepcopy(plain), rank.mesh())
                    layer.zero_grad()
                    given = distribute_tensor(x, rank.mesh(), [layout], src_data_rank=None).requires_grad_(grad)
                    found = layer(given)
                    assert found.placements == (layout,), what
                    assert_same(right.detach(), found.full_tensor().detach() + 0, what)
                    found.backward(distribute_tensor(weights, rank.mesh(), [layout], src_data_rank=None))
                    assert (given.grad is None) == (one.grad is None), what
                    pairs: list[Any] = [*zip(plain.parameters(), layer.parameters(), strict=True)]
                    pairs += [(one, given)] if grad else []
                    for i, (original, own) in enumerate(pairs):
                        assert_same(original.grad, own.grad.full_tensor() + 0, f"gradient {i} of {what}")

    world.run(body)


WIDE: dict[str, tuple[type[nn.Module], dict[str, Any], tuple[int, ...]]] = {
    "padding": (nn.Conv2d, {"kernel_size": 3, "padding": 1}, (4, 4, 5, 8)),
    "a kernel for each channel": (nn.Conv2d, {"kernel_size": 3, "padding": 1, "groups": 4}, (4, 4, 5, 8)),
    "larger steps": (nn.Conv2d, {"kernel_size": 2, "stride": 2}, (4, 4, 6, 8)),
    "a pixel": (nn.Conv2d, {"kernel_size": 1}, (4, 4, 5, 8)),
}
"""Layers of four channels, of which a shard of the width needs at most the pixels next to it, and sizes of inputs."""
OVER = {"the batch": Shard(0), "the width": Shard(3)}


@requirement(
    "TP-CONV-1000",
    "A convolution of images that are sharded over the batch or the width has one device's output and gradients.",
    source="torch.distributed.tensor.DTensor; torch.nn: Conv2d; test_convolution_ops.py",
)
@pytest.mark.parametrize("over", OVER)
@pytest.mark.world(2)
def test_sharded_images(world: World, over: str) -> None:
    """The gradient of the output arrives replicated."""

    def body(rank: Rank) -> list[str]:
        wrong = []
        for name, (kind, options, shape) in WIDE.items():
            plain: Any = kind(4, 4, **options).to(rank.device)
            with torch.no_grad():
                for key, parameter in enumerate(plain.parameters()):
                    parameter.copy_(dyadic(*parameter.shape, key=key, dtype=torch.float32, span=2))
            one = dyadic(*shape, key="x", dtype=torch.float32, span=2).to(rank.device).requires_grad_()
            layer = distribute_module(copy.deepcopy(plain), rank.mesh())
            given = distribute_tensor(one.detach(), rank.mesh(), [OVER[over]], src_data_rank=None).requires_grad_()
            due, found = plain(one), layer(given)
            if not same(due, found):
                wrong.append(f"{name}: {found.placements} with a part of {tuple(found.to_local().shape)}")
                continue  # whose gradient has no shape
            weights = dyadic(*due.shape, key="w", dtype=torch.float32, span=2).to(rank.device)
            due.backward(weights)
            found.backward(distribute_tensor(weights, rank.mesh(), [Replicate()], src_data_rank=None))
            pairs = zip((one, *plain.parameters()), (given, *layer.parameters()), strict=True)
            wrong += [f"{name}: gradient {i}" for i, (a, b) in enumerate(pairs) if not same(a.grad, b.grad)]
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


TRAINED = (("bias",), ("input", "bias"), ("input",), ("weight",), ("weight", "bias"), ("input", "weight"))


@requirement(
    "TP-CONV-1001",
    "The backward of a convolution of DTensors gives one device's gradients to whichever operands require one.",
    source="torch.distributed.tensor.DTensor; torch.nn.functional.conv2d",
)
@pytest.mark.parametrize("trained", TRAINED, ids=" and ".join)
@pytest.mark.world(2)
def test_frozen(world: World, trained: tuple[str, ...]) -> None:
    """Images are replicated or sharded over the batch; the weight or the bias may be frozen."""
    shapes = {"input": (4, 2, 5, 6), "weight": (3, 2, 3, 3), "bias": (3,)}

    def body(rank: Rank) -> list[str]:
        wrong = []
        for layout in Replicate(), Shard(0):
            whole, own = [], []
            for name, shape in shapes.items():
                tensor = dyadic(*shape, key=name, dtype=torch.float32, span=2).to(rank.device)
                placement = layout if name == "input" else Replicate()
                one = distribute_tensor(tensor, rank.mesh(), [placement], src_data_rank=None)
                whole.append(tensor.requires_grad_(name in trained))
                own.append(one.requires_grad_(name in trained))
            nn.functional.conv2d(*whole, padding=1).sum().backward()
            try:
                nn.functional.conv2d(*own, padding=1).sum().backward()
            except (RuntimeError, AssertionError) as e:
                wrong.append(f"{layout}: {e}")
                continue
            for name, one, other in zip(shapes, whole, own, strict=True):
                if name in trained and not same(one.grad, other.grad):
                    wrong.append(f"{layout}: gradient of {name}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


@requirement(
    "TP-CONV-5044",
    "A convolution of replicated operands or pending sums is one device's, or raises an error.",
    source="torch.distributed.tensor.DTensor; torch.nn.functional: conv1d, conv2d, conv3d",
)
@pytest.mark.parametrize("pending", ["none", "input", "weight", "bias"])
@pytest.mark.world(2)
def test_pending(world: World, pending: str) -> None:
    """A sum may be pending of one of them; a line, an image and a volume."""

    def body(rank: Rank) -> list[str]:
        wrong = []
        for dimensions, convolution in enumerate((nn.functional.conv1d, nn.functional.conv2d, nn.functional.conv3d), 1):
            whole, own = [], []
            for name, shape in {
                "input": (2, 2, *[4] * dimensions),
                "weight": (3, 2, *[3] * dimensions),
                "bias": (3,),
            }.items():
                part = dyadic(*shape, key=name, dtype=torch.float32, span=2).to(rank.device)
                placement = Partial() if name == pending else Replicate()
                whole.append(part * rank.size if name == pending else part)
                own.append(DTensor.from_local(part, rank.mesh(), [placement], run_check=False))
            try:
                found: Any = convolution(*own, padding=1)
            except (RuntimeError, NotImplementedError, AssertionError):
                continue
            if not same(convolution(*whole, padding=1), found):
                wrong.append(f"of {dimensions} dimensions: {found.placements}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


def same(due: Any, found: Any) -> bool:
    """Compare values and dtype with the whole of a DTensor, which may have a wrong shape."""
    return found is not None and due.dtype == found.dtype and torch.equal(due.detach(), found.full_tensor().detach())
