"""Copies of DistributedDataParallel modules that were trained or have hooks: their gradients are averaged too."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from fixtures.delayed import waited
from harness import Rank, World, assert_on_ranks, requirement

SOURCE = "torch.nn.parallel.DistributedDataParallel: __getstate__, __setstate__"
pytestmark = pytest.mark.usefixtures("with_buckets")


def fourfold(state, bucket):  # type: ignore[no-untyped-def]  # DDP rejects string annotations
    """Give four times the gradients of the rank."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer() * 4)
    return future


def layers(rank: Rank) -> Any:
    module = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(2)))
    for parameter in module.parameters():
        nn.init.ones_(parameter)
    return module.to(rank.device)


def gradients(rank: Rank, model: Any) -> list[float]:
    model.zero_grad()
    with waited():
        model(torch.full((1, 1), 1.0 + rank.index, device=rank.device)).sum().backward()
    return [float(p.grad) for p in model.parameters()]


@requirement(
    "DDP-COPY-333",
    "A copy of a DDP module averages its gradients, also if the original was trained before, with any options.",
    source=SOURCE,
)
@pytest.mark.parametrize("graph", ["changing", "static"])
@pytest.mark.parametrize("trained", [False, True], ids=["new", "trained"])
@pytest.mark.world(2)
def test_trained(world: World, trained: bool, graph: str) -> None:
    """A deep copy and a pickled one, in two steps each."""

    def body(rank: Rank) -> list[list[float]]:
        model: Any = DistributedDataParallel(layers(rank), static_graph=graph == "static")
        if trained:
            gradients(rank, model)
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        return [gradients(rank, copied) for copied in copies for _ in range(2)]

    assert_on_ranks([[[1.5, 1.5]] * 4] * 2, world.run(body))


@requirement(
    "DDP-COPY-334",
    "A copy of a DDP module has its communication hook and its delayed parameters.",
    source=SOURCE,
)
@pytest.mark.parametrize("option", ["none", "hook", "delayed"])
@pytest.mark.world(2)
def test_options(world: World, option: str) -> None:
    """The original and a deep copy of it, in a step each."""

    def body(rank: Rank) -> list[list[float]]:
        module = layers(rank)
        delayed = {
            "delay_all_reduce_named_params": [("1.weight", module[1].weight)],
            "param_to_hook_all_reduce": module[0].weight,
        }
        model: Any = DistributedDataParallel(module, **delayed if option == "delayed" else {})
        if option == "hook":
            model.register_comm_hook(None, fourfold)
        return [gradients(rank, each) for each in (model, copy.deepcopy(model))]

    right = {rank: [[4.0 * (1 + rank)] * 2] * 2 if option == "hook" else [[1.5, 1.5]] * 2 for rank in range(2)}
    assert_on_ranks([right[0], right[1]], world.run(body))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda given: torch.optim.SGD(given, lr=0.5, momentum=0.5),
    "Adam": lambda given: torch.optim.Adam(given, lr=0.5),
    "AdamW": lambda given: torch.optim.AdamW(given, lr=0.5, amsgrad=True),
    "ZeroRedundancyOptimizer": lambda given: ZeroRedundancyOptimizer(given, torch.optim.SGD, lr=0.5),
    "PostLocalSGDOptimizer": lambda given: PostLocalSGDOptimizer(
        torch.optim.SGD(given, lr=0.5), PeriodicModelAverager(2)
    ),
}


@requirement(
    "DDP-COPY-9409",
    "Optimizers that are copied with their DDP modules take the steps of the copies, which keep no original alive.",
    source=f"{SOURCE}; torch.optim.Optimizer: __getstate__, __setstate__; copy.deepcopy: memo; "
    "torch.distributed.optim: ZeroRedundancyOptimizer, PostLocalSGDOptimizer",
)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
@pytest.mark.world(2)
def test_copied_with_optimizers(world: World, way: str, kind: str) -> None:
    """Copy a model with its optimizer and schedule before or after steps, train both in turn, and drop the original."""
    copied: Any = copy.deepcopy if way == "deepcopy" else lambda both: pickle.loads(pickle.dumps(both))

    def body(rank: Rank) -> None:
        def step(pair: Any) -> list[float]:
            model, optimizer, schedule = pair
            gradients(rank, model)
            optimizer.step()
            schedule.step()
            return [float(p) for p in model.parameters()]

        for trained in False, True:
            runs = []  # of the original alone, of the original beside a copy, and of the copy
            for copies in (False, True):
                model: Any = DistributedDataParallel(layers(rank))
                optimizer = OPTIMIZERS[kind](model.parameters())
                pair: Any = (model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
                before = [step(pair) for _ in range(2 * trained)]
                other: Any = copied(pair) if copies else None
                runs.append([*before, *(step(pair) for _ in range(2))])
                if copies:
                    runs.append([*before, *(step(other) for _ in range(2))])
                    assert other[1].param_groups[0]["params"][0] is other[0].module[0].weight
                    first = [weakref.ref(each) for each in (model, model.module, model.module[0].weight, optimizer)]
                    del model, optimizer, pair
                    gc.collect()
                    assert [each() for each in first] == [None] * 4, trained
                    assert step(other) != runs[-1][-1], trained
            assert runs[0] == runs[1] == runs[2], trained

    world.run(body)
