"""Steps of optimizers over replicated modules: their forms with complex parameters, and searches along a line."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from harness import Rank, World, requirement

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
