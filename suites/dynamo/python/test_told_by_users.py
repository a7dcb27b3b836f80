"""What compiled code does with logs, prints and changes of Python's objects, and what users may not tell it."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness import Rank, World, assert_on_ranks, assert_same, requirement
from harness.stacks import dynamo
from harness.stacks.collectives import functional

LOGGER = logging.getLogger("suites.dynamo.told")


def summed(x: torch.Tensor) -> torch.Tensor:
    """Sum over ranks."""
    return functional.all_reduce(x, "sum", dist.group.WORLD) + 0


def noted(x: torch.Tensor) -> torch.Tensor:
    """Print and log within a sum."""
    y = summed(x)
    print("first", y.shape[0])
    LOGGER.info("logged %d", y.shape[0])
    warnings.warn("warned")  # noqa: B028 - with more arguments, it can't be reordered
    y = summed(y * 2)
    print("second", y)
    return y + 1


class Messages(logging.Handler):
    """A handler that keeps messages."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a message."""
        self.found.append(record.getMessage())


@requirement(
    "DYN-TOLD-5560",
    "Compiled code prints, logs or warns what uncompiled code does in each call, also if the functions are reordered.",
    source="torch.compiler.config: reorderable_logging_functions; torch.compile: fullgraph=False",
)
@requirement(
    "DYN-TOLD-5561",
    "Functions in reorderable_logging_functions or ignore_logging_functions break no graph, and ignored ones are idle.",
    source="torch/_dynamo/config.py: reorderable_logging_functions, ignore_logging_functions",
)
@requirement(
    "DYN-TOLD-5562",
    "Compiled code that changes Python's objects warns or raises an error if side_effect_replay_policy says so, else "
    "changes them.",
    source="torch/_dynamo/config.py: side_effect_replay_policy",
)
@pytest.mark.world(2, timeout=120)
def test_side_effects(world: World) -> None:
    """Print, log and warn between two sums, twice each; append to a list under each policy."""

    def body(rank: Rank) -> None:
        x, messages = torch.ones(3, device=rank.device), Messages()
        LOGGER.addHandler(messages)
        LOGGER.setLevel(logging.INFO)
        printed = "first 3\nsecond tensor([8., 8., 8.])\n"
        cases: list[tuple[dict[str, Any], int | None, str, list[str]]] = [
            ({}, None, printed, ["logged 3"]),
            (
                {"reorderable_logging_functions": {print, warnings.warn}, "ignore_logging_functions": {LOGGER.info}},
                1,
                printed,
                [],
            ),
            ({"ignore_logging_functions": {logging.Logger.info, print, warnings.warn}}, 1, "", []),
        ]
        for options, graphs, lines, logs in cases:
            with dynamo.settings(**options):
                function, counter = dynamo.compiled(noted, backend="eager", fullgraph=graphs == 1)
                for call in range(2):
                    messages.found.clear()
                    with redirect_stdout(io.StringIO()) as out, warnings.catch_warnings(record=True) as caught:
                        warnings.simplefilter("always")
                        assert_same(noted(x), function(x), "the sum")
                    uncompiled = "first 3\nsecond tensor([8., 8., 8.])\n"
                    assert out.getvalue() == uncompiled + lines, f"{options}, call {call}"
                    assert messages.found == ["logged 3", *logs], f"{options}, call {call}"
                    count = sum(str(w.message) == "warned" for w in caught)
                    assert count == (1 if not lines else 2), f"{options}, call {call}"
            if graphs is not None:
                assert counter.graphs == graphs, options
        LOGGER.removeHandler(messages)
        for policy in ("info", "silent", "warn", "error"):
            with dynamo.settings(side_effect_replay_policy=policy):
                kept = list[torch.Tensor]()

                def code(x: torch.Tensor, kept: list[torch.Tensor] = kept) -> torch.Tensor:
                    y = summed(x)
                    kept.append(y)
                    return y * 2

                function, _ = dynamo.compiled(code, backend="eager", fullgraph=False)
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    if policy == "error":
                        with pytest.raises(RuntimeError, match=r"(?i)side effect"):
                            function(x)
                    else:
                        assert_same(code(x, []), function(x), policy)
                assert len(kept) == (policy != "error"), policy
                assert any("side effect" in str(w.message).lower() for w in caught) == (policy == "warn"), policy

    world.run(body)


class Part(nn.Module):
    """Sums over ranks, and says whether it was compiled."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map float[n] to float[n]."""
        return summed(x) + torch.compiler.is_compiling()

    @torch.compiler.disable
    def outside(self, x: torch.Tensor) -> torch.Tensor:
        """Do so uncompiled."""
        return self(x)  # type: ignore[no-any-return]


@torch.compiler.disable(recursive=False)
def half(x: torch.Tensor) -> torch.Tensor:
    """Call a function that is compiled, uncompiled itself."""
    return Part()(x)  # type: ignore[no-any-return]


DISABLED: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], int]] = {
    "function": (torch.compiler.disable(lambda x: Part()(x)), 0),
    "module": (torch.compiler.disable(Part()), 0),
    "method": (Part().outside, 0),
    "not what it calls": (half, 1),
    "nothing": (Part(), 1),
}
"""Functions within compiled code, and what they add to the sum."""


@requirement(
    "DYN-TOLD-5563",
    "A function, method or module runs uncompiled if disable was given it, with what it calls unless recursive=False.",
    source="torch.compiler.disable: fn, recursive",
)
@requirement(
    "DYN-TOLD-5564",
    "With fullgraph=True, the error for a function that is disabled has the reason that disable was given.",
    source="torch.compiler.disable: reason",
)
@requirement(
    "DYN-TOLD-5565",
    "set_stance raises an error in compiled code, for a force_backend beside another stance, or at the call after an "
    "unknown stance.",
    source="torch.compiler.set_stance: 'an error will be raised otherwise', force_backend",
)
@requirement(
    "DYN-TOLD-5566",
    "With aot_eager_then_compile, the backend compiles no first call, and a later one for all sizes that differ.",
    source="torch.compiler.set_stance: aot_eager_then_compile",
)
@pytest.mark.world(2, timeout=120)
def test_left_out(world: World) -> None:
    """Call each within compiled code, between sums, twice; set stances where it is refused, and nested ones."""

    def body(rank: Rank) -> None:
        x = torch.ones(3, device=rank.device)
        for name, (inner, more) in DISABLED.items():

            def code(x: torch.Tensor, inner: Any = inner) -> torch.Tensor:
                return inner(summed(x)) * 2 + summed(x)

            function, counter = dynamo.compiled(code, backend="eager", fullgraph=False)
            for _ in range(2):
                right = (rank.size * rank.size + more) * 2 + rank.size
                assert function(x).tolist() == [float(right)] * 3, name
            assert counter.graphs == {"nothing": 1, "not what it calls": 3}.get(name, 2), name
        inner = torch.compiler.disable(summed, reason="it must run uncompiled")
        function, _ = dynamo.compiled(lambda x: inner(summed(x)), backend="eager")
        with pytest.raises(dynamo.REFUSED, match="it must run uncompiled"):
            function(x)

        def stanced(x: torch.Tensor) -> torch.Tensor:
            with torch.compiler.set_stance("force_eager"):
                return summed(x)

        for fullgraph in (True, False):
            function, _ = dynamo.compiled(stanced, backend="eager", fullgraph=fullgraph)
            with pytest.raises(Exception, match=r"(?i)forbidden|set_stance"):
                function(x)
        with pytest.raises(RuntimeError, match="force_backend"):
            torch.compiler.set_stance("force_eager", force_backend="eager")
        function, counter = dynamo.compiled(summed, backend="eager")
        with pytest.raises(RuntimeError, match="no_such"), torch.compiler.set_stance("no_such"):
            function(x)
        assert_same(summed(x), function(x), "the sum")
        assert counter.graphs == 1
        with torch.compiler.set_stance("force_eager"):
            with torch.compiler.set_stance("default"):
                function(x[:2])
                assert counter.graphs == 2
            function(x[:1])
            assert counter.graphs == 2
        function(x[:1])
        assert counter.graphs == 3

        def squared(w: torch.Tensor) -> torch.Tensor:
            return functional.all_gather_tensor_autograd(w * w, 0, dist.group.WORLD)

        function, counter = dynamo.compiled(squared, backend="aot_eager")
        with torch.compiler.set_stance("aot_eager_then_compile"):
            for call, size in enumerate((3, 4, 5, 6)):
                w = torch.full((size,), rank.index + 1.0, device=rank.device, requires_grad=True)
                assert_same(squared(w.detach()) + 0, function(w).detach() + 0, f"size {size}")
                function(w).sum().backward()
                assert w.grad is not None
                assert_same(w.detach() * 2 * rank.size, w.grad, f"gradient of size {size}")
                if call == 0:
                    calls = counter.graphs
            assert calls <= 1
            assert counter.graphs == 1

    world.run(body)


@requirement(
    "DYN-SET-5416",
    "A print that compiled code defers until after a graph prints what it prints uncompiled.",
    source="torch.compiler.config: reorderable_logging_functions",
)
@pytest.mark.parametrize("how", [{}, {"sep": "=", "end": ";"}], ids=["positional", "keywords"])
@pytest.mark.world(2)
def test_deferred_prints(world: World, how: dict[str, str]) -> None:
    """Print words between a collective and a product."""

    def body(rank: Rank) -> list[str]:
        def code(x: torch.Tensor) -> torch.Tensor:
            y = functional.all_reduce(x, "sum", dist.group.WORLD)
            print("loss", "sum", **how)  # type: ignore[call-overload]
            return y * 2

        printed = []
        with dynamo.settings(reorderable_logging_functions={print}):
            for run in code, dynamo.compiled(code, backend="eager", fullgraph=False)[0]:
                with redirect_stdout(io.StringIO()) as out:
                    run(torch.ones(2, device=rank.device))
                printed.append(out.getvalue())
        return printed

    text = "loss=sum;" if how else "loss sum\n"
    assert_on_ranks([[text, text]] * 2, world.run(body))
