"""Tensor-parallel models under FSDP, compiled, with and without checkpointed layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from harness import Rank, World, assert_same, dyadic, requirement
from harness.stacks import dynamo


class Block(nn.Module):
    """Two layers, one after the other, whose numbers depend on a key."""

    def __init__(self, key: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 4)
        for name, parameter in self.named_parameters():
            with torch.no_grad():
                parameter.copy_(dyadic(*parameter.shape, key=(name, key), dtype=torch.float32, span=2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map float[rows, 4] to float[rows, 4]."""
        result: torch.Tensor = self.second(torch.relu(self.first(x)))
        return result


@requirement(
    "DYN-GRAD-66",
    "A compiled tensor-parallel model under FSDP, with or without checkpointed layers, has the outputs and gradients "
    "of the uncompiled one.",
    source="torch.compile; torch.distributed.tensor.parallel; torch.distributed.fsdp; torch.utils.checkpoint; "
    "test_dtensor_compile.py: test_2d_fsdp_tp_ac_compile",
)
@pytest.mark.world(4)
def test_checkpointed(world: World) -> None:
    """Train two blocks for two steps, with a checkpoint around none, one or both of them."""

    def body(rank: Rank) -> None:
        mesh = rank.mesh(2, 2, names=("dp", "tp"))
        plan: dict[str, Any] = {}
        for number in range(2):
            plan |= {f"{number}.first": ColwiseParallel(), f"{number}.second": RowwiseParallel()}

        def model(kind: str, checkpoints: int) -> Any:
            layers: Any = parallelize_module(nn.Sequential(Block(0), Block(1)).to(rank.device), mesh["tp"], plan)
            for number in range(checkpoints):
                layers[number] = dynamo.checkpointed(layers[number])
            if kind == "fully_shard":
                return fully_shard(layers, mesh=mesh["dp"])
            return FullyShardedDataParallel(layers, device_mesh=mesh["dp"], device_id=rank.device, use_orig_params=True)

        for kind, checkpoints in (("FSDP1", 0), ("FSDP1", 1), ("fully_shard", 2)):
            what = f"{kind}, {checkpoints} checkpoints"
            plain, other = model(kind, checkpoints), model(kind, checkpoints)
            function, counter = dynamo.compiled(other, fullgraph=False)
            for step in range(2):
                x = dyadic(4, 4, key=(step, mesh["dp"].get_local_rank()), dtype=torch.float32, span=2).to(rank.device)
                results = []
                for module, run in ((plain, plain), (other, function)):
                    y = run(x)
                    (y * x).sum().backward()
                    results.append([(y + 0).detach(), *changed(module)])
                for number, (right, found) in enumerate(zip(*results, strict=True)):
                    assert_same(right, found, f"{what}, step {step}, tensor {number}")
            assert counter.graphs > 0, what

    world.run(body)


def changed(model: nn.Module) -> list[torch.Tensor]:
    """Subtract parts of the gradients, clear these, and return what each rank had of them."""
    gradients = []
    for p in model.parameters():
        if p.grad is not None:
            gradients.append(p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad)
            with torch.no_grad():
                p.sub_(p.grad / 1024)
            p.grad = None
    assert gradients
    return gradients
