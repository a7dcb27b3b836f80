"""How often code is compiled anew: limits of the process and of a call, what is beyond them, and isolated calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from harness import Rank, World, dyadic, requirement, spmd
from harness.stacks import compiling, dynamo
from harness.stacks.limit import runs_with
from suites.dynamo.texts import check, summed

SOURCE = "torch.compile"


class Backend(dynamo.GraphCounter):
    """A backend that counts the graphs that it is given, and how often they run."""

    def __init__(self) -> None:
        super().__init__("eager")
        self.runs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor], **options: Any) -> Callable[..., Any]:
        compiled = super().__call__(graph, inputs, **options)

        def run(*arguments: Any) -> Any:
            self.runs += 1
            return compiled(*arguments)

        return run


@requirement(
    "DYN-LIMIT-5440",
    "Code with collectives that was compiled as often as the limit allows runs uncompiled or raises an error.",
    source="torch/_dynamo/config.py: recompile_limit, accumulated_recompile_limit, fail_on_recompile_limit_hit",
)
@pytest.mark.parametrize("limit", ["recompile_limit", "accumulated_recompile_limit"])
@spmd(2)
def test_limits_of_settings(rank: Rank, limit: str) -> None:
    """Set the limit of the process, and call with more texts than it allows; then have that raise an error."""
    x = dyadic(3, key=rank.index, dtype=torch.float32).to(rank.device)
    for fails in False, True:
        torch.compiler.reset()
        backend = Backend()
        function = torch.compile(summed, backend=backend)
        with dynamo.settings(**{limit: 2, "fail_on_recompile_limit_hit": fails}):
            for length in 1, 2, 1:
                check(function, x, length)
            if fails:
                with pytest.raises(dynamo.AT_LIMIT):
                    function(x, "aaa")
            else:
                check(function, x, 3)
            check(function, x, 2)
        assert (backend.graphs, backend.runs) == (2, 4)


@requirement(
    "DYN-COMPILE-5560",
    "A function that was compiled as often as recompile_limit allows runs uncompiled, but what was compiled is used.",
    source=f"{SOURCE}: recompile_limit",
)
@requirement(
    "DYN-COMPILE-5561",
    "With fullgraph=True or fail_on_recompile_limit_hit, one compilation more than recompile_limit allows raises an "
    "error.",
    source=f"{SOURCE}: recompile_limit; torch.compiler.config: fail_on_recompile_limit_hit",
)
@pytest.mark.skipif(runs_with("<2.12"), reason="before 2.12, torch.compile takes no limit")
@pytest.mark.world(2)
def test_limits(world: World) -> None:
    """Call with more texts than two limits allow, and with the earlier ones again; then with the default limit."""

    def body(rank: Rank) -> None:
        x = dyadic(3, key=rank.index, dtype=torch.float32).to(rank.device)
        for limit in (1, 3):
            torch.compiler.reset()
            backend = Backend()
            function: Any = torch.compile(summed, backend=backend, recompile_limit=limit)
            for length in range(1, 6):
                check(function, x, length)
            assert (backend.graphs, backend.runs) == (limit, limit)
            for length in range(1, 6):
                check(function, x, length)
            assert (backend.graphs, backend.runs) == (limit, 2 * limit)
            torch.compiler.reset()
            whole: Any = torch.compile(summed, backend=backend, recompile_limit=limit, fullgraph=True)
            for length in range(1, limit + 1):
                check(whole, x, length)
            with pytest.raises(dynamo.AT_LIMIT):
                whole(x, "a" * 7)
            check(whole, x, limit)
        for options in ({}, {"recompile_limit": 2}):
            torch.compiler.reset()
            settings = {"fail_on_recompile_limit_hit": True, **({} if options else {"recompile_limit": 2})}
            with dynamo.settings(**settings):
                function = torch.compile(summed, backend=Backend(), **options)
                check(function, x, 1)
                check(function, x, 2)
                with pytest.raises(dynamo.AT_LIMIT):
                    function(x, "aaa")
                check(function, x, 2)
        torch.compiler.reset()
        backend = Backend()
        function = torch.compile(summed, backend=backend)
        for length in range(1, compiling.OVER_LIMIT + 3):
            check(function, x, length)
        assert backend.graphs == compiling.OVER_LIMIT

    world.run(body)


@requirement(
    "DYN-COMPILE-5562",
    "A call of torch.compile with isolate_recompiles has compiled code and a count of its own, apart from other calls "
    "for its function.",
    source=f"{SOURCE}: isolate_recompiles",
)
@pytest.mark.skipif(runs_with("<2.13"), reason="before 2.13, all calls share the code of a function")
@pytest.mark.world(2)
def test_isolated(world: World) -> None:
    """Compile a function for all and twice in isolation; exhaust the limit of one, and then that of all."""

    def body(rank: Rank) -> None:
        torch.compiler.reset()
        x = dyadic(3, key=rank.index, dtype=torch.float32).to(rank.device)
        shared, first, second = Backend(), Backend(), Backend()
        function: Any = torch.compile(summed, backend=shared, recompile_limit=3)
        one: Any = torch.compile(summed, backend=first, recompile_limit=2, isolate_recompiles=True)
        other: Any = torch.compile(summed, backend=second, recompile_limit=2, isolate_recompiles=True)
        for length in (1, 2, 3):
            check(one, x, length)
        assert (first.graphs, first.runs) == (2, 2)
        for length in (2, 3, 4):
            check(other, x, length)
        assert (second.graphs, second.runs) == (2, 2)
        for length in (1, 2, 3, 4):
            check(function, x, length)
        assert (shared.graphs, shared.runs) == (3, 3)
        third = Backend()
        late: Any = torch.compile(summed, backend=third, recompile_limit=2, isolate_recompiles=True)
        for length in (5, 6, 5):
            check(late, x, length)
        assert (third.graphs, third.runs) == (2, 3)
        assert (first.graphs, second.graphs, shared.graphs) == (2, 2, 3)

    world.run(body)
