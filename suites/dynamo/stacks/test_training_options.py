"""Options of DDP and of fully_shard beside compiled code: training goes as it does uncompiled, on the same ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from harness import Rank, World, assert_same, dyadic, requirement
from harness.stacks import dynamo
from harness.stacks.tracing import Tracer

WIDTH = 4

Options = dict[str, Any]
Way = Callable[[nn.Module, Any], Any]


class Block(nn.Module):
    """A layer, a normalization by batch, and a layer whose weight is another one's, too."""

    def __init__(self, shared: nn.Linear) -> None:
        super().__init__()
        self.layer, self.norm, self.shared = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map float[n, 4] to float[n, 4]."""
        y: torch.Tensor = self.shared(self.norm(self.layer(x)).relu()) + x
        return y


class Net(nn.Module):
    """Blocks of which a call may leave out the last one, with a frozen layer at the end."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(shared) for _ in range(3))
        self.last = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        for number, parameter in enumerate(self.parameters()):
            with torch.no_grad():
                parameter.copy_(dyadic(*parameter.shape, key=number, dtype=torch.float32, span=2))

    def forward(self, x: torch.Tensor, *, blocks: int = 3) -> dict[str, torch.Tensor]:
        """Map float[n, 4] to float[n, 4]."""
        for block in self.blocks[:blocks]:
            x = block(x)
        return {"y": self.last(x), "x": x}


def whole(model: nn.Module, backend: Any) -> Any:
    """Compile a model by torch.compile."""
    return torch.compile(model, backend=backend)


def in_place(model: nn.Module, backend: Any) -> Any:
    """Compile a model by its own method."""
    model.compile(backend=backend)
    return model


def by_blocks(model: nn.Module, backend: Any) -> Any:
    """Compile each block of a model in place."""
    for block in getattr(model, "module", model).blocks:
        block.compile(backend=backend)
    return model


def plain(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return a copy of this rank's part."""
    if tensor is None:
        return None
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


STEPS = (
    {"rows": 3},
    {"rows": 3, "synced": False},
    {"rows": 3, "synced": False},
    {"rows": 3},
    {"rows": 3, "evaluated": True},
    {"rows": 3},
    {"rows": 3},
)
"""Training steps: those that are not synchronized accumulate gradients for the next that is."""


def trained(
    rank: Rank, model: nn.Module, function: Any, sync: Callable[[bool], Any], blocks: Callable[[int], int]
) -> list[tuple[str, Any]]:
    """Train by steps with clipping and a schedule of rates; return all that changes, by name."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5, momentum=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    seen: list[tuple[str, Any]] = []
    for number, step in enumerate(STEPS):
        x = dyadic(step["rows"], WIDTH, key=(rank.index, number), dtype=torch.float32).to(rank.device)
        if step.get("evaluated"):
            model.eval()
            with torch.no_grad():
                seen.append((f"output of step {number}", function(x)["y"].clone()))
            model.train()
            continue
        synced = step.get("synced", True)
        with sync(synced):
            result = function(x, blocks=blocks(number))
            (result["y"].sum() + result["x"].square().sum()).backward()
        seen.append((f"output of step {number}", plain(result["y"])))
        seen += [(f"gradient of {n} in step {number}", plain(p.grad)) for n, p in model.named_parameters()]
        if synced:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 8.0)
            seen.append((f"norm of step {number}", norm.full_tensor() if isinstance(norm, DTensor) else norm.clone()))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=number % 2 == 0)
        seen += [(f"{n} after step {number}", plain(b)) for n, b in model.named_buffers()]
        seen += [(f"{n} after step {number}", plain(p)) for n, p in model.named_parameters()]
    return seen


def compare(right: list[tuple[str, Any]], found: list[tuple[str, Any]], what: str) -> None:
    """Compare what two trainings have seen."""
    assert [name.replace("_orig_mod.", "") for name, _ in found] == [name for name, _ in right]
    for (name, one), (_, other) in zip(right, found, strict=True):
        assert (one is None) == (other is None), f"{what}: {name}"
        if one is not None:
            assert_same(one, other, f"{what}: {name}")


def largest(state: list[int], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Replace gradients by the largest of all ranks, and note their number."""
    state.append(bucket.buffer().numel())
    work = dist.all_reduce(bucket.buffer(), dist.ReduceOp.MAX, async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])


SMALL = 0.0001
DDP: dict[str, tuple[Options, Any, Way]] = {
    "own buffers": ({"broadcast_buffers": False}, default_hooks.fp16_compress_hook, whole),
    "views of small buckets": ({"gradient_as_bucket_view": True, "bucket_cap_mb": SMALL}, None, in_place),
    "unused blocks": ({"find_unused_parameters": True, "gradient_as_bucket_view": True}, largest, by_blocks),
}
"""Options of DDP, communication hooks, and ways to compile."""


@requirement(
    "DYN-DDP-5560",
    "A compiled model under DDP trains as the uncompiled one with unused parameters, views of buckets, own buffers, or "
    "hooks.",
    source="torch.nn.parallel.DistributedDataParallel: find_unused_parameters, gradient_as_bucket_view, "
    "broadcast_buffers, register_comm_hook; torch.compile; torch.nn.Module.compile",
)
@pytest.mark.world(2, timeout=120)
def test_ddp(world: World) -> None:
    """Accumulate, clip, schedule and evaluate; where parameters may be unused, some steps leave out a block."""

    def body(rank: Rank) -> None:
        for name, (options, hook, way) in DDP.items():
            found, states, ends = [], [], []
            for backend in (None, "eager"):
                torch.compiler.reset()
                state: Any = [] if hook is largest else None
                model = DistributedDataParallel(Net().to(rank.device), **options)
                if hook is not None:
                    model.register_comm_hook(state, lambda state, bucket, hook=hook: hook(state, bucket))  # type: ignore[misc]
                tracer = Tracer(backend or "eager")
                function = way(model, tracer) if backend else model

                def blocks(step: int, unused: bool = "find_unused_parameters" in options) -> int:
                    return 2 if step % 3 == 2 and unused else 3

                def sync(synced: bool, model: DistributedDataParallel = model) -> Any:
                    return nullcontext() if synced else model.no_sync()

                with dynamo.ddp_mode("bucket_cap_mb" not in options):  # it takes no buckets that small
                    found.append(trained(rank, model, function, sync, blocks))
                states.append(state)
                ends.append(len(tracer.graphs))
            compare(found[0], found[1], name)
            assert states[0] == states[1], f"{name}: what the hook has seen"
            assert ends[1], f"{name}: nothing was compiled"

    world.run(body)


LOW = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
SHARDED: dict[str, tuple[Options, Way]] = {
    "resharded": ({}, by_blocks),
    "mixed precision": ({"mp_policy": LOW}, by_blocks),
    "in one": ({"reshard_after_forward": False}, in_place),
}
"""Options of fully_shard, and ways to compile."""


@requirement(
    "DYN-FSDP-5560",
    "A model under fully_shard whose blocks are compiled trains as the uncompiled one, resharded or not, in mixed "
    "precision, or without synchronization.",
    source="torch.distributed.fsdp.fully_shard: reshard_after_forward, mp_policy; "
    "FSDPModule.set_requires_gradient_sync; torch.nn.Module.compile",
)
@pytest.mark.world(2, timeout=120)
def test_fully_shard(world: World) -> None:
    """Accumulate, clip, schedule and evaluate with each set of options."""

    def body(rank: Rank) -> None:
        for name, (options, way) in SHARDED.items():
            found, ends = [], []
            for backend in (None, "eager"):
                torch.compiler.reset()
                model: Any = Net().to(rank.device)
                for block in model.blocks[:2]:
                    fully_shard(block.layer, mesh=rank.mesh(), **options)
                fully_shard(model, mesh=rank.mesh())
                tracer = Tracer(backend or "eager")
                function = way(model, tracer) if backend else model

                def sync(synced: bool, model: Any = model) -> Any:
                    model.set_requires_gradient_sync(synced)
                    model.set_is_last_backward(synced)
                    return nullcontext()

                found.append(trained(rank, model, function, sync, lambda step: 3))
                ends.append(len(tracer.graphs))
            compare(found[0], found[1], name)
            assert ends[1]

    world.run(body)
