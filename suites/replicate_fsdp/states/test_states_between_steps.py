"""State dicts that are got and set while parameters are unsharded, as after an evaluation."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

from fixtures.states import assert_equal, copied, whole
from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks import replicate_fsdp

STACKS: dict[str, Callable[[nn.Module, Rank], Any]] = {
    "sharded": lambda model, rank: fully_shard(model, mesh=rank.mesh()),
    "replicated": replicate_fsdp.apply,
}
"""How a model is put on ranks: a forward leaves its parameters unsharded until the backward."""

BEFORE: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "a step": lambda model, x: None,
    "an evaluation": lambda model, x: torch.no_grad()(model)(x),
    "a forward": lambda model, x: model(x),
    "unshard": lambda model, x: model.unshard(),
}
"""What comes before the states are got, and before they are set."""

PARTS = {"parts": {}, "flat": {"flatten_optimizer_state_dict": True}}
WHOLE = {"whole": {"full_state_dict": True}, "from rank 0": {"full_state_dict": True, "broadcast_from_rank0": True}}
WAYS: dict[str, dict[str, dict[str, bool]]] = {"model": PARTS, "model whole": WHOLE, "optimizer": PARTS | WHOLE}
"""Options with which the states of a model and of an optimizer are got and set."""


@requirement(
    "RFSDP-DICT-7300",
    "get_state_dict and its relatives take any options while a model's parameters are unsharded.",
    source="torch.distributed.checkpoint.state_dict: get_state_dict, set_state_dict; "
    "torch.distributed.fsdp.FSDPModule: unshard, reshard",
)
@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("of", WAYS)
@pytest.mark.world(2)
def test_unsharded(world: World, of: str, before: str) -> None:
    """Take a step, unshard the parameters in some way, get the states, set them to zeros, and load them."""
    unshard = BEFORE[before]

    def check(model: Any, x: torch.Tensor, options: StateDictOptions) -> None:
        adam = torch.optim.Adam(model.parameters(), lr=0.5)
        model(x).sum().backward()
        adam.step()
        adam.zero_grad()
        parameters = list(model.parameters())

        def values() -> list[Any]:
            return parameters if of != "optimizer" else [adam.state[p]["exp_avg"] for p in parameters]

        right = whole(values())
        unshard(model, x)
        got = get_optimizer_state_dict(model, adam, options=options) if of == "optimizer" else None
        state = copied(get_model_state_dict(model, options=options) if got is None else got)
        with torch.no_grad():
            for value in values():
                value.zero_()
        unshard(model, x)
        if of == "optimizer":
            set_optimizer_state_dict(model, adam, state, options=options)
        else:
            set_model_state_dict(model, state, options=options)
        assert_equal(right, whole(values()), "values")

    def body(rank: Rank) -> None:
        wrong = []
        for (stack, apply), (way, given) in itertools.product(STACKS.items(), WAYS[of].items()):
            model = apply(nn.Linear(2, 3).to(rank.device), rank)
            try:
                check(model, torch.ones(1, 2, device=rank.device), StateDictOptions(**given))
            except (AssertionError, KeyError, RuntimeError) as e:
                wrong.append(f"{stack}, {way}: {type(e).__name__}: {e}")
            model.reshard()
        assert not wrong, "; ".join(wrong)

    world.run(body)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.5),
    "counted": lambda parameters: torch.optim.Adam(parameters, lr=0.5),
}
"""Optimizers whose states have tensors of each parameter's shape, and another one, which counts steps."""


@requirement(
    "RFSDP-DICT-9344",
    "The full state of a sharded model's optimizer is wholly of the step at which it was got, whatever steps follow.",
    source="torch.distributed.checkpoint.state_dict.StateDictOptions: full_state_dict, cpu_offload: 'gathered'",
)
@pytest.mark.parametrize("offloaded", [False, True], ids=["there", "offloaded"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.world(2)
def test_full_states_kept(world: World, optimizer: str, offloaded: bool) -> None:
    """Get the state after a step of a linear layer, and take another step."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=offloaded)

    def body(rank: Rank) -> dict[str, list[float]]:
        model: Any = fully_shard(nn.Linear(2, 4, bias=False).to(rank.device), mesh=rank.mesh())
        steps = OPTIMIZERS[optimizer](model.parameters())
        kept: list[dict[str, torch.Tensor]] = []
        for _ in range(2):
            model(torch.ones(1, 2, device=rank.device)).sum().backward()
            steps.step()
            state = get_optimizer_state_dict(model, steps, options=options).get("state", {}).get("weight", {})
            kept = kept or [state, copied(state)]
        names = [name for name, value in kept[1].items() if not torch.equal(value, kept[0][name])]
        return {name: [float(each[name].flatten()[0]) for each in kept] for name in names}

    assert_on_ranks([{}] * 2, world.run(body))
