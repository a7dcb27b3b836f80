"""When fully_shard gathers the parameters of checkpointed layers, and reduces their gradients."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from harness import Rank, World, requirement
from suites.replicate_fsdp.schedule.test_sharded_schedule import FORWARD, LAYERS, Log, Model, check_gradients, step

CHECKPOINTS = {"each": ((0,), (1,), (2,)), "two": ((0,), (1, 2)), "all": ((0, 1, 2),)}
"""Which layers are in one checkpoint."""


class Checkpointed(Model):
    """A weight of its own, followed by checkpoints of layers."""

    def __init__(self, log: Log, checkpoints: tuple[tuple[int, ...], ...], reentrant: bool) -> None:
        super().__init__(log)
        self.checkpoints, self.reentrant = checkpoints, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.scaled(x)
        for indices in self.checkpoints:
            x = checkpoint(functools.partial(self.through, indices), x, use_reentrant=self.reentrant)
        return x * 1

    def through(self, indices: tuple[int, ...], x: torch.Tensor) -> torch.Tensor:
        """Run these layers, and one more operation."""
        for index in indices:
            x = self.layers[index](x)
        return x * 1


@requirement(
    "RFSDP-SHARDSCHED-800",
    "A backward that computes checkpointed layers again gathers each once, or none that were kept, and reduces each "
    "gradient once.",
    source="torch.distributed.fsdp.fully_shard: reshard_after_forward; torch.utils.checkpoint.checkpoint",
)
@pytest.mark.world(2)
def test_gathered_once(world: World) -> None:
    """Put one layer, two or all into a checkpoint of both kinds, and shard them after the forward or not."""

    def body(rank: Rank) -> None:
        for (name, checkpoints), reentrant in itertools.product(CHECKPOINTS.items(), (False, True)):
            for keep in (False, True) if reentrant == (name == "two") else (False,):
                what = f"{name}, {reentrant=}, {keep=}"
                log = Log(rank.size)
                model: Any = Checkpointed(log, checkpoints, reentrant).to(rank.device)
                for layer in model.layers:
                    fully_shard(layer, mesh=rank.mesh(), reshard_after_forward=not keep)
                fully_shard(model, mesh=rank.mesh())
                log.parameters = [module.weight for module in (*model.layers, model)]
                forward, backward = step(rank, model, log)
                assert forward == FORWARD, what
                once = [f"{event}{i}" for event in ("bfr" if keep else "bfgr") for i in range(LAYERS)]
                assert sorted(backward.split()) == sorted([*once, "b3", "r3"]), f"{what}: {backward}"
                check_gradients(rank, log, what, steps=1)

    world.run(body)


PREFETCHED: dict[tuple[bool, bool], str] = {
    (False, False): "g2 g1 b2 f2 r2 g0 b1 f1 r1 b0 f0 r0 b3 r3",
    (False, True): "g2 g1 g0 b2 f2 r2 b1 f1 r1 b0 f0 r0 b3 r3",
    (True, False): "g2 f2 g1 b2 r2 f1 g0 b1 r1 f0 b0 r0 b3 r3",
    (True, True): "g2 f2 g1 g0 b2 r2 f1 b1 r1 f0 b0 r0 b3 r3",
}
"""A backward through reentrant checkpoints or others, in which the last layer gathers the other two early or not."""


@requirement(
    "RFSDP-SHARDSCHED-3663",
    "In checkpoints as outside, a layer's backward first gathers the layer before it, or those that "
    "set_modules_to_backward_prefetch names.",
    source="torch.distributed.fsdp.FSDPModule.set_modules_to_backward_prefetch; torch.utils.checkpoint.checkpoint",
)
@pytest.mark.world(2)
def test_prefetched(world: World) -> None:
    """Put each layer into a checkpoint of its own, of both kinds, and run two steps with either order of gathers."""

    def body(rank: Rank) -> None:
        for (reentrant, early), expected in PREFETCHED.items():
            log = Log(rank.size)
            model: Any = Checkpointed(log, CHECKPOINTS["each"], reentrant).to(rank.device)
            for module in (*model.layers, model):
                fully_shard(module, mesh=rank.mesh())
            log.parameters = [module.weight for module in (*model.layers, model)]
            if early:
                model.layers[2].set_modules_to_backward_prefetch([model.layers[1], model.layers[0]])
            for number in range(2):
                what = f"{reentrant=}, {early=}, step {number}"
                assert step(rank, model, log) == (FORWARD, expected), what
                check_gradients(rank, log, what, steps=1)

    world.run(body)
