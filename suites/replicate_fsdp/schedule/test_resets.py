"""What reset_iter_state leaves of earlier forwards and backwards."""

from __future__ import annotations

import itertools
import operator
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from fixtures.layers import alone, layers, row, train
from fixtures.managed import ways
from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks import replicate_fsdp


@requirement(
    "RFSDP-RESET-02",
    "reset_iter_state discards gradients that were kept for a later all-reduce, in every module below the root.",
    source="torch.distributed.fsdp.FSDPModule.reset_iter_state: 'including HSDP partial-reduce-accumulation state'",
)
@pytest.mark.needs(torch="torch.distributed.fsdp.FSDPModule.reset_iter_state")
@pytest.mark.world(2)
def test_partial_sums(world: World) -> None:
    """Run one or two backwards without all-reduce, of all layers or one, reset, and run steps with it."""

    def body(rank: Rank) -> None:
        right = alone(rank.size)
        every = ways(rank)
        for way in ("replicated", "hybrid"):
            for dtype in (None, torch.float64):
                model: Any = layers(rank.device)
                policy = MixedPrecisionPolicy(reduce_dtype=dtype)
                for layer in model:
                    every[way](layer, mp_policy=policy)
                every[way](model, mp_policy=policy)
                for held, times in ((model, 1), (model[0], 1), (model[1], 2), (model, 2)):
                    held.set_requires_all_reduce(False)
                    for _ in range(times):
                        model(row(rank.index).to(rank.device)).sum().backward()
                    model.reset_iter_state()
                    model.zero_grad()
                    model.set_requires_all_reduce(True)
                    for synced in (1, 2):
                        found = train(model, rank.index)
                        assert found == [[synced * x for x in gradient] for gradient in right], (way, dtype, times)
                    model.zero_grad()

    world.run(body)


class Interrupted(Exception):
    """What interrupts a step."""


def interrupt(*args: Any) -> None:
    """Interrupt the step in which this hook is called."""
    raise Interrupted


def interrupt_backward(module: Any, inputs: Any, output: Any) -> None:
    """Interrupt the backward of the forward in which this hook is called."""
    output.register_hook(interrupt)


@requirement(
    "RFSDP-RESET-03",
    "After an error in a forward or a backward, reset_iter_state leaves in every module the sharded parameters that it "
    "had before.",
    source="torch.distributed.fsdp.FSDPModule.reset_iter_state: 'reshards every parameter group'",
)
@pytest.mark.needs(torch="torch.distributed.fsdp.FSDPModule.reset_iter_state")
@pytest.mark.world(2)
def test_parameters(world: World) -> None:
    """Interrupt a forward, an evaluation or a backward of layers in one group, in two or in a list, kept or not."""

    def body(rank: Rank) -> None:
        right, values = alone(rank.size), [p.detach() for p in layers().parameters()]
        for (way, managed), grouped in itertools.product(ways(rank).items(), ("together", "each", "listed")):
            for kept in (False,) if way == "replicated" else (None, True, False):
                options = {} if kept is None or way == "replicated" else {"reshard_after_forward": not kept}
                model: Any = layers(rank.device)
                for part in {"together": [], "each": list(model), "listed": [list(model)]}[grouped]:
                    managed(part, **options)
                managed(model, **options)
                before = list(model.parameters())
                sgd = torch.optim.SGD(model.parameters(), lr=0.0)
                for started, where in enumerate(
                    ("before-0", "after-0", "before-1", "after-1", "evaluation", "backward")
                ):
                    what = f"{way}, {grouped}, {kept=}, {where}"
                    if where == "backward":
                        hook = model[0].register_forward_hook(interrupt_backward)
                    elif where.startswith("before"):
                        hook = model[int(where[-1])].register_forward_pre_hook(interrupt)
                    else:
                        hook = model[1 if where == "evaluation" else int(where[-1])].register_forward_hook(interrupt)
                    with torch.set_grad_enabled(where != "evaluation"), pytest.raises(Interrupted):
                        model(row(rank.index).to(rank.device)).sum().backward()
                    hook.remove()
                    for _ in range(2):
                        model.reset_iter_state()
                        after = list(model.parameters())
                        assert len(after) == len(before), what
                        assert all(map(operator.is_, before, after)), what
                    assert all(isinstance(p, DTensor) for p in after), what
                    found = [replicate_fsdp.whole(p).cpu() for p in after]
                    assert all(map(torch.equal, values, found)), what
                    sgd.zero_grad()
                    # PyTorch 2.13 keeps gradients of a backward that stopped before their group was reduced.
                    if started % 2 and (where != "backward" or grouped == "each"):
                        assert train(model, rank.index) == right, what
                        sgd.step()
                        sgd.zero_grad()

    world.run(body)


@requirement(
    "RFSDP-RESET-01",
    "After a failed forward or backward, reset_iter_state makes the next step average without leftovers of the failed "
    "one.",
    source="torch.distributed.fsdp.FSDPModule: reset_iter_state",
)
@pytest.mark.needs(torch="torch.distributed.fsdp.FSDPModule.reset_iter_state")
@pytest.mark.world(2)
def test_gradients_of_a_group(world: World) -> None:
    """A backward is interrupted between two layers of one group, whose gradients are not yet reduced."""

    def body(rank: Rank) -> list[list[list[float]]]:
        found = []
        for way in ("replicated", "sharded"):
            model: Any = ways(rank)[way](layers(rank.device))
            hook = model[0].register_forward_hook(interrupt_backward)
            with pytest.raises(Interrupted):
                train(model, rank.index)
            hook.remove()
            model.reset_iter_state()
            model.zero_grad()
            found.append(train(model, rank.index))
        return found

    assert_on_ranks([[alone(2)] * 2] * 2, world.run(body))
