"""Overlap scheduling: Inductor launches collectives before independent computation, and waits for them after it.

Graphs are changed by Inductor's passes and executed as they are, without generating code. Tests give the time that each
operator takes, so that what overlaps does not depend on the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import Rank, World, assert_same, dyadic, requirement
from harness.stacks import dynamo
from harness.stacks.collectives import functional, unwaited
from harness.stacks.limit import runs_with
from harness.stacks.tracing import Tracer

SOURCE = "torch/_inductor/config.py: aten_distributed_optimizations"
SIZE = 4
GATHER = 4 * (SIZE // 2 + SIZE) * SIZE / 2**30
"""The data in GB of a gather: its input and its output."""

Tensors = list[torch.Tensor]
Options = Mapping[str, Any]
APART: Options = {"pre_bucketing_fsdp_collectives": False, "compute_estimator": "analytical"}


def times(product: float, collective: float = 1.0) -> Callable[[str], float]:
    """Return a function that gives the milliseconds of an operator by its name."""
    return lambda name: collective if "c10d" in name else product if ".mm." in name else 0.0


def scheduled(code: Any, given: Tensors, options: Options, took: Callable[[str], float] | None = None) -> Tracer:
    """Compile a function and call it twice; compare its results with those of uncompiled code."""
    torch.compiler.reset()
    tracer = Tracer("inductor passes")
    function: Any = torch.compile(code, backend=tracer, fullgraph=True)
    raw = code(*[x.clone() for x in given])
    right = [(x + 0, x.stride()) for x in raw]
    pending = unwaited()
    with dynamo.overlapping({**APART, **options}, took):
        for _ in range(2):
            results = function(*[x.clone() for x in given])
            assert unwaited() == pending, options
            for number, ((one, stride), result) in enumerate(zip(right, results, strict=True)):
                assert_same(one, result + 0, f"tensor {number} with {options}")
                assert result.stride() == stride, f"tensor {number} with {options}"
    return tracer


def timeline(tracer: Tracer) -> str:
    """Return the launches, waits and products of the forward graph in order, as letters l, w and p."""
    (graph,) = tracer.forwards
    letters = {"wait_tensor": "w", "c10d": "l", ".mm.": "p"}
    return "".join(next((to for part, to in letters.items() if part in o.name), "") for o in graph.operators)


def layers(x: torch.Tensor, *weights: torch.Tensor) -> Tensors:
    """Gather each weight where it is needed."""
    for weight in weights:
        x = x @ functional.all_gather_tensor(weight, 0, dist.group.WORLD)
    return [x]


def drawn(rank: Rank, *shapes: tuple[int, ...]) -> Tensors:
    """Return tensors of small numbers, other ones on each rank."""
    return [
        dyadic(*shape, key=(rank.index, n), dtype=torch.float32, span=2).to(rank.device)
        for n, shape in enumerate(shapes)
    ]


LIMITS: list[tuple[float, Options, int]] = [
    (1, {}, 2),
    (2, {}, 3),
    (9, {"max_compute_pre_fetch": 0}, 1),
    (9, {"max_compute_pre_fetch": 2}, 3),
    (1, {"compute_overlap_multipler": 3.0}, 4),
    (9, {"max_in_flight_gb": 0.9 * GATHER}, 1),
    (9, {"max_in_flight_gb": 2.1 * GATHER}, 3),
    (9, {"max_memory_increase_gb": 0.0, "max_memory_increase_ratio": 0.0}, 1),
    (9, {"max_coll_distance": 1}, 2),
]
"""Milliseconds of a product, options, and how many gathers of 1 ms are launched before the first product."""


@requirement(
    "DYN-PASS-5060",
    "With overlap scheduling, Inductor launches before a product the collectives that it can hide in the time of the "
    "product, up to each limit.",
    source=SOURCE,
)
@pytest.mark.skipif(runs_with("<2.13"), reason="unsupported: no options for FSDP's collectives")
@pytest.mark.world(2, timeout=120)
def test_limits(world: World) -> None:
    """Gather four weights, each for a product with the last product; the first gather has nothing to hide behind."""

    def body(rank: Rank) -> list[str]:
        given = drawn(rank, (SIZE, SIZE), *[(SIZE // 2, SIZE)] * 4)
        lines = []
        for product, options, launches in LIMITS:
            line = timeline(scheduled(layers, given, options, times(product)))
            assert line.count("l") == line.count("w") == line.count("p") == 4, line
            assert line.split("p")[0].count("l") == launches, f"{line} with {options} and products of {product} ms"
            lines.append(line)
        return lines

    first, second = world.run(body)
    assert first == second


BUCKETS: list[tuple[float, Options, int]] = [
    (0, {}, 1),
    (1, {}, 4),
    (2, {}, 3),
    (9, {}, 2),
    (9, {"insert_overlap_deps": False}, 2),
    (9, {"max_coll_distance": 1}, 4),
    (9, {"collective_bucketing": False}, 4),
]
"""Milliseconds of a product, options, and how many collectives four gathers become."""


@requirement(
    "DYN-PASS-5061",
    "With collective_bucketing, Inductor puts gathers into a bucket unless each is hidden by another product.",
    source=SOURCE,
)
@pytest.mark.skipif(runs_with("<2.13"), reason="unsupported: no options for FSDP's collectives")
@pytest.mark.world(2, timeout=120)
def test_overlap_and_buckets(world: World) -> None:
    """Products hide none of the later gathers, one each, two, or all, which decides who shares a bucket."""

    def body(rank: Rank) -> list[str]:
        given = drawn(rank, (SIZE, SIZE), *[(SIZE // 2, SIZE)] * 4)
        lines = []
        for product, options, launches in BUCKETS:
            line = timeline(scheduled(layers, given, {"collective_bucketing": True, **options}, times(product)))
            assert line.count("p") == 4, line
            assert line.count("l") == line.count("w") == launches, f"{line} with {options}, products of {product} ms"
            lines.append(line)
        return lines

    first, second = world.run(body)
    assert first == second


def trained(x: torch.Tensor, *weights: torch.Tensor) -> Tensors:
    """Gather each weight in bfloat16 where it is needed, so that its gradient is reduced and scattered."""
    for weight in weights:
        x = x @ functional.all_gather_tensor_autograd(weight.bfloat16(), 0, dist.group.WORLD).float()
    return [x]


