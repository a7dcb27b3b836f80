"""Options of torch.compile and of the compiler around code with collectives: limits, backends, reasons, regions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from harness import Rank, World, requirement, spmd
from harness.stacks import dynamo
from harness.stacks.limit import runs_with

COMPILE = "torch.compile"


class Backend:
    """A backend that runs graphs as they are, counts them, and notes what else it was given."""

    def __init__(self) -> None:
        self.graphs = 0
        self.given: dict[str, Any] = {}

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any, **given: Any) -> Any:
        """Return the graph's own function."""
        self.graphs += 1
        self.given = given
        return graph.forward


def summed(x: torch.Tensor) -> torch.Tensor:
    """Return twice the sum over the ranks."""
    x = x * 2
    dist.all_reduce(x)
    return x


def another() -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function with code of its own, which nothing has compiled, that does what :func:`summed` does."""
    return type(summed)(summed.__code__.replace(co_name="another"), summed.__globals__)


def check(function: Any, device: torch.device, *sizes: int) -> None:
    """Call a function like :func:`summed` with tensors of these sizes on two ranks."""
    for size in sizes:
        found = function(torch.ones(size, device=device))
        assert found.tolist() == [4] * size, size


@requirement(
    "DYN-OPTION-5440",
    "torch.compile passes its options or its mode to the backend, and with disable changes nothing.",
    source=f"{COMPILE}: options: 'A dictionary of options to pass to the backend'; mode; disable; "
    "torch.compiler.compile",
)
@spmd(2)
def test_passed_on(rank: Rank) -> None:
    """Compile under both names of the function, with and without a name for the code."""
    torch.compiler.reset()
    named: dict[str, Any] = {} if runs_with("<2.12") else {"name": "mine"}
    for compile_ in torch.compile, torch.compiler.compile:
        for given in {"options": {"deep": 3}}, {"mode": "made up"}, {"mode": "default", **named}:
            backend = Backend()
            check(compile_(another(), backend=backend, **given), rank.device, 2)
            assert backend.graphs == 1
            passed = {key: value for key, value in backend.given.items() if key != "name"}  # since 2.15
            assert passed == {key: value for key, value in given.items() if value not in ("default", "mine")}
        backend = Backend()
        check(compile_(another(), backend=backend, disable=True), rank.device, 2, 3)
        assert backend.graphs == 0


@requirement(
    "DYN-LIMIT-5440",
    "Code with collectives that was compiled as often as the limit allows runs uncompiled or raises an error.",
    source="torch/_dynamo/config.py: recompile_limit, accumulated_recompile_limit, fail_on_recompile_limit_hit; "
    f"{COMPILE}: recompile_limit",
)
@requirement(
    "DYN-LIMIT-5441",
    "With isolate_recompiles, recompilations of a function count against the limit of their own torch.compile alone.",
    source=f"{COMPILE}: isolate_recompiles",
)
@spmd(2)
def test_limits(rank: Rank) -> None:
    """Set the limit of the process, of a call or of both, and call with more sizes than it allows."""
    sizes = (2, 3, 4, 2)
    for limits in {"recompile_limit": 2}, {"accumulated_recompile_limit": 2}:
        torch.compiler.reset()
        with dynamo.settings(**limits):
            backend = Backend()
            check(torch.compile(another(), backend=backend, dynamic=False), rank.device, *sizes)
            assert backend.graphs == 2, limits
            torch.compiler.reset()
            function = torch.compile(another(), backend=Backend(), dynamic=False)
            with dynamo.settings(fail_on_recompile_limit_hit=True):
                check(function, rank.device, 2, 3, 2)
                with pytest.raises(dynamo.AT_LIMIT):
                    function(torch.ones(4, device=rank.device))
    if runs_with("<2.12"):
        return
    torch.compiler.reset()
    backend = Backend()
    check(torch.compile(another(), backend=backend, dynamic=False, recompile_limit=2), rank.device, *sizes)
    assert backend.graphs == 2
    if runs_with("<2.13"):
        return
    for alone in False, True:
        torch.compiler.reset()
        function, backends = another(), [Backend(), Backend()]
        for backend in backends:
            compiled = torch.compile(
                function, backend=backend, dynamic=False, recompile_limit=2, isolate_recompiles=alone
            )
            check(compiled, rank.device, *sizes)
        assert [backend.graphs for backend in backends] == [2, 2 * alone]


@requirement(
    "DYN-OPTION-5441",
    "torch.compile without a backend uses the default one, which get_default_backend names.",
    source="torch.compiler: set_default_backend, get_default_backend",
)
@pytest.mark.needs(torch="torch.compiler.get_default_backend")
@spmd(2)
def test_default_backend(rank: Rank) -> None:
    """Make another backend the default, and put the first one back."""
    torch.compiler.reset()
    backend, first = Backend(), torch.compiler.get_default_backend()
    torch.compiler.set_default_backend(backend)
    try:
        assert torch.compiler.get_default_backend() is backend
        check(torch.compile(another()), rank.device, 2)
        assert backend.graphs == 1
        check(torch.compile(another(), backend="eager"), rank.device, 2)
        assert backend.graphs == 1
    finally:
        torch.compiler.set_default_backend(None)
    assert torch.compiler.get_default_backend() == first


@requirement(
    "DYN-OPTION-5442",
    "torch.compiler.disable keeps a function with a collective out of graphs, and an error says the reason given.",
    source="torch.compiler.disable: fn, recursive, reason",
)
@spmd(2)
def test_disabled(rank: Rank) -> None:
    """Disable as a function and as a decorator, with what the function calls or without it."""
    torch.compiler.reset()
    for recursive in True, False:
        for made in (
            torch.compiler.disable(another(), recursive=recursive, reason="it is late"),
            torch.compiler.disable(recursive=recursive, reason="it is late")(another()),
        ):

            def run(x: torch.Tensor, made: Any = made) -> torch.Tensor:
                return made(x + 0) + 0  # type: ignore[no-any-return]

            backend = Backend()
            check(torch.compile(run, backend=backend), rank.device, 2)
            assert backend.graphs == 2
            with pytest.raises(dynamo.REFUSED, match="it is late"):
                torch.compile(run, backend="eager", fullgraph=True)(torch.ones(2, device=rank.device))


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
            torch.compiler.reset()
            backend = Backend()
            function = torch.compile(another(), backend=backend, dynamic=True)
            with dynamo.settings(force_parameter_static_shapes=static), torch.no_grad():
                for size in range(2, 7):
                    parameter = nn.Parameter(torch.ones(size, device=rank.device))
                    assert function(parameter).tolist() == [4] * size
            counts.append(backend.graphs)
        return counts

    assert world.run(body) == [[5, 1]] * 2
