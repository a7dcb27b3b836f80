"""Parameters that are DTensors, which are frozen, thawed, changed or replaced between calls of compiled code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from harness import Rank, World, assert_same, dyadic, requirement
from harness.stacks import dynamo

ROWS, COLUMNS, WHOLE = Shard(0), Shard(1), Replicate()


def parameter(mesh: Any, placement: Placement, key: str, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """Return a frozen parameter of four rows and columns."""
    whole = dyadic(4, 4, key=key, dtype=dtype).to(mesh.device_type)
    return nn.Parameter(distribute_tensor(whole, mesh, [placement], src_data_rank=None), requires_grad=False)


def product(x: Any, weight: Any, bias: Any) -> Any:
    """Multiply and add."""
    return x * weight + bias


class Product(nn.Module):
    """Multiply by a parameter and add another one, both of which are frozen."""

    def __init__(self, mesh: Any, placement: Placement) -> None:
        super().__init__()
        self.weight, self.bias = parameter(mesh, placement, "weight"), parameter(mesh, placement, "bias")

    def forward(self, x: Any) -> Any:
        """Map a DTensor to a DTensor."""
        return product(x, self.weight, self.bias)


def _replaced(name: str, placement: Placement, dtype: torch.dtype = torch.float32) -> Callable[[Any], Any]:
    def replace(module: Any) -> None:
        mesh = getattr(module, name).device_mesh
        setattr(module, name, parameter(mesh, placement, "another", dtype).requires_grad_())

    return replace


def _changed(module: Any) -> None:
    with torch.no_grad():
        module.weight.mul_(2)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda module: None,
    "a thawed weight": lambda module: module.weight.requires_grad_(True),
    "a changed weight": _changed,
    "a thawed bias": lambda module: module.bias.requires_grad_(True),
    "a frozen weight": lambda module: module.weight.requires_grad_(False),
    "all frozen": lambda module: module.requires_grad_(False),
    "all thawed": lambda module: module.requires_grad_(True),
    "columns": _replaced("weight", COLUMNS),
    "whole": _replaced("bias", WHOLE),
    "another dtype": _replaced("weight", COLUMNS, torch.float64),
}
"""What happens to a module, one after the other."""

FORMS: dict[str, Callable[[Any], tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]]] = {
    "module": lambda module: (module, lambda: ()),
    "function": lambda module: (lambda x: module(x) + 0, lambda: ()),
    "arguments": lambda module: (product, lambda: (module.weight, module.bias)),
}
"""How compiled code gets the parameters of a module: what is compiled, and what gives further arguments."""


@requirement(
    "DYN-GUARD-8607",
    "After each change to its parameters that are DTensors, compiled code has the results and gradients of uncompiled "
    "code.",
    source="torch.compile: guards; torch.nn.Module.requires_grad_; torch.nn.Parameter: requires_grad; "
    "torch.distributed.tensor.DTensor",
)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.world(2)
def test_parameters(world: World, form: str) -> None:
    """Freeze, thaw, change and replace parameters; keep the gradients of every second step."""

    def body(rank: Rank) -> None:
        mesh = rank.mesh(2)
        modules = [Product(mesh, ROWS) for _ in range(2)]
        (plain, of_plain), (function, of_other) = (FORMS[form](module) for module in modules)
        with dynamo.settings(recompile_limit=64):
            compiled, counter = dynamo.compiled(function)
            for step, (what, change) in enumerate(CHANGES.items()):
                found = []
                for module, run, others in zip(modules, (plain, compiled), (of_plain, of_other), strict=True):
                    change(module)
                    local = dyadic(2, 4, key=(step, rank.index), dtype=torch.float32).to(rank.device)
                    x = DTensor.from_local(local, mesh, [ROWS], run_check=False).requires_grad_()
                    result = run(x, *others())
                    (result.to_local() * (step + 1)).sum().backward()
                    found.append([result.detach(), x.grad, module.weight.grad, module.bias.grad])
                for name, right, other in zip(("result", "x", "weight", "bias"), *found, strict=True):
                    where = f"{name} after {what}"
                    assert (right is None) == (other is None), where
                    if right is not None and other is not None:
                        assert (right.placements, right.dtype) == (other.placements, other.dtype), where
                        assert_same(right.to_local() + 0, other.to_local() + 0, where)
                if step % 2:
                    for module in modules:
                        module.zero_grad()
        assert counter.graphs > 1

    world.run(body)
