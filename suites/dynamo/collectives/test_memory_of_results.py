"""The memory of what compiled functional collectives return: it is neither their inputs' nor that of other results."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import Rank, World, assert_same, dyadic, requirement
from harness.stacks import dynamo
from harness.stacks.collectives import functional, unwaited
from harness.stacks.limit import runs_with
from suites.dynamo.backends import INDUCTOR

SOURCE = "torch/distributed/_functional_collectives.py: collectives leave their inputs unmodified"

Tensors = list[torch.Tensor]
Code = Callable[[Tensors, torch.Tensor, Any], Any]
"""A collective of inputs of the graph and of a tensor that is computed in it, all of even numbers of rows."""


def exchanged(x: torch.Tensor, group: Any) -> torch.Tensor:
    """Exchange rows in equal parts, whose sizes are given."""
    size = dist.get_world_size(group)
    return functional.all_to_all_single(x, [x.shape[0] // size] * size, [x.shape[0] // size] * size, group)


SINGLE: dict[str, Code] = {
    "sum": lambda xs, y, g: functional.all_reduce(xs[0], "sum", g),
    "sum of computed": lambda xs, y, g: functional.all_reduce(y, "sum", g),
    "maximum of transposed": lambda xs, y, g: functional.all_reduce(xs[1].t(), "max", g),
    "gather": lambda xs, y, g: functional.all_gather_tensor(xs[2], 0, g),
    "gather of computed": lambda xs, y, g: functional.all_gather_tensor(y, 0, g),
    "gather of columns": lambda xs, y, g: functional.all_gather_tensor(xs[3], 1, g),
    "gather of part": lambda xs, y, g: functional.all_gather_tensor(xs[4][1:3], 0, g),
    "gather with gradients": lambda xs, y, g: functional.all_gather_tensor_autograd(xs[5], 0, g),
    "scatter": lambda xs, y, g: functional.reduce_scatter_tensor(xs[6], "sum", 0, g),
    "scatter of computed": lambda xs, y, g: functional.reduce_scatter_tensor(y, "sum", 0, g),
    "scatter of columns": lambda xs, y, g: functional.reduce_scatter_tensor(xs[7], "max", 1, g),
    "exchange": lambda xs, y, g: functional.all_to_all_single(xs[8], None, None, g),
    "exchange of computed": lambda xs, y, g: functional.all_to_all_single(y, None, None, g),
    "exchange of given sizes": lambda xs, y, g: exchanged(xs[9], g),
    "broadcast": lambda xs, y, g: functional.broadcast(xs[10], 0, g),
    "broadcast of computed": lambda xs, y, g: functional.broadcast(y, 0, g),
    "permutation": lambda xs, y, g: functional.permute_tensor(
        xs[11].view(-1), list(reversed(range(dist.get_world_size(g)))), g
    ),
}

REPEATED: dict[str, Callable[[Tensors, torch.Tensor], Tensors]] = {
    "twice": lambda xs, y: [xs[0], xs[0]],
    "twice among others": lambda xs, y: [xs[1], xs[2], xs[1], y, y],
    "and computed": lambda xs, y: [y, xs[3]],
    "before computed": lambda xs, y: [xs[4], y, xs[5]],
    "and a part": lambda xs, y: [xs[6], xs[6][:2]],
    "and a view": lambda xs, y: [xs[7].view(2, 8), xs[7]],
    "alone": lambda xs, y: [xs[8]],
}
"""Lists that have tensors several times, or inputs of the graph and computed tensors."""

OF_LISTS: dict[str, Callable[[Tensors, Any], Tensors]] = {
    "sums": lambda xs, g: functional.all_reduce_coalesced(xs, "sum", g),
    "gathers": lambda xs, g: functional.all_gather_into_tensor_coalesced(xs, g),
    "scatters": lambda xs, g: functional.reduce_scatter_tensor_coalesced(xs, "sum", [0] * len(xs), g),
}
LISTS: dict[str, Code] = {
    f"{what} of {how}": lambda xs, y, g, call=call, made=made: call(made(xs, y), g)  # type: ignore[misc]
    for what, call in OF_LISTS.items()
    for how, made in REPEATED.items()
}

FOR_INDUCTOR = (
    *("sum", "gather", "gather of computed", "scatter", "exchange", "broadcast"),
    *("sums of twice among others", "sums of and computed", "gathers of twice", "scatters of twice among others"),
)
"""Collectives for which Inductor generates code, which takes seconds."""


@requirement(
    "DYN-RESULT-8650",
    "A change to the result of a compiled functional collective changes neither what it was given nor other results.",
    source=SOURCE,
)
@requirement(
    "DYN-RESULT-8651",
    "A change to what a compiled functional collective was given does not change the result that it returned.",
    source=SOURCE,
)
@pytest.mark.parametrize(
    ("backend", "names"),
    [
        pytest.param("aot_eager", tuple(SINGLE), id="tensors"),
        pytest.param("aot_eager", tuple(LISTS), id="lists"),
        pytest.param("inductor", FOR_INDUCTOR, id="inductor", marks=INDUCTOR.marks),
    ],
)
@pytest.mark.parametrize("ranks", ["all", "one"])
@pytest.mark.skipif(runs_with("<2.13"), reason="before 2.13, not all of these collectives can be traced")
@pytest.mark.world(2, timeout=180)
def test_own_memory(world: World, backend: str, names: tuple[str, ...], ranks: str) -> None:
    """Write into each result in turn, then into the inputs, which some lists have several times, in each group."""
    tag, calls = uuid.uuid4().hex, [{**SINGLE, **LISTS}[name] for name in names]

    def body(rank: Rank) -> None:
        group: Any = dist.group.WORLD if ranks == "all" else rank.mesh(2, 1).get_group(1)

        def code(xs: Tensors, w: torch.Tensor) -> list[Tensors]:
            results = []
            for number, call in enumerate(calls):
                found = call(xs, xs[12 + number] @ w, group)
                results.append(list(found) if isinstance(found, list | tuple) else [found])
            return results

        given = [
            dyadic(4, 4, key=(rank.index, k), dtype=torch.float32, span=4).to(rank.device)
            for k in range(12 + len(calls))
        ]
        kept, w = [x.clone() for x in given], torch.eye(4, device=rank.device).flip(0)
        right = [[y + 0 for y in ys] for ys in code([x.clone() for x in given], w)]
        pending = unwaited()
        with dynamo.cached_as(f"{tag} {rank.index}"):
            compiled, counter = dynamo.compiled(code, backend=backend)
            results = [[functional.wait_tensor(y) for y in ys] for ys in compiled(given, w)]
        assert counter.graphs == 1
        assert unwaited() == pending

        def check(done: str) -> None:
            for number, (one, x) in enumerate(zip(kept, given, strict=True)):
                assert_same(one, x, f"input {number}, {done}")
            for name, ones, ys in zip(names, right, results, strict=True):
                for number, (one, y) in enumerate(zip(ones, ys, strict=True)):
                    assert_same(one, y, f"{name}, result {number}, {done}")

        check("as returned")
        for name, ones, ys in zip(names, right, results, strict=True):
            for number, (one, y) in enumerate(zip(ones, ys, strict=True)):
                one.fill_(-9 - number)
                y.fill_(-9 - number)
                check(f"after a change to result {number} of {name}")
        for one, x in zip(kept, given, strict=True):
            one.fill_(-77)
            x.fill_(-77)
        check("after a change to the inputs")

    world.run(body)
