"""The backends that code is compiled with: given or by default, by name or as functions, and what they are told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from harness import Rank, World, assert_same, dyadic, requirement, spmd
from harness.stacks import dynamo
from harness.stacks.limit import runs_with
from suites.dynamo.texts import check, summed

SOURCE = "torch.compile"


class Backend(dynamo.GraphCounter):
    """A backend that runs graphs as they are, counts them, and notes what else it was given."""

    def __init__(self) -> None:
        super().__init__("eager")
        self.given: dict[str, Any] = {}

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor], **given: Any) -> Any:
        self.given = given
        return super().__call__(graph, inputs)


@requirement(
    "DYN-OPTION-5440",
    "torch.compile passes its options or its mode to the backend, and with disable changes nothing.",
    source=f"{SOURCE}: options: 'A dictionary of options to pass to the backend'; mode; disable; "
    "torch.compiler.compile",
)
@spmd(2)
def test_passed_on(rank: Rank) -> None:
    """Compile under both names of the function, with and without a name for the code."""
    x = dyadic(3, key=rank.index, dtype=torch.float32).to(rank.device)
    named: dict[str, Any] = {} if runs_with("<2.12") else {"name": "mine"}
    for compile_ in torch.compile, torch.compiler.compile:
        for given in {"options": {"deep": 3}}, {"mode": "made up"}, {"mode": "default", **named}:
            torch.compiler.reset()
            backend = Backend()
            check(compile_(summed, backend=backend, **given), x, 2)
            assert backend.graphs == 1
            passed = {key: value for key, value in backend.given.items() if key != "name"}  # since 2.15
            assert passed == {key: value for key, value in given.items() if value not in ("default", "mine")}
        torch.compiler.reset()
        backend = Backend()
        check(compile_(summed, backend=backend, disable=True), x, 2)
        assert backend.graphs == 0


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
