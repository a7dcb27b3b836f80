"""Gradients that a script keeps while its parameters get others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fixtures.layers import alone, layers, row
from fixtures.managed import ways
from harness import Rank, World, requirement
from harness.stacks import replicate_fsdp


def shard(gradient: torch.Tensor) -> torch.Tensor:
    """Return what this rank has of a gradient, in the gradient's memory."""
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient.detach()


def replace(model: Any, optimizer: Any) -> None:
    """Give each parameter a new gradient of zeros."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)


def remove(model: Any, optimizer: Any) -> None:
    """Give each parameter no gradient."""
    for parameter in model.parameters():
        parameter.grad = None


LEFT: dict[str, Callable[[Any, Any], None]] = {
    "module": lambda model, optimizer: model.zero_grad(),
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "removed": remove,
    "replaced": replace,
}
"""Ways to have the parameters leave their gradients."""
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "reduced": {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float64)},
    "computed": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float64)},
    "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
}


@requirement(
    "RFSDP-KEPT-9055",
    "A gradient that a script keeps has its values after later backwards, for which the parameter has none or another.",
    source="torch.nn.Module.zero_grad: set_to_none; torch.Tensor.grad; torch.distributed.fsdp.fully_shard; "
    "torch.nn.parallel.DistributedDataParallel",
)
@requirement(
    "RFSDP-KEPT-9056",
    "A change of a gradient that a parameter has left does not change the parameter's later gradients.",
    source="torch.nn.Module.zero_grad: set_to_none; torch.Tensor.grad; torch.distributed.fsdp.fully_shard; "
    "torch.nn.parallel.DistributedDataParallel",
)
@pytest.mark.parametrize("left", LEFT)
@pytest.mark.world(2)
def test_kept(world: World, left: str) -> None:
    """Run three backwards of layers in groups, keep the gradients or their shards, and change the first ones."""

    def body(rank: Rank) -> None:
        right = [alone((rank.size * step, rank.size * step + 1)) for step in range(3)]
        for way, manage in {"DDP": DistributedDataParallel, **ways(rank)}.items():
            for kind, options in OPTIONS.items() if way != "DDP" else [("plain", {})]:
                model: Any = layers(rank.device)
                if way != "DDP":
                    for layer in model:
                        manage(layer, **options)
                model = manage(model, **options)
                sgd = torch.optim.SGD(model.parameters(), lr=1.0)
                kept: list[list[torch.Tensor]] = []
                values: list[list[torch.Tensor]] = []
                for step, due in enumerate(right):
                    what = f"{way}, {kind}, backward {step}"
                    model(row(rank.size * step + rank.index).to(rank.device)).sum().backward()
                    found = replicate_fsdp.gradients(model).values()
                    assert [gradient.flatten().tolist() for gradient in found] == due, what
                    gradients = [parameter.grad for parameter in model.parameters()]
                    kept.append([shard(gradient) if step % 2 else gradient for gradient in gradients])
                    values.append([shard(gradient).clone() for gradient in gradients])
                    for each, value in zip(kept, values, strict=True):
                        assert all(map(torch.equal, map(shard, each), value)), what
                    LEFT[left](model, sgd)
                    if step == 1:
                        for gradient, value in zip(kept[0], values[0], strict=True):
                            shard(gradient).fill_(-99.0)
                            value.fill_(-99.0)

    world.run(body)
