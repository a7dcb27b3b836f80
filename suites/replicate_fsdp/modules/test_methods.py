"""Methods that register_fsdp_forward_method makes forwards, of one module and not of its class."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, register_fsdp_forward_method

from fixtures.managed import ways
from harness import Rank, World, requirement
from harness.stacks import replicate_fsdp


class Scale(nn.Module):
    """A weight of two equal numbers, and methods that multiply by it."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), value))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()

    def times(self, x: torch.Tensor, *, factor: float = 1.0) -> torch.Tensor:
        """Return the forward's result times a factor."""
        return (self.weight * x).sum() * factor

    def both(self, x: torch.Tensor, factor: float) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the forward's result and its negative, times a factor."""
        y = (self.weight * x).sum() * factor
        return y, [-y]


@requirement(
    "RFSDP-METHOD-02",
    "register_fsdp_forward_method makes forwards of the methods of the given module, and of no other of its class.",
    source="torch.distributed.fsdp.register_fsdp_forward_method: 'Registers a method on module'",
)
@pytest.mark.world(2)
def test_modules_of_one_class(world: World) -> None:
    """Three managed modules of one class, of which two have two methods registered, and a plain one, in two steps."""

    def body(rank: Rank) -> None:
        x = torch.full((2,), 1.0 + rank.index, device=rank.device)
        for way, managed in ways(rank).items():
            modules: list[Any] = [managed(Scale(value).to(rank.device)) for value in (1.0, 10.0, 100.0)]
            plain = Scale(1000.0).to(rank.device)
            for module in (*modules[:2], plain):
                for name in ("times", "both"):
                    register_fsdp_forward_method(module, name)
            assert type(modules[0]) is type(modules[2]), way
            for step in range(2):
                for module, value in ((modules[1], 10.0), (modules[0], 1.0), (plain, 1000.0)):
                    what = f"{way}, {value}, step {step}"
                    right = value * 2 * (1 + rank.index)
                    mean = 1.0 + rank.index if module is plain else 1.5
                    scaled = module.times(x, factor=2.0)
                    assert scaled.item() == 2 * right, what
                    scaled.backward()
                    assert gradient(module) == [2 * mean] * 2, what
                    first, (second,) = module.both(x, 4.0)
                    assert (first.item(), second.item()) == (4 * right, -4 * right), what
                    (2 * first + second).backward()
                    assert gradient(module) == [6 * mean] * 2, what
                    module(x).backward()
                    assert gradient(module) == [7 * mean] * 2, what
                    module.zero_grad()
                assert modules[2](x).item() == 200.0 * (1 + rank.index), way
            assert [vars(m).keys() & {"times", "both"} for m in (modules[2], plain)] == [set(), set()], way

    def gradient(module: nn.Module) -> Any:
        return replicate_fsdp.gradients(module)["weight"].tolist()

    world.run(body)


class Looking(nn.Module):
    """A weight, and methods that keep the dtypes of it and of their inputs."""

    seen: tuple[torch.dtype, ...]

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor, *, named: torch.Tensor, rows: torch.Tensor) -> Any:
        self.seen = self.weight.dtype, x.dtype, named.dtype, rows.dtype
        y = self.weight * x
        return y, {"rows": rows, "named": [self.weight * named]}

    def first(self, x: torch.Tensor, *, named: torch.Tensor, rows: torch.Tensor) -> Any:
        """Return what the forward does."""
        return Looking.forward(self, x, named=named, rows=rows)

    def second(self, x: torch.Tensor, *, named: torch.Tensor, rows: torch.Tensor) -> Any:
        """Return what the forward does."""
        return Looking.forward(self, x, named=named, rows=rows)


class Calling(nn.Module):
    """A module that calls a method of its part."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.called = Looking(), "forward"

    def forward(self, x: torch.Tensor, **named: Any) -> Any:
        return (self.part if self.called == "forward" else getattr(self.part, self.called))(x, **named)


@requirement(
    "RFSDP-METHOD-03",
    "A registered method casts parameters, inputs and outputs by the policy of its module, as the forward does.",
    source="torch.distributed.fsdp: register_fsdp_forward_method, MixedPrecisionPolicy",
)
@pytest.mark.world(2)
def test_dtypes(world: World) -> None:
    """Call the forward and two registered methods, of a root or of a part, with gradients or without, twice."""
    narrow, single, wide = torch.bfloat16, torch.float32, torch.float64
    policies = {
        MixedPrecisionPolicy(): (single, single, single),
        MixedPrecisionPolicy(narrow): (narrow, narrow, narrow),
        MixedPrecisionPolicy(output_dtype=narrow): (single, single, narrow),
        MixedPrecisionPolicy(narrow, output_dtype=wide): (narrow, narrow, wide),
        MixedPrecisionPolicy(narrow, output_dtype=wide, cast_forward_inputs=False): (narrow, single, wide),
        MixedPrecisionPolicy(wide, output_dtype=narrow): (wide, wide, narrow),
    }

    def body(rank: Rank) -> None:
        x, rows = torch.full((2,), 1.0 + rank.index, device=rank.device), torch.arange(2, device=rank.device)
        for way, managed in ways(rank).items():
            for (policy, (computes, takes, returns)), inside in itertools.product(policies.items(), (False, True)):
                model: Any = (Calling() if inside else Looking()).to(rank.device)
                module = managed(model.part if inside else model, mp_policy=policy)
                if inside:
                    managed(model)
                for name in ("first", "second"):
                    register_fsdp_forward_method(module, name)
                for name, grad in (("first", True), ("second", False), ("forward", True), ("second", True)):
                    what = f"{way}, {policy}, {inside=}, {name}, {grad=}"
                    model.called = name
                    called = model if inside or name == "forward" else getattr(model, name)
                    with torch.set_grad_enabled(grad):
                        y, nested = called(x, named=x, rows=rows)
                    assert module.seen == (computes, takes, takes, torch.int64), what
                    assert (y.dtype, nested["named"][0].dtype) == (returns, returns), what
                    assert nested["rows"].dtype == torch.int64, what
                    assert y.tolist() == nested["named"][0].tolist() == [1.0 + rank.index] * 2, what
                    if grad:
                        (y + nested["named"][0]).sum().backward()
                        gradient = replicate_fsdp.gradients(module)["weight"]
                        assert (gradient.dtype, gradient.tolist()) == (single, [3.0] * 2), what
                        model.zero_grad()

    world.run(body)
