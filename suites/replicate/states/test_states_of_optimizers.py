"""Distributed state dicts of each kind of optimizer, before its first step and in a new one."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel

from fixtures.states import assert_equal
from harness import Rank, World, requirement

KINDS: dict[str, dict[str, dict[str, Any]]] = {
    "SparseAdam": {"SparseAdam": {}},
    "LBFGS": {"LBFGS": {"max_iter": 2}},
    "others": {
        **{name: {} for name in ("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "Muon")},
        **{name: {} for name in ("NAdam", "RAdam", "RMSprop", "Rprop", "SGD")},
        "SGD with momentum": {"momentum": 0.5},
    },
}
"""Optimizers of torch.optim: one whose gradients have to be sparse, one whose steps take a closure, and the others."""


def made(name: str, device: torch.device) -> tuple[Any, torch.optim.Optimizer]:
    """Return a replicated embedding, whose gradients are sparse where they have to be, and its optimizer."""
    module = nn.Embedding(4, 2, sparse=name == "SparseAdam", device=device)
    with torch.no_grad():
        module.weight.copy_(torch.arange(8.0).view(4, 2) / 4)
    options = {key: value for kinds in KINDS.values() for key, value in kinds.get(name, {}).items()}
    model = DistributedDataParallel(module)
    return model, getattr(torch.optim, name.split()[0])(model.parameters(), lr=0.5, **options)


def train(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Take a step, whose gradients are the same on all ranks."""

    def loss() -> torch.Tensor:
        model.zero_grad()
        result: torch.Tensor = model(torch.tensor([1, 2], device=next(model.parameters()).device)).square().sum()
        result.backward()
        return result

    optimizer.step(loss)  # type: ignore[arg-type]


@requirement(
    "REPL-STATE-7301",
    "The state of each optimizer of torch.optim can be got before its first step, and set in a new optimizer.",
    source="torch.distributed.checkpoint.state_dict: get_optimizer_state_dict, set_optimizer_state_dict; torch.optim",
)
@pytest.mark.parametrize("which", KINDS)
@pytest.mark.world(2)
def test_states_of_new_optimizers(world: World, which: str) -> None:
    """Get the state of an untrained optimizer of an embedding, and set that of a trained one in a new one."""

    def body(rank: Rank) -> None:
        wrong = []
        for name, again in itertools.product(KINDS[which], (False, True)):
            model, optimizer = made(name, rank.device)
            try:
                if again:
                    train(model, optimizer)
                right = copy.deepcopy(optimizer.state_dict()["state"])
                state = get_optimizer_state_dict(model, optimizer)
                if again:
                    model, optimizer = made(name, rank.device)
                    set_optimizer_state_dict(model, optimizer, state)
                    assert_equal(right, optimizer.state_dict()["state"], "state")
                assert optimizer.param_groups[0]["lr"] == 0.5
                assert [p.grad for p in model.parameters()] == [None]
            except (AssertionError, RuntimeError, TypeError) as e:
                wrong.append(f"{name}, {'set again' if again else 'got before a step'}: {type(e).__name__}: {e}")
        assert not wrong, "; ".join(wrong)

    world.run(body)
