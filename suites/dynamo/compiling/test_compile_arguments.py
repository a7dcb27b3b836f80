"""What torch.compile is told besides the function: limits of recompilation, backends, modes, and filters of guards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness import Rank, World, assert_on_ranks, assert_same, dyadic, requirement
from harness.stacks import compiling, dynamo
from harness.stacks.collectives import functional
from harness.stacks.limit import runs_with

SOURCE = "torch.compile"
FACTOR = 2


class Backend:
    """A backend that counts the graphs that it is given, and how often they run."""

    def __init__(self) -> None:
        self.graphs = self.runs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any, **options: Any) -> Callable[..., Any]:
        self.graphs += 1

        def run(*arguments: Any) -> Any:
            self.runs += 1
            return graph(*arguments)

        return run


def summed(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Sum over ranks, and multiply by the length of a text."""
    return functional.all_reduce(x, "sum", dist.group.WORLD) * len(kind)


def check(function: Any, x: torch.Tensor, length: int) -> None:
    """Call with a text of some length."""
    assert_same(summed(x, "a" * length) + 0, function(x, "a" * length) + 0, f"length {length}")


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


@contextmanager
def default_backend(backend: Any) -> Iterator[None]:
    """Make a backend the default one."""
    torch.compiler.set_default_backend(backend)
    try:
        yield
    finally:
        torch.compiler.set_default_backend(None)


@requirement(
    "DYN-COMPILE-5563",
    "torch.compile and module.compile use the backend that set_default_backend was given, by name or as a function, "
    "unless they are given one.",
    source="torch.compiler: set_default_backend, get_default_backend",
)
@requirement(
    "DYN-COMPILE-5564",
    "Every backend that list_backends names is one that torch.compile takes, and tags exclude some.",
    source="torch.compiler.list_backends: exclude_tags",
)
@requirement(
    "DYN-COMPILE-5565",
    "torch.compile refuses a mode together with options, and unknown modes, options or backends.",
    source=f"{SOURCE}: mode, options",
)
@pytest.mark.needs(torch="torch.compiler.set_default_backend")
@pytest.mark.world(2)
def test_backends(world: World) -> None:
    """Compile a function and a module with each kind of default, and with a backend of their own."""

    def body(rank: Rank) -> None:
        x = dyadic(3, 3, key=rank.index, dtype=torch.float32).to(rank.device)
        assert torch.compiler.get_default_backend() == "inductor"
        mine, other = Backend(), Backend()
        for default in ("eager", mine):
            torch.compiler.reset()
            before = mine.graphs
            with default_backend(default):
                assert torch.compiler.get_default_backend() is default
                check(torch.compile(summed), x, 2)
                check(torch.compile(dynamic=False)(summed), x, 2)
                layer = nn.Linear(3, 3).to(rank.device)
                right = layer(x)
                layer.compile()
                assert_same(right, layer(x), "a layer")
                assert (mine.graphs > before) == (default is mine)
                after = mine.graphs
                torch.compiler.reset()
                check(torch.compile(summed, backend=other), x, 2)
                assert mine.graphs == after
        assert other.graphs == 2
        with pytest.raises(TypeError):
            torch.compiler.set_default_backend(3)  # type: ignore[arg-type]
        assert torch.compiler.get_default_backend() == "inductor"
        few, all_ = torch.compiler.list_backends(), torch.compiler.list_backends(None)  # type: ignore[arg-type]
        assert "inductor" in few
        assert set(few) < set(all_)
        assert {"eager", "aot_eager"} <= set(all_) - set(few)
        for name in few:
            torch.compile(summed, backend=name)
        with pytest.raises(RuntimeError, match=r"mode.*options"):
            torch.compile(summed, mode="default", options={"max_autotune": False})  # type: ignore[call-overload]
        for wrong in ({"mode": "quick"}, {"options": {"no_such_option": 1}}, {"backend": "no_such_backend"}):
            with pytest.raises(Exception, match=r"quick|no_such"):
                torch.compile(summed, **wrong)(x, "a")  # type: ignore[call-overload]

    world.run(body)


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
            module, backend, found = Offset().to(rank.device), Backend(), set[str]()
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
