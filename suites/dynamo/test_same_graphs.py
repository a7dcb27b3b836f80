"""Inductor's check that all ranks have the same graph, before it moves collectives."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable

import pytest
import torch

from harness import Rank, World, assert_same, dyadic, requirement
from harness.stacks import dynamo
from harness.stacks.tracing import Tracer

SOURCE = "torch/_inductor/config.py: aten_distributed_optimizations.spmd_check, spmd_mismatch"
ON = {"aten_distributed_optimizations.spmd_check": True, "reorder_for_compute_comm_overlap": True}
MISMATCH = "aten_distributed_optimizations.spmd_mismatch"


def code(x: torch.Tensor, other: bool) -> torch.Tensor:
    """Compute without a collective, for which ranks would wait; the last operator is another one if asked for."""
    total = (x * 2).sum().float()
    return total - 1 if other else total + 1


OTHERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "operator": lambda x: x,
    "shape": lambda x: x[1:],
    "dimensions": lambda x: x.view(-1),
    "dtype": lambda x: x.double(),
    "strides": lambda x: x.t().contiguous().t(),
}
"""What differs on one rank, and how its input is made of what the others have."""


@requirement(
    "DYN-PASS-06",
    "With spmd_check and the spmd_mismatch 'error', every rank raises an error if a rank's graph has other operators, "
    "shapes, strides or dtypes.",
    source=SOURCE,
)
@requirement(
    "DYN-PASS-07",
    "With the spmd_mismatch 'warn', every rank whose graphs are checked says which ones differ, and runs its own.",
    source=SOURCE,
)
@pytest.mark.needs(torch=dynamo.COMPARES_GRAPHS)
@pytest.mark.world(3, timeout=20)
def test_compared(world: World) -> None:
    """Let the first, the second or the last rank differ in each way, and none, with each value of the option."""

    def body(rank: Rank) -> None:
        def run(kind: str, one: int | None, mismatch: str | None) -> str:
            x = dyadic(4, 3, key=rank.index, dtype=torch.float32).to(rank.device)
            other = rank.index == one
            x = OTHERS[kind](x) if other else x
            torch.compiler.reset()
            function = torch.compile(code, backend=Tracer("inductor passes"), fullgraph=True, dynamic=False)
            options = {**ON, MISMATCH: mismatch} if mismatch else {**ON, next(iter(ON)): False}
            said = io.StringIO()
            with dynamo.inductor_options(options), contextlib.redirect_stdout(said):
                try:
                    result = function(x, other and kind == "operator")
                except Exception as error:
                    return str(error)
            assert_same(code(x, other and kind == "operator") + 0, result + 0, f"{kind} of rank {one}, {mismatch}")
            return said.getvalue()

        for number, kind in enumerate(OTHERS):
            one = number % rank.size
            told = run(kind, one, "error")
            assert "spmd_mismatch" in told, f"{kind} of rank {one}: {told}"
            assert f"rank 0 vs rank {one or 1}" in told, told
        for kind, one in (("operator", 2), ("shape", 1)):
            told = run(kind, one, "warn")
            assert f"rank 0 vs rank {one}" in told, told
            assert f"rank 0 vs rank {3 - one}" not in told, told
            assert run(kind, one, None) == ""
        for mismatch in ("warn", "error"):
            assert run("operator", None, mismatch) == ""

    world.run(body)
