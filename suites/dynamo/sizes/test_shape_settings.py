"""Settings of the compiler for sizes and numbers: which are dynamic, and which have code compiled again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness import Rank, World, assert_same, dyadic, requirement
from harness.stacks import dynamo
from harness.stacks.collectives import functional
from harness.stacks.limit import runs_with

CONFIG = "torch.compiler.config"


def both(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Gather two tensors, and multiply by a size of each."""
    rows = functional.all_gather_tensor(x, 0, dist.group.WORLD) * x.shape[0]
    return rows.sum() + functional.all_gather_tensor(y, 0, dist.group.WORLD).sum() * y.shape[1]


def numbered(x: torch.Tensor, k: float) -> torch.Tensor:
    """Sum over ranks, and multiply by a number."""
    return functional.all_reduce(x, "sum", dist.group.WORLD) * k


class Stepping(nn.Module):
    """Counts its calls, and adds the count to a sum over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map float[n, m] to float[n, m]."""
        self.step += 1
        return functional.all_reduce(x, "sum", dist.group.WORLD) + self.step


SHAPES = [((4, 6), (5, 7)), ((3, 6), (5, 7)), ((2, 6), (5, 7)), ((2, 6), (8, 7)), ((2, 9), (8, 7)), ((3, 9), (8, 7))]
"""Shapes of two tensors: the rows of the first change, then the rows of the second, and the columns of the first."""

Settings = dict[str, Any]

SIZES: dict[str, tuple[Settings, Settings, Settings, int]] = {
    "by default": ({}, {}, {}, 4),
    "static": ({}, {}, {"dynamic": False}, 6),
    "dynamic": ({}, {}, {"dynamic": True}, 1),
    "dynamic at once": ({}, {"assume_static_by_default": False}, {}, 1),
    "all of the first": ({"dynamic_sources": "L['x']"}, {}, {}, 2),
    "rows of the first": ({"dynamic_sources": "L['x']:0"}, {}, {}, 3),
    "rows of both": ({"dynamic_sources": r"L\['x.*:0, L['y']:0"}, {}, {}, 2),
    "rows of the first, though static": ({"dynamic_sources": "L['x']:0"}, {}, {"dynamic": False}, 3),
    "unknown rows of the first": ({"unbacked_sources": "L['x']:0"}, {}, {}, 3),
}
"""Settings of torch.compiler.config and of Dynamo, arguments, and how often code is compiled for the shapes."""


@requirement(
    "DYN-SHAPES-5560",
    "The settings dynamic_sources, unbacked_sources or assume_static_by_default say which sizes "
    "have code compiled again.",
    source=f"{CONFIG}: dynamic_sources, unbacked_sources, assume_static_by_default",
)
@requirement(
    "DYN-SHAPES-5561",
    "Sizes that equal one of dynamic_values at the first call are dynamic, and no others.",
    source=f"{CONFIG}: dynamic_values",
)
@requirement(
    "DYN-SHAPES-5562",
    "With automatic_dynamic_exclusion_guard, an earlier size is still computed by the code that was compiled for it.",
    source="torch/_dynamo/config.py: automatic_dynamic_exclusion_guard",
)
@pytest.mark.skipif(runs_with("<2.13"), reason="before 2.13, sources can't be named with a dimension")
@pytest.mark.world(2, timeout=120)
def test_sizes(world: World) -> None:
    """Call with pairs of shapes under each setting; then with sizes that are values, or with the first size again."""

    def body(rank: Rank) -> None:
        def drawn(*shape: int) -> torch.Tensor:
            return dyadic(*shape, key=(rank.index, shape), dtype=torch.float32, span=2).to(rank.device)

        def graphs(shapes: Any, options: Settings, **how: Any) -> list[int]:
            function, counter = dynamo.compiled(both, backend="eager", **how)
            found = []
            with torch.compiler.config.patch(**options):  # type: ignore[attr-defined]
                for first, second in shapes:
                    x, y = drawn(*first), drawn(*second)
                    assert_same(both(x, y) + 0, function(x, y) + 0, f"{options}, {how}, {first}, {second}")
                    found.append(counter.graphs)
            return found

        for name, (options, dynamo_options, how, count) in SIZES.items():
            with dynamo.settings(**dynamo_options):
                found = graphs(SHAPES, options, **how)
            assert found[-1] == count, f"{name}: {found}"
        values = {"dynamic_values": "11, 13"}
        assert graphs([((11, 6), (13, 7)), ((3, 6), (8, 7)), ((4, 6), (5, 7))], values) == [1, 1, 1]
        assert graphs([((11, 6), (12, 7)), ((3, 6), (12, 7)), ((3, 6), (5, 7))], values) == [1, 1, 2]
        for excludes in (False, True):
            ran, made = list[int](), list[int]()

            def backend(graph: Any, inputs: Any, ran: list[int] = ran, made: list[int] = made) -> Callable[..., Any]:
                number = len(made)
                made.append(number)

                def run(*arguments: Any) -> Any:
                    ran.append(number)
                    return graph(*arguments)

                return run

            torch.compiler.reset()
            with dynamo.settings(automatic_dynamic_exclusion_guard=excludes):
                function: Any = torch.compile(both, backend=backend)
                for rows in (4, 3, 5, 4, 3):
                    x, y = drawn(rows, 2), drawn(6, 3)
                    assert_same(both(x, y) + 0, function(x, y) + 0, f"{rows} rows")
            assert ran[:3] == [0, 1, 1]
            assert ran[4] == 1
            if excludes:
                assert ran[3] == 0

    world.run(body)


@requirement(
    "DYN-SHAPES-5563",
    "A function that is given a number is compiled twice for all of its values, unless it is set to be specialized.",
    source="torch/_dynamo/config.py: specialize_float, specialize_int",
)
@requirement(
    "DYN-SHAPES-5564",
    "With allow_unspec_int_on_nn_module, a module that counts its steps is compiled for two of them, else for each.",
    source=f"{CONFIG}: allow_unspec_int_on_nn_module",
)
@requirement(
    "DYN-SHAPES-5565",
    "fullgraph=True has numbers that are read from sums, and results whose sizes depend on them, in one graph.",
    source="torch.compile: fullgraph, 'will turn on capture_scalar_outputs and capture_dynamic_output_shape_ops'",
)
@requirement(
    "DYN-SHAPES-5566",
    "Parameters have code compiled for each of their shapes, unless force_parameter_static_shapes is off or "
    "dynamic_sources has them.",
    source="torch/_dynamo/config.py: force_parameter_static_shapes; torch.compiler.config: dynamic_sources",
)
@pytest.mark.world(2, timeout=120)
def test_numbers(world: World) -> None:
    """Call with floats and whole numbers, count steps, read numbers from sums, and use parameters of several shapes."""

    def body(rank: Rank) -> None:
        x = dyadic(2, 3, key=rank.index, dtype=torch.float32).to(rank.device)
        total = functional.all_reduce(x, "sum", dist.group.WORLD) + 0
        numbers: list[tuple[Settings, list[Any], int]] = [
            ({}, [2.0, 3.0, 0.5, 4.0], 2),
            ({"specialize_float": True}, [2.0, 3.0, 0.5, 4.0], 4),
            ({}, [2, 3, 5, 4], 2),
            ({"specialize_int": True}, [2, 3, 5, 4], 4),
        ]
        for options, values, graphs in numbers:
            with dynamo.settings(**options):
                function, counter = dynamo.compiled(numbered, backend="eager")
                for value in values:
                    assert_same(total * value, function(x, value), f"{options}, {value}")
            assert counter.graphs == graphs, options
        for allowed, graphs in ((False, 5), (True, 2)):
            with torch.compiler.config.patch(allow_unspec_int_on_nn_module=allowed):  # type: ignore[attr-defined]
                module = Stepping()
                function, counter = dynamo.compiled(module, backend="eager")
                for step in range(1, 6):
                    assert_same(total + step, function(x), f"step {step}")
            assert (module.step, counter.graphs) == (5, graphs)

        def read(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = functional.all_reduce(x, "sum", dist.group.WORLD)
            return y * y.sum().item(), y[y > 0] + 1

        for backend in ("eager", "aot_eager"):
            function, counter = dynamo.compiled(read, backend=backend)
            for sign in (1, -1, 2):
                for one, other in zip(read(x * sign), function(x * sign), strict=True):
                    assert_same(one + 0, other + 0, f"{backend}, {sign}")
            assert counter.graphs == 1
        for static, sources, graphs in ((True, "", 4), (False, "", 2), (True, "L['w']", 1)):
            with (
                dynamo.settings(force_parameter_static_shapes=static),
                torch.compiler.config.patch(dynamic_sources=sources),  # type: ignore[attr-defined]
            ):
                function, counter = dynamo.compiled(
                    lambda w: functional.all_reduce(w * w.shape[0], "sum", dist.group.WORLD)
                )
                for rows in (2, 3, 4, 5):
                    w = nn.Parameter(torch.ones(rows, device=rank.device))
                    y = function(w)
                    assert y.tolist() == [float(rows * rank.size)] * rows
            assert counter.graphs == graphs, f"static parameters: {static}, {sources}"

    world.run(body)
