"""What DistributedDataParallel does to parameters by itself: low-precision copies, and optimizers in the backward.

PyTorch's code for both needs streams of a device, also where nothing is concurrent.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from harness import Rank, World, requirement
from harness.stacks import messages, replicate
from suites.replicate.reducer.test_buckets import of, sent

SOURCE = "torch.nn.parallel.DistributedDataParallel"
NARROW = torch.bfloat16
pytestmark = [pytest.mark.usefixtures("with_buckets"), pytest.mark.needs(features=["streams"])]


def layers(rank: Rank) -> nn.Sequential:
    """Create two layers of one weight, which is one, and a buffer of thirds."""
    module = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).to(rank.device)
    for parameter in module.parameters():
        nn.init.ones_(parameter)
    module.register_buffer("thirds", torch.full((2,), 1 / 3, device=rank.device))
    return module


def settled() -> None:
    """Wait for the device: DDP copies parameters on another stream, which does not wait for the current one."""
    torch.accelerator.synchronize()


class Looking(nn.Module):
    """A layer that keeps the dtypes of its weight and of its input."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.seen = layer, list[torch.dtype]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = [next(self.layer.parameters()).dtype, x.dtype]
        result: torch.Tensor = self.layer(x)
        return result


@requirement(
    "DDP-MP-01",
    "With mixed precision, a forward computes in param_dtype, and the backward leaves parameters in their own dtype.",
    source=f"{SOURCE}: mixed_precision",
)
@requirement(
    "DDP-MP-02",
    "With mixed precision, gradients are reduced in reduce_dtype and returned in the dtype of the parameters.",
    source=f"{SOURCE}: mixed_precision",
)
@requirement(
    "DDP-MP-03",
    "With mixed precision, buffers are cast to buffer_dtype.",
    source=f"{SOURCE}: mixed_precision",
)
@pytest.mark.parametrize("reduce", [NARROW, torch.float32], ids=["narrow", "wide"])
@pytest.mark.world(2)
def test_mixed_precision(world: World, reduce: torch.dtype) -> None:
    """Run three steps with an input that bfloat16 rounds; parameters are thirds, which need all digits of float32."""

    def body(rank: Rank) -> None:
        for buffer in (NARROW, torch.float32):
            module = layers(rank)
            module[1] = Looking(module[1])
            for parameter in module.parameters():
                nn.init.constant_(parameter, 1 / 3)
            policy = replicate.MixedPrecision(NARROW, reduce, buffer)
            model: Any = DistributedDataParallel(module, mixed_precision=policy)
            assert module.get_buffer("thirds").dtype == buffer
            third = torch.tensor(1 / 3)
            for number in range(3):
                settled()
                before = messages.mark()
                output = model(torch.full((1, 1), 1 + 2**-9, device=rank.device))
                right = third.to(NARROW) * third.to(NARROW)
                assert (output.dtype, float(output.detach())) == (NARROW, float(right)), number
                assert module[1].seen == [NARROW] * 2
                output.sum().backward()
                settled()
                found = sent(before)
                assert of(found, "all_reduce", "BFloat16") == ([2] if found and reduce == NARROW else []), number
                assert of(found, "all_reduce") == ([2] if found and reduce != NARROW else []), number
                for parameter in module.parameters():
                    gradient = parameter.grad
                    assert gradient is not None
                    assert (parameter.dtype, gradient.dtype) == (torch.float32, torch.float32)
                    assert float(parameter.detach()) == float(third), number
                model.zero_grad()

    world.run(body)


@requirement(
    "DDP-OPT-01",
    "An optimizer in the backward steps once with the average over ranks, and leaves its parameters no gradient.",
    source="torch.distributed.optim: apply_optimizer_in_backward; torch.nn.parallel.DistributedDataParallel",
)
@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
@pytest.mark.world(2)
def test_optimizers(world: World, views: bool) -> None:
    """Both layers, or the first alone, have SGD; one has momentum; three steps, in one bucket or in two."""

    def body(rank: Rank) -> None:
        for bucket in (25, 1e-6):
            for both in (True, False):
                module = layers(rank)
                first, second = module[0].weight, module[1].weight
                replicate.optimize_in_backward(torch.optim.SGD, [first], {"lr": 0.5})
                if both:
                    replicate.optimize_in_backward(torch.optim.SGD, [second], {"lr": 0.25, "momentum": 0.5})
                model: Any = DistributedDataParallel(module, bucket_cap_mb=bucket, gradient_as_bucket_view=views)
                weights, speed = [1.0, 1.0], 0.0
                for number in range(3):
                    model(torch.full((1, 1), 1.0 + rank.index, device=rank.device)).sum().backward()
                    settled()
                    gradients = [1.5 * weights[1], 1.5 * weights[0]]
                    speed = 0.5 * speed + gradients[1] if number else gradients[1]
                    weights = [weights[0] - 0.5 * gradients[0], weights[1] - 0.25 * speed * both]
                    what = f"{bucket=}, {both=}, step {number}"
                    assert [float(first.detach()), float(second.detach())] == weights, what
                    assert first.grad is None, what
                    assert second.grad is None or not both, what
                    model.zero_grad()

    world.run(body)
