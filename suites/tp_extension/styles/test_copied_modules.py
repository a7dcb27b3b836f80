"""Copies of parallel modules with their optimizers, and of sharded parameters with all that belongs to them."""

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
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fixtures.copying import reloaded
from fixtures.operators import floats
from harness import Rank, World, assert_same, requirement

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda given: torch.optim.SGD(given, lr=0.25, momentum=0.5),
    "Adam": lambda given: torch.optim.Adam(given, lr=0.25, amsgrad=True),
    "not foreach": lambda given: torch.optim.AdamW(given, lr=0.25, foreach=False),
}


@requirement(
    "TP-PLAN-9410",
    "Optimizers copied with their parallel modules take the steps of the copies, which keep no original alive.",
    source="torch.distributed.tensor.parallel.parallelize_module; torch.optim.Optimizer: __getstate__, __setstate__; "
    "copy.deepcopy: memo",
)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.world(2)
def test_copied_with_optimizers(world: World, kind: str) -> None:
    """Copy both before or after steps, train copy and original in turn, and the copy on when the original is gone."""

    def body(rank: Rank) -> None:
        x = floats(2, 4).to(rank.device)

        def made() -> Any:
            model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)).double().to(rank.device)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.copy_(floats(*parameter.shape) / 8)
            parallelize_module(model, rank.mesh(), {"0": ColwiseParallel(), "1": RowwiseParallel()})
            return model, OPTIMIZERS[kind](model.parameters())

        def step(pair: Any) -> list[Any]:
            model, optimizer = pair
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            return [parameter.full_tensor().tolist() for parameter in model.parameters()]

        for trained in range(2):
            alone = made()
            right = [step(alone) for _ in range(trained + 3)][trained:]
            pair = made()
            for _ in range(trained):
                step(pair)
            other = copy.deepcopy(pair)
            for number in range(2):
                assert (step(other), step(pair)) == (right[number], right[number]), (trained, number)
            model, optimizer = pair
            first = [weakref.ref(each) for each in (model, model[0], model[0].weight, optimizer)]
            del model, optimizer, pair
            gc.collect()
            assert [each() for each in first] == [None] * 4, trained
            assert step(other) == right[2], trained

    world.run(body)


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": lambda given: [copy.copy(given[0])] * 2,
    "deepcopy": copy.deepcopy,
    "pickle": lambda given: pickle.loads(pickle.dumps(given)),
    "save": reloaded,
}


@requirement(
    "TP-MOVE-9411",
    "A deep or saved copy of a sharded parameter has memory, attributes and a gradient of its own, a flat one the "
    "original's.",
    source="torch.Tensor.__deepcopy__: grad, __dict__; torch.save; copy.copy: 'a new compound object'",
)
@requirement(
    "TP-MOVE-9412",
    "A copy of a sharded parameter calls no hooks of its original, which it does not keep alive.",
    source="torch.Tensor.__deepcopy__; torch.Tensor.register_hook; torch.save",
)
@pytest.mark.parametrize("way", COPIES)
@pytest.mark.world(2)
def test_copied_parameters(world: World, way: str) -> None:
    """Copy one twice in one list, with an attribute, a hook and a gradient, and go backward through both."""

    def body(rank: Rank) -> None:
        layouts: tuple[Placement, ...] = (Shard(0), Shard(1), Replicate())
        for layout in layouts:
            x: Any = nn.Parameter(distribute_tensor(floats(4, 3).to(rank.device), rank.mesh(), [layout]))
            x.note = ["attribute"]
            (x * 3).sum().backward()
            calls: list[str] = []
            x.register_hook(lambda gradient, calls=calls: calls.append("called"))
            one, other = COPIES[way]([x, x])
            flat, deep = way == "copy", way == "deepcopy"
            assert one is other, layout
            assert one is not x, layout
            assert isinstance(one, nn.Parameter), layout
            assert isinstance(one, DTensor), layout
            assert (one.note, one.note is x.note) == (["attribute"], flat), layout
            assert (one.to_local().data_ptr() == x.to_local().data_ptr()) == flat, layout
            assert one.is_leaf, layout
            assert one.requires_grad, layout
            if not flat:
                assert (one.grad is not None) == deep, layout
                if deep:
                    assert one.grad is not x.grad, layout
                    assert isinstance(one.grad, DTensor), layout
                one.grad = None
                (one * 2).sum().backward()
                assert calls == [], layout
                assert_same(torch.full((4, 3), 2.0).double(), one.grad.full_tensor().cpu() + 0, f"{layout}: copy")
                assert_same(torch.full((4, 3), 3.0).double(), x.grad.full_tensor().cpu() + 0, f"{layout}")
            with torch.no_grad():
                one.mul_(2)
            right = floats(4, 3).to(rank.device)
            assert_same(right * (2 if flat else 1), x.full_tensor().detach(), f"{layout}: the original")
            assert_same(right * 2, one.full_tensor().detach(), f"{layout}: its copy")
            gone = weakref.ref(x)
            del x
            gc.collect()
            assert gone() is None, layout

    world.run(body)
