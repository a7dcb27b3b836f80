"""What becomes of gradients if a script changes what a communication hook returned, and the reverse."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from harness import Rank, World, requirement


@requirement(
    "DDP-KEPT-9459",
    "A change of the tensor that a communication hook returned, after the backward, changes no gradient, nor does a "
    "later backward or a change of gradients change the tensor.",
    source="torch.nn.parallel.DistributedDataParallel: register_comm_hook, gradient_as_bucket_view; "
    "torch.distributed.GradBucket.buffer",
)
@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["done", "in flight"])
@pytest.mark.world(2)
def test_returned(world: World, asynchronous: bool, views: bool) -> None:
    """The hook returns the average of each bucket in a tensor of its own, which the test keeps."""

    def body(rank: Rank) -> None:
        kept: list[torch.Tensor] = []

        def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            own = bucket.buffer() / rank.size
            kept.append(own)
            if asynchronous:
                work: Any = dist.all_reduce(own, async_op=True)
                return work.get_future().then(lambda done: done.value()[0])  # type: ignore[no-any-return]
            dist.all_reduce(own)
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            future.set_result(own)
            return future

        layers = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)).to(rank.device)
        model = DistributedDataParallel(layers, bucket_cap_mb=1e-5, gradient_as_bucket_view=views)
        model.register_comm_hook(None, hook)
        for step in range(3):
            model.zero_grad()
            earlier = [tensor.clone() for tensor in kept]
            model(torch.full((1, 2), float(rank.index + step), device=rank.device)).sum().backward()
            what = f"step {step}"
            assert len(kept) > len(earlier), what
            assert all(map(torch.equal, kept, earlier)), f"{what}: a tensor of an earlier step changed"
            gradients = [parameter.grad for parameter in model.parameters()]
            values = [gradient.clone() for gradient in gradients if gradient is not None]
            assert sorted(torch.cat([t.flatten() for t in kept[len(earlier) :]]).tolist()) == sorted(
                torch.cat([value.flatten() for value in values]).tolist()
            ), what
            for tensor in kept:
                tensor.fill_(-99.0)
            for gradient, value in zip(gradients, values, strict=True):
                assert gradient is not None
                assert torch.equal(gradient, value), f"{what}: a gradient changed"
                gradient.fill_(-7.0)
            assert all((tensor == -99.0).all() for tensor in kept), f"{what}: the tensor changed"

    world.run(body)
