"""What decides which guards compiled code has: filters that torch.compile is given, and settings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from harness import Rank, World, assert_on_ranks, dyadic, requirement
from harness.stacks import dynamo
from harness.stacks.collectives import functional

SOURCE = "torch.compile"
FACTOR = 2


class Offset(nn.Module):
    """Adds a number of its own to a layer's result, and multiplies by a global number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop, self.number = nn.Linear(3, 3, bias=False), nn.Dropout(0.0), 1
        nn.init.eye_(self.layer.weight)

    def forward(self, x: torch.Tensor, k: int = 0) -> torch.Tensor:
        """Map float[n, 3] to float[n, 3]."""
        return functional.all_reduce(self.drop(self.layer(x)), "sum", dist.group.WORLD) * FACTOR + self.number + k


FILTERS: dict[str, set[str]] = {
    "none": {"shape", "number", "built-in", "global", "argument"},
    "skip_guard_on_inbuilt_nn_modules_unsafe": {"shape", "number", "global", "argument"},
    "skip_guard_on_all_nn_modules_unsafe": {"shape", "global", "argument"},
    "keep_tensor_guards_unsafe": {"shape"},
    "keep_portable_guards_unsafe": {"shape"},
    "skip_guard_on_globals_unsafe": {"shape", "number", "built-in", "argument"},
    "skip_all_guards_unsafe": set(),
}
"""Of each filter, what changes have the module compiled again."""


@requirement(
    "DYN-COMPILE-5566",
    "With a filter of guards, a module is compiled again for those changes whose guards the filter keeps, and for no "
    "others.",
    source=f"{SOURCE}: options, guard_filter_fn; torch.compiler: skip_guard_on_inbuilt_nn_modules_unsafe, "
    "skip_guard_on_all_nn_modules_unsafe, keep_tensor_guards_unsafe, keep_portable_guards_unsafe, "
    "skip_guard_on_globals_unsafe, skip_all_guards_unsafe",
)
@pytest.mark.world(2, timeout=120)
def test_filters(world: World) -> None:
    """Change the rows, the module's number, a dropout's rate, a global and an argument, each with each filter."""

    def body(rank: Rank) -> None:
        x = dyadic(2, 3, key=rank.index, dtype=torch.float32).to(rank.device)
        for name, changes in FILTERS.items():
            torch.compiler.reset()
            module, backend, found = Offset().to(rank.device), dynamo.GraphCounter("eager"), set[str]()
            options = {} if name == "none" else {"guard_filter_fn": getattr(torch.compiler, name)}
            function: Any = torch.compile(module, backend=backend, options=options, dynamic=False)
            function(x)
            for change in ("shape", "number", "built-in", "global", "argument"):
                before = backend.graphs
                globals()["FACTOR"] = 3 if change == "global" else 2
                module.number = 2 if change == "number" else 1
                module.drop.p = 0.5 if change == "built-in" else 0.0
                function(x[:1] if change == "shape" else x, 1 if change == "argument" else 0)
                globals()["FACTOR"] = 2
                if backend.graphs > before:
                    found.add(change)
            assert found == changes, f"{name}: {found}"

    world.run(body)


@requirement(
    "DYN-SET-5415",
    "Functions that are compiled with the same options all have the filter of guards that these name.",
    source="torch.compile: options, guard_filter_fn; torch.compiler.skip_all_guards_unsafe",
)
@pytest.mark.needs(torch="torch.compiler.skip_all_guards_unsafe")
@pytest.mark.parametrize("options", ["the same dict", "equal dicts"])
@pytest.mark.world(2)
def test_options_used_again(world: World, options: str) -> None:
    """Compile a function twice without guards, and call each with two numbers."""

    def body(rank: Rank) -> list[int]:
        def code(x: torch.Tensor, number: int) -> torch.Tensor:
            return functional.all_reduce(x, "sum", dist.group.WORLD) + number

        given: dict[str, Any] = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
        graphs = []
        for _ in range(2):
            torch.compiler.reset()
            counter = dynamo.GraphCounter("eager")
            run = torch.compile(code, backend=counter, options=given if options == "the same dict" else dict(given))
            for number in range(2):
                run(torch.ones(2, device=rank.device), number)
            graphs.append(counter.graphs)
        return graphs

    assert_on_ranks([[1, 1]] * 2, world.run(body))


def summed(x: torch.Tensor) -> torch.Tensor:
    """Return twice the sum over the ranks."""
    return functional.all_reduce(x * 2, "sum", dist.group.WORLD)


class Scaled(nn.Module):
    """Multiply by a weight and by a number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.factor = nn.Parameter(torch.ones(4)), 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map float[4] to float[4]."""
        return x * self.weight * self.factor


@requirement(
    "DYN-FSDP-5440",
    "Without skip_fsdp_guards, compiled modules under fully_shard run with what their attributes are then.",
    source="torch/_dynamo/config.py: skip_fsdp_guards",
)
@requirement(
    "DYN-SIZE-5440",
    "Without force_parameter_static_shapes, code with collectives is compiled once for parameters of many sizes.",
    source="torch/_dynamo/config.py: force_parameter_static_shapes",
)
@pytest.mark.world(2)
def test_settings_of_guards(world: World) -> None:
    """Change a number of a sharded module between calls; pass parameters of five sizes."""

    def body(rank: Rank) -> list[int]:
        torch.compiler.reset()
        with dynamo.settings(skip_fsdp_guards=False):
            model = Scaled().to(rank.device)
            fully_shard(model, mesh=rank.mesh())
            function = torch.compile(model, backend="eager")
            for factor in 2, 3:
                model.factor = factor
                assert function(torch.ones(4, device=rank.device)).tolist() == [factor] * 4
        counts = []
        for static in True, False:
            function, counter = dynamo.compiled(summed, backend="eager", dynamic=True)
            with dynamo.settings(force_parameter_static_shapes=static), torch.no_grad():
                for size in range(2, 7):
                    parameter = nn.Parameter(torch.ones(size, device=rank.device))
                    assert function(parameter).tolist() == [4] * size
            counts.append(counter.graphs)
        return counts

    assert world.run(body) == [[5, 1]] * 2
