"""Optimizers of replicated modules: their forms, searches along a line, Muon, zero_grad, loaded states, memory."""

from __future__ import annotations

import copy
import gc
import itertools
import math
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fixtures.layers import alone, layers, row
from fixtures.rates import SCHEDULES
from harness import Rank, World, assert_on_ranks, dyadic, requirement

OPTIMIZERS = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
pytestmark = pytest.mark.usefixtures("with_buckets")


class Product(nn.Module):
    """Parameters of several dtypes, whose gradients are the input times other numbers."""

    def __init__(self, *dtypes: torch.dtype) -> None:
        super().__init__()
        self.every = nn.ParameterList(
            torch.tensor([1.0, -2.0], dtype=dtype) * (i + 1) for i, dtype in enumerate(dtypes)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([((2 - 1j) * p * x).real.sum() for p in self.every]).sum()


@requirement(
    "DDP-OPTIM-3500",
    "The forms of an optimizer take the same steps over a replicated module, also with complex parameters.",
    source="torch.optim: foreach, maximize; torch.nn.parallel.DistributedDataParallel",
)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.world(2)
def test_forms(world: World, name: str) -> None:
    """Take three steps with parameters that are real, complex or both, in either direction."""

    def body(rank: Rank) -> None:
        kinds = [(torch.float32,), (torch.complex64,), (torch.float32, torch.complex64)]
        for dtypes, maximize in itertools.product(kinds, (False, True)):
            found = []
            for foreach in (False, True):
                model: Any = DistributedDataParallel(Product(*dtypes).to(rank.device))
                words = {"lr": 0.125, "maximize": maximize, "foreach": foreach}
                optimizer = getattr(torch.optim, name)(model.parameters(), **words)
                for step in range(3):
                    model.zero_grad()
                    model(torch.tensor([1.0, step - 1.0], device=rank.device) * (rank.index + 1)).backward()
                    optimizer.step()
                found.append([p.detach() for p in model.parameters()])
            for one, other in zip(*found, strict=True):
                near = 64 * torch.finfo(torch.float32).eps
                torch.testing.assert_close(one, other, rtol=near, atol=near, msg=f"{dtypes}, {maximize=}")

    world.run(body)


@requirement(
    "DDP-OPTIM-3501",
    "A step of LBFGS evaluates a replicated module no more often than max_eval allows, but for a last time.",
    source="torch.optim.LBFGS: max_eval (int, optional): maximal number of function evaluations per optimization step",
)
@pytest.mark.parametrize("search", [None, "strong_wolfe"])
@pytest.mark.world(2)
def test_evaluations(world: World, search: str | None) -> None:
    """Count evaluations far away from the minimum, where a search along a line would take many."""

    def body(rank: Rank) -> None:
        for allowed in (1, 2, 4, 7):
            module = nn.Linear(4, 1, device=rank.device)
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
            model, count = DistributedDataParallel(module), 0
            optimizer = torch.optim.LBFGS(model.parameters(), lr=2.0**-10, max_eval=allowed, line_search_fn=search)
            x = torch.arange(8.0, device=rank.device).reshape(2, 4) + rank.index

            def closure(x: torch.Tensor = x, model: Any = model) -> torch.Tensor:
                nonlocal count
                count += 1
                model.zero_grad()
                loss: torch.Tensor = (model(x) - 1000).square().sum()
                loss.backward()
                return loss

            optimizer.step(closure)
            assert count <= allowed + 1, f"{count} evaluations of {allowed}"

    world.run(body)


@requirement(
    "DDP-OPTIM-4852",
    "Muon decays a weight by the rate that it is given, and adjusts its rate for the update to the weight's shape.",
    source="torch.optim.Muon: weight_decay, adjust_lr_fn",
)
@pytest.mark.needs(torch="torch.optim.Muon")
@pytest.mark.world(2)
def test_muon(world: World) -> None:
    """Step with tall, square and wide weights, with and without decay, by each adjustment of the rate."""

    def update(rank: Rank, shape: tuple[int, int], **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a weight and what a step adds to it, in float64."""
        module = nn.Linear(shape[1], shape[0], bias=False, device=rank.device)
        with torch.no_grad():
            module.weight.copy_(dyadic(*shape, key=shape, dtype=torch.float32))
        model: Any = DistributedDataParallel(module)
        before = module.weight.detach().double()
        x = dyadic(8, shape[1], key=(shape, rank.index), dtype=torch.float32).to(rank.device)
        model(x).square().sum().backward()
        torch.optim.Muon(model.parameters(), lr=0.25, **options).step()
        return before, module.weight.detach().double() - before

    def body(rank: Rank) -> None:
        near = {"rtol": 2.0**-16, "atol": 2.0**-16}
        for shape, nesterov in itertools.product(((8, 2), (4, 4), (2, 8)), (True, False)):
            ratios = {
                None: math.sqrt(max(1, shape[0] / shape[1])),
                "original": math.sqrt(max(1, shape[0] / shape[1])),
                "match_rms_adamw": 0.2 * math.sqrt(max(shape)),
            }
            directions = []
            for adjusts, ratio in ratios.items():
                what = f"{shape}, {nesterov=}, {adjusts}"
                words = {"adjust_lr_fn": adjusts, "nesterov": nesterov}
                weight, plain = update(rank, shape, weight_decay=0.0, **words)
                _, decayed = update(rank, shape, weight_decay=0.5, **words)
                decay = decayed - plain
                assert torch.allclose(decay, -0.25 * 0.5 * weight, **near), f"{what}: {decay / weight}"
                directions.append(plain / (0.25 * ratio))
                assert torch.allclose(directions[-1], directions[0], **near), f"{what}: {directions[-1]}"

    world.run(body)


CLEARED: list[dict[str, Any]] = [
    {},
    {"gradient_as_bucket_view": True},
    {"gradient_as_bucket_view": True, "static_graph": True},
    {"gradient_as_bucket_view": True, "find_unused_parameters": True},
]
FORMS: list[dict[str, Any]] = [{"foreach": False}, {"foreach": True}, {"fused": True}]


@requirement(
    "DDP-OPTIM-4853",
    "zero_grad of an optimizer sets gradients to None or to zeros, also of gradients that are views of buckets.",
    source="torch.optim.Optimizer.zero_grad: set_to_none; DistributedDataParallel: gradient_as_bucket_view",
)
@pytest.mark.world(2)
def test_cleared(world: World) -> None:
    """Clear gradients in each form of the optimizer before each of three steps, whose rate is zero."""

    def body(rank: Rank) -> None:
        for options, form, none in itertools.product(CLEARED, FORMS, (False, True)):
            what = f"{options}, {form}, {none=}"
            model: Any = DistributedDataParallel(layers(rank.device), **options)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0, **form)
            for step in range(3):
                optimizer.zero_grad(set_to_none=none)
                cleared = [p.grad if p.grad is None else p.grad.abs().max().item() for p in model.parameters()]
                assert cleared == [None if none or not step else 0.0] * 2, f"{what}, step {step}: {cleared}"
                model(row(rank.index).to(rank.device)).sum().backward()
                optimizer.step()
                found = [p.grad.flatten().tolist() for p in model.parameters()]
                assert found == alone(2), f"{what}, step {step}"

    world.run(body)


@requirement(
    "DDP-OPTIM-4854",
    "load_state_dict of an optimizer leaves the structure of the state dict as it is, so that others can load it too.",
    source="torch.optim.Optimizer.load_state_dict: 'shallow copy'; torch/optim/optimizer.py: deepcopy of param_groups",
)
@pytest.mark.parametrize("groups", ["one group", "two groups", "names"])
@pytest.mark.world(2)
def test_loaded_again(world: World, groups: str) -> None:
    """Load the state of each optimizer after two steps into two others, and compare their states with the first's."""

    def body(rank: Rank) -> None:
        for name in OPTIMIZERS:
            model: Any = DistributedDataParallel(layers(rank.device))

            def made(rate: float, model: Any = model, name: str = name) -> torch.optim.Optimizer:
                given: Any = list(model.named_parameters() if groups == "names" else model.parameters())
                if groups == "two groups":
                    given = [{"params": [p], "lr": rate * (i + 1)} for i, p in enumerate(given)]
                optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(given, lr=rate)
                return optimizer

            first = made(0.25)
            for _ in range(2):
                model(row(rank.index).to(rank.device)).sum().backward()
                first.step()
            state = first.state_dict()
            before = copy.deepcopy(state)
            for number in range(2):
                other = made(8.0)
                other.load_state_dict(state)
                numbers = {type(p) for group in state["param_groups"] for p in group["params"]}
                assert numbers == {int}, f"{name}, {number}: {numbers}"
                assert state["param_groups"] == before["param_groups"], f"{name}, {number}"
                assert state["state"].keys() == before["state"].keys(), f"{name}, {number}"
                assert [g["lr"] for g in other.param_groups] == [g["lr"] for g in first.param_groups], name
                assert set(other.state) == set(first.state), f"{name}, {number}"
                for p, values in first.state.items():
                    for key, value in values.items():
                        found = other.state[p][key]
                        same = torch.equal(found, value) if isinstance(value, torch.Tensor) else found == value
                        assert same, f"{name}, {number}, {key}"

    world.run(body)


@requirement(
    "DDP-OPTIM-4855",
    "An optimizer is freed with its state when its last reference is gone, also if it had a schedule, without a "
    "collection of cycles.",
    source="torch/optim/lr_scheduler.py: LRScheduler: opt_ref = ref(self.optimizer); pytorch/pytorch#20124",
)
@pytest.mark.world(2)
def test_freed(world: World) -> None:
    """Drop an optimizer after steps without a schedule and with each one, while the module stays."""

    def body(rank: Rank) -> list[str]:
        kept = []
        model: Any = DistributedDataParallel(layers(rank.device))
        gc.collect()
        gc.disable()
        try:
            for name in (None, *SCHEDULES):
                sgd: Any = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
                schedule: Any = SCHEDULES[name](sgd) if name else None
                for _ in range(2):
                    model(row(rank.index).to(rank.device)).sum().backward()
                    sgd.step()
                    if schedule is not None:
                        schedule.step()
                every = [weakref.ref(sgd), *(weakref.ref(state["momentum_buffer"]) for state in sgd.state.values())]
                del sgd, schedule
                kept += [str(name)] if any(ref() is not None for ref in every) else []
        finally:
            gc.enable()
        return kept

    assert_on_ranks([[]] * world.size, world.run(body))
