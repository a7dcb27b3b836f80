"""Training and evaluation of a replicated module: modes, gradients in either of them, and one rank that evaluates."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fixtures.layers import alone, layers, row, train
from harness import Rank, World, requirement
from harness.stacks import replicate

OPTIONS: list[dict[str, Any]] = [
    {},
    {"find_unused_parameters": True},
    {"static_graph": True},
    {"gradient_as_bucket_view": True},
]


@requirement(
    "REPL-MODE-01",
    "Gradients are averaged whichever modules are in evaluation mode, as they are in training mode.",
    source="torch.nn.Module.eval: 'only on certain modules'; torch/distributed/_composable/replicate.py: replicate",
)
@requirement(
    "DDP-MODE-01",
    "A DDP module's train or eval returns it, and sets the mode of it with every module in it.",
    source="torch.nn.Module: train, eval; torch.nn.parallel.DistributedDataParallel.train",
)
@pytest.mark.parametrize("how", ["DDP", "replicate"])
@pytest.mark.world(2)
def test_modes(world: World, how: str) -> None:
    """Run a step in each mode of the model and of a layer, from evaluation first, and accumulate in evaluation."""

    def body(rank: Rank) -> None:
        right, own = alone(2), alone([rank.index])
        for options in OPTIONS:
            module = layers().to(rank.device)
            model: Any = (
                replicate.replicate(module, **options)
                if how == "replicate"
                else DistributedDataParallel(module, **options)
            )
            for whole, layer in ((False, False), (True, True), (False, True), (True, False), (False, False)):
                what = f"{options}, model {whole}, layer {layer}"
                assert (model.train(whole) if whole else model.eval()) is model, what
                assert [m.training for m in model.modules()] == [whole] * len(list(model.modules())), what
                module[1].train(layer)
                assert train(model, rank.index) == right, what
                assert [m.training for m in (model, module[0], module[1])] == [whole, whole, layer], what
                model.zero_grad()
            with torch.no_grad():
                model(row(rank.index).to(rank.device))
            synced(model, False)
            assert train(model, rank.index) == own, f"{options}, without synchronization"
            synced(model, True)
            assert train(model, rank.index) == [[2 * x for x in gradient] for gradient in right], options

    def synced(model: Any, on: bool) -> None:
        if how == "replicate":
            model.set_requires_gradient_sync(on)
        else:
            model.require_backward_grad_sync = on

    world.run(body)


WITHOUT: dict[str, Callable[[], Any]] = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


@requirement(
    "DDP-MODE-4856",
    "A rank may run forwards without gradients alone, after any number of steps, if the module has no buffers.",
    source="torch.nn.parallel.DistributedDataParallel: forward; torch.no_grad; torch.inference_mode",
)
@pytest.mark.usefixtures("with_buckets")
@pytest.mark.world(2, timeout=5)
def test_alone_without_gradients(world: World) -> None:
    """After none, one or two steps, one rank evaluates in either mode and then waits for the other."""

    def body(rank: Rank) -> None:
        right = alone(2)
        ways: list[dict[str, Any]] = [*OPTIONS, {"bucket_cap_mb": 1e-6}]
        for number, (steps, options) in enumerate(itertools.product(range(3), ways)):
            what = f"{options}, {steps=}"
            model: Any = DistributedDataParallel(layers().to(rank.device), **options)
            for _ in range(steps):
                assert train(model, rank.index) == right, what
                model.zero_grad()
            if rank.index == number % 2:
                for (way, without), mode in itertools.product(WITHOUT.items(), (False, True)):
                    model.train(mode)
                    with without():
                        y = model(row(rank.index).to(rank.device))
                    assert not y.requires_grad, f"{what}, {way}"
            dist.barrier()
            for _ in range(2):
                assert train(model, rank.index) == right, what
                model.zero_grad()

    world.run(body)
