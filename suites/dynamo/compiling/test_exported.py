"""Modules with collectives that torch.export captures: what the exported program computes and launches."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness import Rank, World, assert_same, dyadic, requirement
from harness.stacks.collectives import functional
from harness.stacks.limit import runs_with
from harness.stacks.training import launched, since

Call = Callable[[torch.Tensor, Any], torch.Tensor]


def _gathered(x: torch.Tensor, group: Any) -> torch.Tensor:
    into = x.new_zeros(2 * x.shape[0], x.shape[1])
    dist.all_gather_into_tensor(into, x, group)
    return into


def _gathered_in_a_list(x: torch.Tensor, group: Any) -> torch.Tensor:
    into = [torch.zeros_like(x) for _ in range(2)]
    dist.all_gather(into, x, group=group)
    return torch.cat(into, 1)


def _summed(x: torch.Tensor, group: Any) -> torch.Tensor:
    y = x * 2
    dist.all_reduce(y, group=group)
    return y


def _largest(x: torch.Tensor, group: Any) -> torch.Tensor:
    y = x * 2
    dist.all_reduce(y, dist.ReduceOp.MAX, group)
    return y


def _scattered(x: torch.Tensor, group: Any) -> torch.Tensor:
    into = x.new_zeros(x.shape[0] // 2, x.shape[1])
    dist.reduce_scatter_tensor(into, x, group=group)
    return into


def _least_scattered(x: torch.Tensor, group: Any) -> torch.Tensor:
    into = x.new_zeros(x.shape[0] // 2, x.shape[1])
    dist.reduce_scatter_tensor(output=into, input=x, op=dist.ReduceOp.MIN, group=group)
    return into


def _exchanged(x: torch.Tensor, group: Any) -> torch.Tensor:
    into = torch.zeros_like(x)
    dist.all_to_all_single(into, x, group=group)
    return into


CALLS: dict[str, Call] = {
    "all_gather_into_tensor": _gathered,
    "all_gather": _gathered_in_a_list,
    "all_reduce": _summed,
    "all_reduce of an operation": _largest,
    "reduce_scatter_tensor": _scattered,
    "reduce_scatter_tensor of an operation": _least_scattered,
    "all_to_all_single": _exchanged,
    "functional all_reduce": lambda x, g: functional.all_reduce(x, "sum", g),
    "functional gather of rows": lambda x, g: functional.all_gather_tensor(x, 0, g),
    "functional gather of columns": lambda x, g: functional.all_gather_tensor(x, 1, g),
    "functional gather of one row": lambda x, g: functional.all_gather_tensor(x[:1], 1, g),
    "functional scatter of columns": lambda x, g: functional.reduce_scatter_tensor(x, "max", 1, g),
    "functional exchange": lambda x, g: functional.all_to_all_single(x, None, None, g),
    "functional broadcast": lambda x, g: functional.broadcast(x, 1, g),
}
"""Collectives of a tensor of an even number of rows and columns in a group of two ranks."""

_BEFORE = pytest.mark.skipif(runs_with("<2.13"), reason="before 2.13, Dynamo does not trace gathers of columns")
STRICT = [False, pytest.param(True, marks=_BEFORE)]


class Communicating(nn.Module):
    """Calls every collective with the product of its input and a weight."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.weight, self.group = nn.Parameter(torch.full((2,), 4.0)), group

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Map float[rows, 2] to one tensor of each collective."""
        with torch.no_grad():
            return [call(x * self.weight, self.group) + 1 for call in CALLS.values()]


class OfOneRank(nn.Module):
    """Doubles its input, and calls a collective in which the ranks have different parts."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map float[n] to float[n]."""
        y = x * 2
        if self.name == "reduce":
            dist.reduce(y, 0)
        else:
            dist.broadcast(y, 1)
        return y + 1


@requirement(
    "DYN-EXPORT-271",
    "A module with collectives that torch.export has captured, strictly or not, returns what the module itself does.",
    source="torch.export.export: strict; torch/distributed/_functional_collectives.py: traceable_collective_remaps",
)
@pytest.mark.parametrize("name", ["reduce", "broadcast"])
@pytest.mark.world(2)
def test_exported_of_one_rank(world: World, name: str) -> None:
    """Rank 1 comes later to the exported program, so that rank 0 has to wait for it."""

    def body(rank: Rank) -> list[Any]:
        module, x = OfOneRank(name), torch.full((2,), 1.0 + rank.index, device=rank.device)
        found: list[Any] = [module(x).tolist()]
        try:
            program = torch.export.export(module, (x,), strict=False).module()
        except Exception as error:
            return [*found, type(error).__name__]
        if rank.index == 1:
            rank.store.wait(["called"])
            time.sleep(0.1)  # enough to see a rank that does not wait
        else:
            rank.store.set("called", "")
        found.append(program(x).tolist())
        dist.barrier()
        return found

    right, result = world.run(body)[0]
    assert result == right, f"the exported program: {result}"


@requirement(
    "DYN-EXPORT-271",
    "A module with collectives that torch.export has captured, strictly or not, returns what the module itself does.",
    source="torch.export.export: strict; torch/distributed/_functional_collectives.py: traceable_collective_remaps",
)
@requirement(
    "DYN-EXPORT-272",
    "Exporting a module launches no collective, but the exported program launches those of the module.",
    source="torch.export.export; torch/distributed/_functional_collectives.py: traceable_collective_remaps",
)
@pytest.mark.parametrize("strict", STRICT)
@pytest.mark.world(2)
def test_exported(world: World, strict: bool) -> None:
    """Export one module that calls each collective in a group of its own; run it twice with other numbers."""

    def body(rank: Rank) -> None:
        group: Any = dist.new_group([0, 1])
        module = Communicating(group).to(rank.device)
        before = launched()
        program = torch.export.export(module, (torch.ones(4, 2, device=rank.device),), strict=strict).module()
        assert since(before) == {}, "while it is exported"
        for call in range(2):
            x = dyadic(4, 2, key=(rank.index, call), dtype=torch.float32).to(rank.device)
            before = launched()
            rights = [y + 0 for y in module(x)]
            counts, before = since(before), launched()
            results = [y + 0 for y in program(x)]
            assert since(before) == counts, f"call {call}"
            for name, right, result in zip(CALLS, rights, results, strict=True):
                assert_same(right, result, f"{name}, call {call}")

    world.run(body)
