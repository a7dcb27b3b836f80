"""Optimizers of remote parameters, and in the backward: they step as torch.optim's do, and keep nothing alive."""

from __future__ import annotations

import gc
import tempfile
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.autograd as distributed_autograd
from torch import nn
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer

from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks import replicate

KINDS = ["Adagrad", "Adam", "AdamW", "SGD", "RMSprop", "Rprop", "Adamax", "Adadelta"]


@requirement(
    "DDP-REMOTE-331",
    "DistributedOptimizer steps as the optimizer that it is given, and leaves parameters without a gradient alone.",
    source="torch.distributed.optim.DistributedOptimizer: 'applies the given optimizer'",
)
@pytest.mark.parametrize("unused", [False, True], ids=["all-used", "unused"])
@pytest.mark.parametrize("kinds", [KINDS[:1], KINDS[1:]], ids=["Adagrad", "others"])
@pytest.mark.world(1)
def test_unused(world: World, kinds: list[str], unused: bool) -> None:
    """Two steps with three parameters, of which the first has a gradient or not."""

    def body(rank: Rank) -> None:
        file = Path(tempfile.mkdtemp()) / "rpc"
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{file}")
        rpc.init_rpc("worker", rank=0, world_size=1, rpc_backend_options=options)
        try:
            for kind in kinds:
                found, right = ([nn.Parameter(torch.full((2,), i + 1.0)) for i in range(3)] for _ in range(2))
                remote = DistributedOptimizer(getattr(torch.optim, kind), [rpc.RRef(p) for p in found], lr=0.125)
                local: Any = getattr(torch.optim, kind)(right, lr=0.125)
                for _ in range(2):
                    with distributed_autograd.context() as context:  # type: ignore[attr-defined]
                        distributed_autograd.backward(context, [loss(found, unused)])
                        remote.step(context)
                    local.zero_grad()
                    loss(right, unused).backward()
                    local.step()
                assert [p.tolist() for p in found] == [p.tolist() for p in right], kind
        finally:
            rpc.shutdown()

    world.run(body)


def loss(parameters: list[nn.Parameter], unused: bool) -> torch.Tensor:
    of = [(2 * parameters[1]).sum(), -parameters[2].sum(), *([] if unused else [parameters[0].sum()])]
    return torch.stack(of).sum()


@requirement(
    "DDP-OPT-331",
    "A parameter with an optimizer in its backward is freed as others are.",
    source="torch.distributed.optim: apply_optimizer_in_backward: 'without changing its life-time'",
)
@pytest.mark.parametrize("optimized", [False, True], ids=["plain", "optimized"])
@pytest.mark.world(1)
def test_freed(world: World, optimized: bool) -> None:
    """A parameter that nothing else refers to."""

    def body(rank: Rank) -> bool:
        parameter = nn.Parameter(torch.ones(1, device=rank.device))
        if optimized:
            replicate.optimize_in_backward(torch.optim.SGD, [parameter], {"lr": 0.5})
        alive = weakref.ref(parameter)
        del parameter
        gc.collect()
        return alive() is None

    assert_on_ranks([True], world.run(body))
