"""Copies of a DistributedDataParallel: they have the options of the original, and parameters of their own."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fixtures.copying import reloaded
from harness import Rank, World, requirement
from suites.replicate.reducer.test_buckets import NEWER, SAYS, STEPS, needs, of, recorded, step

pytestmark = pytest.mark.usefixtures("with_buckets")


def layers(unused: bool) -> nn.Sequential:
    """Create three layers of 1 KiB each, a buffer of five numbers, and with ``unused`` a parameter of no use."""
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(3)))
    for layer in model:
        nn.init.eye_(layer.weight)  # type: ignore[arg-type]
    if unused:
        model[2].register_parameter("spare", nn.Parameter(torch.eye(16)))
    model.register_buffer("numbers", torch.arange(5.0))
    return model


COPIES: list[Any] = [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), reloaded]


@requirement(
    "DDP-COPY-01",
    "A copy of a DDP module, or one that was pickled and loaded, sends in each step what the original would.",
    source="torch.nn.parallel.DistributedDataParallel: __getstate__, __setstate__",
)
@requirement(
    "DDP-COPY-02",
    "Training a copy of a DDP module averages its own gradients, and leaves the original as it was.",
    source="torch.nn.parallel.DistributedDataParallel: __getstate__, __setstate__",
)
@pytest.mark.parametrize("option", ["", *(pytest.param(o, marks=needs(o)) for o in NEWER)])
@pytest.mark.world(2)
def test_copies(world: World, option: str) -> None:
    """Copy a model by one way for each set of options, new or after a step; then use the copy for four steps."""

    def body(rank: Rank) -> None:
        if not recorded(rank):
            return
        cases = {option: NEWER[option]} if option else SAYS
        for number, (name, says) in enumerate(cases.items()):
            for copied in COPIES if option else COPIES[number % 3 :][:1]:
                original: Any = DistributedDataParallel(layers(says.unused).to(rank.device), **says.options)
                if number % 2 and "static_graph" not in says.options:
                    # PyTorch 2.13 never averages in the copy of a static graph that was made after a step
                    step(rank, original)
                    original.zero_grad()
                check(rank, name, copied(original), original)

    def check(rank: Rank, name: str, model: Any, original: Any) -> None:
        says = (SAYS | NEWER)[name]
        for number in range(STEPS):
            found = step(rank, model)
            if number in (0, STEPS - 1):
                buckets = says.first if number == 0 else says.later
                assert of(found, "all_reduce") == [256 * kib for kib in buckets], (name, number)
                assert len(of(found, "all_reduce", "Int")) == says.maps[number > 0], (name, number)
            assert of(found, "broadcast") == [5] * says.sent, (name, number)
            right = torch.full((16, 16), (rank.size + 1) / 2, device=rank.device)
            assert all(torch.equal(p.grad, right) for p in (layer.weight for layer in model.module)), (name, number)
            model.zero_grad()
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(7.0)
        eye = torch.eye(16, device=rank.device)
        assert all(torch.equal(p, eye) and p.grad is None for p in original.parameters()), name

    world.run(body)


@requirement(
    "DDP-COPY-03",
    "Copying or pickling a DDP module with another process group than the default one raises an error that names it.",
    source="torch.nn.parallel.DistributedDataParallel: __getstate__",
)
@pytest.mark.world(2)
def test_copies_of_groups(world: World) -> None:
    """Groups of both ranks and of one; the original trains on, and a copy of one with the default group averages."""

    def body(rank: Rank) -> None:
        both, alone = rank.subgroup([0, 1]), [rank.subgroup([0]), rank.subgroup([1])][rank.index]
        for group, mean in ((both, 1.5), (alone, 1.0 + rank.index)):
            model: Any = DistributedDataParallel(layers(False).to(rank.device), process_group=group)
            for used in (False, True):
                for copied in (*COPIES, copy.copy):
                    with pytest.raises(RuntimeError, match="default process group"):
                        copied(model)
                for holder in ([model], {"model": model}, nn.ModuleList([model])):
                    with pytest.raises(RuntimeError, match="default process group"):
                        copy.deepcopy(holder)
                step(rank, model)
                assert all(bool((p.grad == mean).all()) for p in model.parameters()), used
                assert copy.deepcopy(model.state_dict()).keys() == model.state_dict().keys()
                model.zero_grad()
        for group in (None, rank.group):
            model = copy.deepcopy(DistributedDataParallel(layers(False).to(rank.device), process_group=group))
            step(rank, model)
            assert all(bool((p.grad == 1.5).all()) for p in model.parameters())

    world.run(body)
