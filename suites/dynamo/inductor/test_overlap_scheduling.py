"""Overlap scheduling: Inductor launches collectives before independent computation, and waits for them after it.

Graphs are changed by Inductor's passes and executed as they are, without generating code. Tests give the time that each
operator takes, so that what overlaps does not depend on the machine.
"""

from __future__ import annotations

import functools
import itertools
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import Rank, World, assert_same, dyadic, requirement
from harness.stacks import dynamo
from harness.stacks.collectives import functional, unwaited
from harness.stacks.limit import runs_with
from harness.stacks.overlap_scheduling import overlapping
from harness.stacks.tracing import Tracer

SOURCE = "torch/_inductor/config.py: aten_distributed_optimizations"
pytestmark = pytest.mark.skipif(runs_with("<2.13"), reason="unsupported: no options for FSDP's collectives")
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
    with overlapping({**APART, **options}, took):
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


BUCKETS: list[tuple[int, float, Options, int]] = [
    (4, 0, {}, 1),
    (4, 1, {}, 4),
    (4, 2, {}, 3),
    (4, 9, {}, 2),
    (4, 9, {"insert_overlap_deps": False}, 2),
    (4, 9, {"max_coll_distance": 1}, 4),
    (4, 9, {"collective_bucketing": False}, 4),
    (7, 2, {}, 3),
]
"""Gathers, milliseconds of a product, options, and how many collectives the gathers become.

Of seven gathers, the last four share a bucket that is launched after a product.
"""


@requirement(
    "DYN-PASS-5061",
    "With collective_bucketing, Inductor puts gathers into a bucket unless each is hidden by another product.",
    source=SOURCE,
)
@pytest.mark.world(2, timeout=120)
def test_overlap_and_buckets(world: World) -> None:
    """Products hide none of the later gathers, one each, two, or all, which decides who shares a bucket."""

    def body(rank: Rank) -> list[str]:
        given = drawn(rank, (SIZE, SIZE), *[(SIZE // 2, SIZE)] * max(case[0] for case in BUCKETS))
        lines = []
        for gathers, product, options, launches in BUCKETS:
            options = {"collective_bucketing": True, **options}
            line = timeline(scheduled(layers, given[: gathers + 1], options, times(product)))
            assert line.count("p") == gathers, line
            assert line.count("l") == line.count("w") == launches, f"{line} with {options}, products of {product} ms"
            lines.append(line)
        return lines

    first, second = world.run(body)
    assert first == second


def of_product(x: torch.Tensor, y: torch.Tensor) -> Tensors:
    """Reduce one tensor, and gather the halves of a product of others."""
    product = x @ x
    halves = [functional.all_gather_tensor(product[at : at + SIZE // 2], 0, dist.group.WORLD) for at in (0, SIZE // 2)]
    return [functional.all_reduce(y, "sum", dist.group.WORLD), *halves]


@requirement(
    "DYN-PASS-8202",
    "With overlap scheduling, a bucket that is tied to a place after a product has the results of uncompiled code.",
    source=f"{SOURCE}.insert_overlap_deps, bucket_mode",
)
@pytest.mark.world(2, timeout=120)
def test_tied_buckets(world: World) -> None:
    """Gather two halves of a product, which hides a reduction."""

    def body(rank: Rank) -> None:
        given = drawn(rank, (SIZE, SIZE), (SIZE, SIZE))
        for mode in (None, "custom_ops_multidtype"):
            options = {"collective_bucketing": True, "bucket_mode": mode}
            line = timeline(scheduled(of_product, given, options, times(9)))
            assert line == "lplww", f"{line} with {options}"

    world.run(body)


def returned_first(x: torch.Tensor, *weights: torch.Tensor) -> Tensors:
    """Gather the two last weights, which are returned, before those that products need."""
    ends = [functional.all_gather_tensor(weight, 0, dist.group.WORLD) for weight in weights[-2:]]
    return [*layers(x, *weights[:-2]), *ends]


@requirement(
    "DYN-PASS-8200",
    "With overlap scheduling, Inductor launches first the collectives whose results are needed first.",
    source=f"{SOURCE}.prioritize_bucketing_during_scheduling",
)
@pytest.mark.world(2, timeout=120)
def test_needed_first(world: World) -> None:
    """Gather weights of growing sizes, the first ones for products, each of which hides one gather."""

    def body(rank: Rank) -> None:
        sizes = [SIZE + 2 * number for number in range(6)]
        shapes = [(rows // 2, columns) for rows, columns in itertools.pairwise(sizes)]
        given = drawn(rank, (SIZE, SIZE), *shapes)
        for grouped, moved in ((True, True), (False, False)):  # with and without a pass that moves code near to its use
            options = {"prioritize_bucketing_during_scheduling": grouped}
            with dynamo.inductor_options({"reorder_for_locality": moved}):
                (graph,) = scheduled(returned_first, given, options, times(1)).forwards
            launched = [o.result for o in graph.operators if o.is_collective]
            right = [f"float32[{rows}, {columns}]" for rows, columns in itertools.pairwise(sizes)]
            assert launched == right, f"{launched} with {options}, {moved=}"

    world.run(body)


def mixed(x: torch.Tensor, y: torch.Tensor, *weights: torch.Tensor) -> Tensors:
    """Launch collectives of all kinds: some hidden by no product, some that need another's result, some for the end."""
    group = dist.group.WORLD
    a, b, c, d = weights
    first = x @ functional.all_gather_tensor(a, 0, group)
    inner = functional.all_gather_tensor((y @ x)[:2], 0, group)
    second = first @ functional.all_gather_tensor(b.bfloat16(), 0, group).float()
    third = second @ (functional.all_gather_tensor(functional.all_reduce(c, "sum", group), 0, group) + inner)
    parts = [functional.reduce_scatter_tensor(t, "sum", 0, group) for t in (first, y, second)]
    moved = functional.all_to_all_single(third, None, None, group)
    end = moved @ functional.all_gather_tensor(d, 0, group)
    return [end, *parts, functional.all_reduce(second, "max", group), functional.all_reduce(y, "max", group)]


KINDS: list[tuple[float, Options]] = [
    (2, {"enable_fusion_regions": False}),
    (2, {"collective_bucketing": True, "bucket_mode": "custom_ops_multidtype"}),
    (0, {"collective_bucketing": True, "bucket_mode": "coalesced", "bucket_exposed_first": True}),
    (0, {"collective_bucketing": True, "prioritize_bucketing_during_scheduling": False}),
]
"""Milliseconds of a product, and options."""


@requirement(
    "DYN-PASS-5062",
    "With overlap scheduling, the results of uncompiled code and one order of collectives on every rank are kept, "
    "alone or in buckets.",
    source=SOURCE,
)
@pytest.mark.world(2, timeout=120)
def test_kinds(world: World) -> None:
    """Launch twelve collectives alone or in buckets, where products hide two collectives or none."""

    def body(rank: Rank) -> list[list[str]]:
        given = drawn(rank, (SIZE, SIZE), (SIZE, SIZE), *[(SIZE // 2, SIZE)] * 4)
        launched = [scheduled(mixed, given, options, times(product)).launched() for product, options in KINDS]
        assert len(launched[0]) == 12
        for (product, options), names in zip(KINDS, launched, strict=True):
            if product == 0:
                counts = [sum(kind in name for name in names) for kind in ("reduce_scatter", "all_reduce")]
                assert counts == [1, 2], f"{counts} reduce-scatters and all-reduces with {options}"
        return launched

    first, second = world.run(body)
    assert first == second


def sharded(other: Any, x: torch.Tensor, *weights: torch.Tensor) -> Tensors:
    """Gather each weight in bfloat16 where it is needed, and reduce what would be gradients of shards and of wholes.

    A gather of no parameter, the reduction whose result is used, and collectives of another group do not belong there.
    """
    group = dist.group.WORLD
    results = [functional.all_gather_tensor(x + weights[0].sum(), 0, other)]
    results += [functional.all_reduce(x + number, "sum", other) for number in range(2)]
    for weight in weights:
        x = x @ functional.all_gather_tensor(weight.bfloat16(), 0, group).float()
        results.append(functional.reduce_scatter_tensor(x, "sum", 0, group))
        results.append(functional.all_reduce(x[0], "sum", group))
    used = functional.reduce_scatter_tensor(x * 2, "sum", 0, group) * x[: SIZE // 2]
    return [functional.all_gather_tensor(x + weights[0].sum(), 0, group), used, *results]


LAYER = 2 * SIZE * SIZE / 2**20
"""The size in MiB of a gathered weight in bfloat16."""


@requirement(
    "DYN-PASS-5063",
    "Before it schedules, Inductor fills buckets up to a size with gathers of parameters, and with reductions in their "
    "group whose results are returned.",
    source=f"{SOURCE}.pre_bucketing_fsdp_collectives, pre_bucketing_fsdp_collectives_bucket_cap_mb, "
    "pre_bucketing_fsdp_collectives_max_bucket_cap_mb",
)
@pytest.mark.world(2, timeout=120)
def test_shards(world: World) -> None:
    """Use buckets of any size, of no weight and of two, for four weights; the rest must stay alone."""
    cap = "pre_bucketing_fsdp_collectives_bucket_cap_mb"
    least, most = (f"pre_bucketing_fsdp_collectives_{end}_bucket_cap_mb" for end in ("min", "max"))
    cases: list[tuple[Options, list[int]]] = [
        ({}, [3, 2, 3]),
        ({cap: 0.0}, [6, 5, 6]),
        ({cap: 2.5 * LAYER}, [4, 5, 3]),
        ({cap: 5 * LAYER}, [3, 3, 3]),
        ({least: 0.0}, [3, 2, 3]),
        ({least: 0.0, most: 2.5 * LAYER}, [4, 5, 3]),
    ]

    def body(rank: Rank) -> list[list[str]]:
        given = drawn(rank, (SIZE, SIZE), *[(SIZE // 2, SIZE)] * 4)
        code = functools.partial(sharded, dist.new_group([0, 1]))
        launched = []
        for options, counts in cases:
            options = {"pre_bucketing_fsdp_collectives": True, **options}
            launched.append(scheduled(code, given, options, times(1)).launched())
            kinds = ("all_gather", "reduce_scatter", "all_reduce")
            assert [sum(kind in name for name in launched[-1]) for kind in kinds] == counts, (options, launched[-1])
        return launched

    first, second = world.run(body)
    assert first == second


def trained(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    """Gather each weight where it is needed, so that its gradient is reduced and scattered."""
    for weight in weights:
        x = x @ functional.all_gather_tensor_autograd(weight, 0, dist.group.WORLD)
    return x


@requirement(
    "DYN-PASS-5065",
    "With overlap scheduling, the gradients of uncompiled code and one order of collectives on every rank are kept, "
    "alone or in buckets.",
    source=SOURCE,
)
@pytest.mark.world(2, timeout=120)
def test_gradients(world: World) -> None:
    """Train three weights that are gathered, with the reduce-scatters of the backward alone or in a bucket."""

    def body(rank: Rank) -> list[list[str]]:
        x, *weights = drawn(rank, (SIZE, SIZE), *[(SIZE // 2, SIZE)] * 3)
        for weight in weights:
            weight.requires_grad_()
        trained(x, *weights).sum().backward()
        right = [weight.grad for weight in weights]
        launched = []
        for product, bucketing, count in ((1.0, False, 3), (0.0, True, 1)):
            torch.compiler.reset()
            tracer = Tracer("inductor passes")
            function: Any = torch.compile(trained, backend=tracer, fullgraph=True)
            for weight in weights:
                weight.grad = None
            pending = unwaited()
            with overlapping({**APART, "collective_bucketing": bucketing}, times(product)):
                function(x, *weights).sum().backward()
            assert unwaited() == pending
            for number, (gradient, weight) in enumerate(zip(right, weights, strict=True)):
                assert gradient is not None
                assert weight.grad is not None
                assert_same(gradient, weight.grad, f"gradient {number}, bucketing {bucketing}")
            launched.append(tracer.launched())
            assert sum("reduce_scatter" in name for name in launched[-1]) == count, launched[-1]
        return launched

    first, second = world.run(body)
    assert first == second


@requirement(
    "DYN-PASS-5064",
    "With spmd_check, Inductor raises on every rank or warns, as spmd_mismatch says, if the ranks' graphs differ.",
    source=f"{SOURCE}.spmd_check, spmd_mismatch",
)
@pytest.mark.world(2, timeout=120)
def test_differing_graphs(world: World) -> None:
    """Rank 1 multiplies once more, or ranks have the same graph."""

    def body(rank: Rank) -> None:
        def code(x: torch.Tensor) -> Tensors:
            for _ in range(rank.index if differ else 1):
                x = x @ x
            return [functional.all_reduce(x, "sum", dist.group.WORLD)]

        given = drawn(rank, (SIZE, SIZE))
        for differ, mismatch in ((False, "error"), (True, "warn"), (True, "error")):
            options = {"spmd_check": True, "spmd_mismatch": mismatch}
            if differ and mismatch == "error":
                with pytest.raises(Exception, match=r"(?s)SPMD.*spmd_mismatch"):
                    scheduled(code, given, options, times(1))
            else:
                scheduled(code, given, options, times(1))

    world.run(body)


GRAPHS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[torch.Tensor], Any]]] = {
    "shapes": (lambda x: x[:2] * 2, lambda x: x[:3] * 2),
    "shapes of later operators": (lambda x: (x * 2)[:2].sum(), lambda x: (x * 2)[:3].sum()),
    "dtypes": (lambda x: x.double(), lambda x: x.bfloat16()),
    "strides": (lambda x: x.reshape(2, 8) + 1, lambda x: x.reshape(8, 2).t() + 1),
    "operators": (lambda x: x.sin(), lambda x: x.cos()),
    "order": (lambda x: x.sin().cos(), lambda x: x.cos().sin()),
    "number of operators": (lambda x: x.sin(), lambda x: x.sin().sin()),
    "ranks of results": (lambda x: x.sum(), lambda x: x.sum(0)),
}
"""What two ranks compute besides the same collective, whose graphs differ in one respect."""


@requirement(
    "DYN-PASS-8659",
    "With spmd_check, Inductor raises on both ranks if their graphs differ in shapes, dtypes, strides or operators "
    "alone.",
    source=f"{SOURCE}.spmd_check, spmd_mismatch",
)
@pytest.mark.parametrize("what", GRAPHS)
@pytest.mark.world(2, timeout=120)
def test_graphs_of_ranks(world: World, what: str) -> None:
    """Give both ranks the first function, both the second one, and each its own; then both the first one again."""

    def body(rank: Rank) -> None:
        options = {"spmd_check": True, "spmd_mismatch": "error"}
        for mine in ((0, 0), (1, 1), (0, 1), (0, 0)):

            def code(x: torch.Tensor, mine: tuple[int, int] = mine) -> Tensors:
                local = GRAPHS[what][mine[rank.index]](x)
                return [functional.all_reduce(x, "sum", dist.group.WORLD), local]

            given = drawn(rank, (SIZE, SIZE))
            if mine[0] == mine[1]:
                scheduled(code, given, options, times(1))
            else:
                with pytest.raises(Exception, match=r"(?s)SPMD.*spmd_mismatch"):
                    scheduled(code, given, options, times(1))
                assert unwaited() == 0

    world.run(body)


@requirement(
    "DYN-PASS-5066",
    "Inductor's code launches collectives before the products that hide them, and waits for them after, as scheduled.",
    source=f"{SOURCE}.insert_overlap_deps",
)
@pytest.mark.needs(features=["inductor"])
@pytest.mark.world(2, timeout=180)
def test_order_in_code(world: World) -> None:
    """Compare the order of what Inductor generates code for with the order of the graph after the passes."""
    tag = uuid.uuid4().hex

    def body(rank: Rank) -> None:
        given = drawn(rank, (SIZE, SIZE), *[(SIZE // 2, SIZE)] * 4)
        line = timeline(scheduled(layers, given, {"insert_overlap_deps": False}, times(1)))
        right = layers(*given)[0]
        kinds = list[str]()

        def seen(nodes: list[Any]) -> list[Any]:
            kinds.extend(type(node.node).__name__ for node in nodes)
            return list(nodes)

        reorder = {"reorder_for_compute_comm_overlap": True, "reorder_for_compute_comm_overlap_passes": [seen]}
        with (
            dynamo.cached_as(f"{tag} {rank.index}"),
            dynamo.inductor_options(reorder),
            overlapping(APART, times(1)),
        ):
            (result,) = dynamo.compiled(layers, backend="inductor")[0](*given)
        assert_same(right + 0, result + 0, "the product")
        letters = {"Collective": "l", "Wait": "w", "Extern": "p"}
        assert line == "".join(next((to for part, to in letters.items() if part in kind), "") for kind in kinds)

    world.run(body)
