"""Layers under FSDP1 whose backward computes their forward again, or whose activations wait on the host."""

from __future__ import annotations

import itertools
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu

from fixtures.tensors import numbers
from fixtures.wrapped import STRATEGIES, whole, wrapped
from harness import Rank, World, assert_same_all, requirement
from harness.stacks.dynamo import checkpointed


def layers() -> list[nn.Module]:
    """Return three linear layers of small whole numbers, in which a step is exact."""
    found = [nn.Linear(inputs, 3, dtype=torch.float64) for inputs in (2, 3, 3)]
    with torch.no_grad():
        for layer in found:
            for parameter in layer.parameters():
                parameter.copy_(numbers(*parameter.shape) % 3 - 1)
    return list(found)


@requirement(
    "TP-GRAD-3702",
    "A model of FSDP modules that are checkpointed inside or around, reentrantly or not, trains as on one device, "
    "wherever its activations are kept.",
    source="torch.distributed.fsdp.FullyShardedDataParallel; torch.utils.checkpoint.checkpoint: use_reentrant; "
    "torch.autograd.graph.save_on_cpu",
)
@pytest.mark.world(2)
def test_checkpointed_layers(world: World) -> None:
    """Combine strategies with checkpoints inside of FSDP modules, around them, or both; keep every second's on host."""

    def body(rank: Rank) -> None:
        rows = [torch.tensor([[1.0, 2.0 + i]], dtype=torch.float64, device=rank.device) for i in range(2)]
        alone = nn.Sequential(*layers()).to(rank.device)
        torch.stack([alone(row).sum() for row in rows]).mean().backward()
        torch.optim.SGD(alone.parameters(), lr=0.5).step()
        expected = {name: p.detach().cpu() for name, p in alone.named_parameters()}
        ways = itertools.product((False, True), STRATEGIES, (True, False), ("inside", "around", "both"))
        for (reentrant, strategy, original, where), on_host in zip(ways, itertools.cycle((False, True)), strict=False):
            parts: list[nn.Module] = []
            for layer in layers():
                inner = layer if where == "around" else checkpointed(layer, reentrant=reentrant)
                part: nn.Module = wrapped(rank, inner, sharding_strategy=strategy, use_orig_params=original)
                parts.append(part if where == "inside" else checkpointed(part, reentrant=reentrant))
            model = wrapped(rank, nn.Sequential(*parts), sharding_strategy=strategy, use_orig_params=original)
            sgd = torch.optim.SGD(model.parameters(), lr=0.5)
            row = rows[rank.index].clone().requires_grad_(reentrant)  # else a reentrant checkpoint has no backward
            with save_on_cpu() if on_host else nullcontext():
                result = model(row).sum()
            result.backward()
            sgd.step()
            found = {name.replace("_checkpoint_wrapped_module.", ""): p.cpu() for name, p in whole(model).items()}
            assert_same_all(expected, found, f"{reentrant=}, {strategy}, {original=}, {where}, {on_host=}")

    world.run(body)
