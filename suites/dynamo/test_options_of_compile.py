"""Options of torch.compile that a caller uses more than once, and calls that compiled code defers."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks import dynamo
from harness.stacks.collectives import functional


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
        with dynamo.deferred(print):
            for run in code, dynamo.compiled(code, backend="eager")[0]:
                with contextlib.redirect_stdout(io.StringIO()) as out:
                    run(torch.ones(2, device=rank.device))
                printed.append(out.getvalue())
        return printed

    text = "loss=sum;" if how else "loss sum\n"
    assert_on_ranks([[text, text]] * 2, world.run(body))
