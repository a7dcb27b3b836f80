"""Gradients of managed modules that return what FSDP does not look into."""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fixtures.managed import ways
from harness import Rank, World, requirement
from harness.stacks import replicate_fsdp


class Found(nn.Module):
    """A weight that the derivative of its output does not need, returned in a way that may hide it."""

    def __init__(self, kind: str, how: str) -> None:
        super().__init__()
        self.weight, self.kind, self.how = nn.Parameter(torch.ones(2, 3)), kind, how

    def forward(self, x: torch.Tensor) -> Any:
        """Take rows of the weight, multiply it, or add it."""
        if self.kind == "rows":
            y = nn.functional.embedding(torch.tensor([1, 0], device=x.device), self.weight) * x
        else:
            y = self.weight * x if self.kind == "product" else self.weight + x
        kept = [y * 2]
        hidden: dict[str, Any] = {
            "object": SimpleNamespace(y=kept[0]),
            "function": lambda: kept[0],
            "generator": iter(kept),
            "list of an object": [SimpleNamespace(y=kept)],
        }
        return hidden[self.how]


class Whole(nn.Module):
    """A layer that hides its output, and one that does not."""

    def __init__(self, kind: str, how: str) -> None:
        super().__init__()
        self.inner, self.other, self.how = Found(kind, how), nn.Linear(3, 1, bias=False), how
        nn.init.ones_(self.other.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Find the output of the inner layer, and use it."""
        given = self.inner(x)
        find: dict[str, Callable[[], torch.Tensor]] = {
            "object": lambda: given.y,
            "function": lambda: given(),
            "generator": lambda: next(given),
            "list of an object": lambda: given[0].y[0],
        }
        result: torch.Tensor = self.other(find[self.how]())
        return result


@requirement(
    "RFSDP-OUT-800",
    "A managed module inside another has averaged gradients although it hides its output, if its backward needs no "
    "parameters.",
    source="torch/distributed/fsdp/_fully_shard: FSDPState._root_post_backward_final_callback",
)
@pytest.mark.world(2)
def test_hidden_inner_output(world: World) -> None:
    """Hide an inner module's output in each way, resharded after its forward or not; run two steps."""

    def body(rank: Rank) -> None:
        kinds = itertools.cycle(("rows", "product", "sum"))
        for (way, managed), how, kept in itertools.product(
            ways(rank).items(), ("object", "function", "generator", "list of an object"), (False, True)
        ):
            if way == "replicated" and kept:
                continue
            kind = next(kinds)
            model: Any = Whole(kind, how).to(rank.device)
            for module in (model.inner, model.other, model):
                managed(module, **({} if way == "replicated" else {"reshard_after_forward": not kept}))
            for step in range(2):
                model(torch.full((2, 3), 1.0 + rank.index, device=rank.device)).sum().backward()
                found = replicate_fsdp.gradients(model)["inner.weight"].flatten().tolist()
                assert found == [2.0 if kind == "sum" else 3.0] * 6, f"{way}, {kind}, {how}, {kept=}, step {step}"
                model.zero_grad()

    world.run(body)


CONTAINERS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "a list": (lambda y: [y], lambda given: given[0]),
    "an ordered dict": (lambda y: OrderedDict(y=y), lambda given: given["y"]),
    "a deque": (lambda y: deque([y]), lambda given: given[0]),
    "a dict of lists": (lambda y: {"y": [y]}, lambda given: given["y"][0]),
}


@requirement(
    "RFSDP-OUT-3709",
    "Gradients are averaged whatever container of Python a managed module inside another returns.",
    source="torch/distributed/fsdp/_fully_shard: FSDPState._register_pre_backward_hook",
)
@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.world(2)
def test_containers_inside(world: World, container: str) -> None:
    """The derivative of the inner module's output needs a parameter; run two steps."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = (nn.Linear(2, 2, bias=False) for _ in range(2))
            nn.init.ones_(self.first.weight)
            nn.init.ones_(self.last.weight)

        def forward(self, x: torch.Tensor) -> Any:
            return CONTAINERS[container][0](self.last(self.first(x)))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.own = Inner(), nn.Parameter(torch.ones(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return CONTAINERS[container][1](self.inner(x)) * self.own

    def body(rank: Rank) -> None:
        for way, managed in ways(rank).items():
            model: Any = Model().to(rank.device)
            managed(model.inner)
            managed(model)
            for step in range(2):
                model(torch.full((1, 2), 1.0 + rank.index, device=rank.device)).sum().backward()
                found = replicate_fsdp.gradients(model)
                expected = {"own": 6.0, "inner.first.weight": 3.0, "inner.last.weight": 3.0}
                assert {name: set(g.flatten().tolist()) for name, g in found.items()} == {
                    name: {value * (step + 1)} for name, value in expected.items()
                }, f"{way}, step {step}"

    world.run(body)
