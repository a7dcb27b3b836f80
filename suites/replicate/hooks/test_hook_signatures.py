"""Communication hooks of every kind of callable, with the documented annotations in any form."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from harness import Rank, World, assert_on_ranks, requirement

SOURCE = "torch.nn.parallel.DistributedDataParallel.register_comm_hook"


def times(factor: int, state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer() * factor)
    return future


def annotated(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Give four times the gradients; by the import at the top, the annotations are strings."""
    return times(4, state, bucket)


def plain(state, bucket):  # type: ignore[no-untyped-def]
    return times(4, state, bucket)


def evaluated(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return times(4, state, bucket)


evaluated.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}


def four(factor, state, bucket):  # type: ignore[no-untyped-def]
    return times(factor, state, bucket)


class Hook:
    """An object that is called as a hook."""

    def __call__(self, state, bucket):  # type: ignore[no-untyped-def]
        """Give four times the gradients."""
        return times(4, state, bucket)


def replacing(state, bucket):  # type: ignore[no-untyped-def]
    """Give four times the gradients by way of a bucket of a narrower dtype."""
    narrow = bucket.buffer().half() * 4
    bucket.set_buffer(narrow)
    assert bucket.buffer().data_ptr() == narrow.data_ptr()
    assert [gradient.tolist() for gradient in bucket.gradients()] == [[[4.0]]]
    return times(1, state, bucket)


HOOKS: dict[str, Any] = {
    "plain": plain,
    "evaluated": evaluated,
    "strings": annotated,
    "partial": functools.partial(four, 4),
    "object": Hook(),
    "replacing": replacing,
}


@requirement(
    "REPL-HOOK-794",
    "A communication hook may have the documented annotations, also as strings.",
    source=f"{SOURCE}: hook(state: object, bucket: dist.GradBucket)",
)
@requirement(
    "REPL-HOOK-795",
    "A communication hook may be any callable object, such as a partial function.",
    source=f"{SOURCE}: hook (Callable)",
)
@requirement(
    "REPL-HOOK-5489",
    "A communication hook may replace the tensor of its bucket, of which its gradients are parts then.",
    source="torch.distributed.GradBucket.set_buffer: 'Replaces the tensor in the bucket with the input tensor buffer'",
)
@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.world(1)
def test_kinds(world: World, kind: str) -> None:
    """A step with a hook that gives four times the gradient."""

    def body(rank: Rank) -> float:
        model: Any = DistributedDataParallel(nn.Linear(1, 1, bias=False).to(rank.device))
        model.register_comm_hook(None, HOOKS[kind])
        model(torch.ones(1, 1, device=rank.device)).sum().backward()
        return float(model.module.weight.grad)

    assert_on_ranks([4.0], world.run(body))
