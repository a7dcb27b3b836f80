"""Copies of DistributedDataParallel modules that were trained or have hooks: their gradients are averaged too."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
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
