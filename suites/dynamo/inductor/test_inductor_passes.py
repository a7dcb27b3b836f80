"""Inductor's passes over collectives: values as in uncompiled code, and as many collectives as each option says.

Graphs are changed by Inductor's passes and executed as they are, without generating code.
"""

from __future__ import annotations

import math
import time
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
from harness.stacks.tracing import Tracer

SOURCE = "torch/_inductor/config.py: bucket_all_gathers_fx, bucket_reduce_scatters_fx, bucket_all_reduces_fx"
MEMBERS = [1, 2]
"""The ranks of both groups: their ranks in a group are not their global ranks."""
ROWS = 8

Tensors = list[torch.Tensor]
Code = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Any, Any], Tensors]
Options = Mapping[str, Any]


def reduced(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor, group: Any, other: Any) -> Tensors:
    """Reduce by three operations, in two dtypes and two groups, a view, a result once more, and again as at first."""
    results = [
        functional.all_reduce(x, "sum", group),
        functional.all_reduce(y * 2, "sum", group),
        functional.all_reduce(z.double(), "sum", group),
        functional.all_reduce(y.double(), "sum", group),
        functional.all_reduce(x.t(), "max", group),
        functional.all_reduce(z, "max", group),
        functional.all_reduce(y, "min", group),
        functional.all_reduce(x, "min", group),
        functional.all_reduce(z + 1, "sum", other),
        functional.all_reduce(y + 3, "sum", other),
    ]
    results.append(functional.all_reduce(results[-1], "sum", other))
    return [*results, functional.all_reduce(y, "sum", group)]


def gathered(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor, group: Any, other: Any) -> Tensors:
    """Gather in two dtypes, dimensions and groups, a function of two inputs, and a result once more."""
    results = [
        functional.all_gather_tensor(x, 0, group),
        functional.all_gather_tensor(z, 0, group),
        functional.all_gather_tensor(y.bfloat16(), 0, group),
        functional.all_gather_tensor(z.bfloat16() * 2, 0, group),
        functional.all_gather_tensor(y + 1, 0, group),
        functional.all_gather_tensor(x[:, 0] + y, 0, group),
        functional.all_gather_tensor(z - 1, 0, other),
        functional.all_gather_tensor(y + 3, 0, other),
    ]
    return [*results, functional.all_gather_tensor(results[-1], 0, other)]


def scattered(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor, group: Any, other: Any) -> Tensors:
    """Reduce and scatter by three operations, in two dtypes, dimensions and groups, and a result once more."""
    results = [
        functional.reduce_scatter_tensor(x, "sum", 0, group),
        functional.reduce_scatter_tensor(y * 2, "sum", 0, group),
        functional.reduce_scatter_tensor(z.double(), "sum", 0, group),
        functional.reduce_scatter_tensor(y.double(), "sum", 0, group),
        functional.reduce_scatter_tensor(x, "max", 1, group),
        functional.reduce_scatter_tensor(z, "max", 0, group),
        functional.reduce_scatter_tensor(z - 1, "min", 0, group),
        functional.reduce_scatter_tensor(y - 3, "min", 0, group),
        functional.reduce_scatter_tensor(z + 1, "sum", 0, other),
        functional.reduce_scatter_tensor(y + 3, "sum", 0, other),
    ]
    return [*results, functional.reduce_scatter_tensor(results[-1], "sum", 0, other)]


def written(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor, group: Any, other: Any) -> Tensors:
    """Write results to inputs and to parts of new tensors, with two collectives of each kind."""
    whole, half = x.new_zeros(4 * ROWS), x.new_zeros(ROWS)
    dist.all_reduce(x, group=group)
    dist.all_reduce(y, group=group)
    dist.all_gather_into_tensor(whole[: 2 * ROWS], y, group=group)
    dist.all_gather_into_tensor(whole[2 * ROWS :], z[:, 0].contiguous(), group=group)
    dist.reduce_scatter_tensor(half[: ROWS // 2], y, group=group)
    dist.reduce_scatter_tensor(half[ROWS // 2 :], x[:, 1].contiguous(), group=group)
    return [whole, half, x + 1]


def chained(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor, group: Any, other: Any) -> Tensors:
    """Give the result of each collective to the next one of its kind, as it is or by way of other operations."""
    sums = [functional.all_reduce(y, "sum", group)]
    rows, parts = [functional.all_gather_tensor(z, 0, group)], [functional.reduce_scatter_tensor(x, "sum", 0, group)]
    for number in range(2):
        sums.append(functional.all_reduce(sums[-1] * number + sums[-1], "sum", group))
        rows.append(functional.all_gather_tensor(rows[-1][::2] + number, 0, group))
        parts.append(functional.reduce_scatter_tensor(parts[-1] - number, "sum", 0, group))
    return [*sums, *rows, *parts]


ALL_REDUCES = {"bucket_all_reduces_fx": "all"}
GATHERS = {"bucket_all_gathers_fx": "all"}
SCATTERS = {"bucket_reduce_scatters_fx": "all"}
EVERYTHING = {**ALL_REDUCES, **GATHERS, **SCATTERS}

CASES: dict[Code, list[tuple[Options, int]]] = {
    reduced: [
        ({}, 12),
        ({"bucket_all_reduces_fx": "none", **GATHERS, **SCATTERS}, 12),
        (ALL_REDUCES, 7),
    ],
    gathered: [
        ({}, 9),
        ({"bucket_all_gathers_fx": "none", **ALL_REDUCES, **SCATTERS}, 9),
        (GATHERS, 5),
        ({"bucket_all_gathers_fx": "only_fsdp"}, 6),
        ({**GATHERS, "bucket_all_gathers_bucket_mode": "custom_ops"}, 5),
        ({**GATHERS, "bucket_all_gathers_bucket_mode": "custom_ops_multidtype"}, 3),
    ],
    scattered: [
        ({}, 11),
        ({"bucket_reduce_scatters_fx": "none", **ALL_REDUCES, **GATHERS}, 11),
        (SCATTERS, 6),
        ({**SCATTERS, "bucket_reduce_scatters_bucket_mode": "custom_ops"}, 6),
        ({**SCATTERS, "bucket_reduce_scatters_bucket_mode": "coalesced"}, 6),
    ],
    chained: [(options, 9) for options in (ALL_REDUCES, GATHERS, SCATTERS, EVERYTHING)],
    written: [({}, 6), (ALL_REDUCES, 5), (GATHERS, 5), (SCATTERS, 5), (EVERYTHING, 3)],
}
"""Functions, and how many collectives their graph has with each set of options.

Collectives next to each other share a bucket if they have the same kind, group, operation and dtype, and none needs
another's result.
"""


@requirement(
    "DYN-PASS-01",
    "Collectives that Inductor puts into buckets have the results of uncompiled ones in values, dtype and strides.",
    source=SOURCE,
)
@requirement(
    "DYN-PASS-02",
    "A bucket has adjacent independent collectives of one kind, group, operation and dtype, at each value of the "
    "options.",
    source=SOURCE,
)
@pytest.mark.needs(torch=dynamo.BUCKET_MODES)
@pytest.mark.parametrize("code", CASES, ids=lambda f: f.__name__)
@pytest.mark.world(3, timeout=120)
def test_buckets(world: World, code: Code) -> None:
    """Compile one function with each option, in two groups of the last two ranks, and call it twice."""
    compare(world, code, CASES[code])


def compare(world: World, code: Code, cases: list[tuple[Options, int]]) -> None:
    """Compile a function with each set of options; compare values, strides and the number of collectives."""

    def body(rank: Rank) -> None:
        group, other = (dist.new_group(MEMBERS) for _ in range(2))
        if rank.index not in MEMBERS:
            return
        for options, count in cases:
            torch.compiler.reset()
            tracer = Tracer("inductor passes")
            compiled: Any = torch.compile(code, backend=tracer, fullgraph=True)
            for call in range(2):
                given = [
                    dyadic(*shape, key=(rank.index, call, shape), dtype=torch.float32).to(rank.device)
                    for shape in ((ROWS, 4), (ROWS,), (ROWS, 2))
                ]
                alone = [x.clone() for x in given]
                right = [x + 0 for x in code(alone[0], alone[1], alone[2], group, other)]
                with dynamo.inductor_options(options):
                    results = compiled(*given, group, other)
                assert unwaited() == 0
                for number, (one, result) in enumerate(zip([*right, *alone], [*results, *given], strict=True)):
                    what = f"tensor {number} of call {call} with {options}"
                    assert_same(one, result, what)
                    assert one.stride() == result.stride(), what
            assert len(tracer.graphs) == 1
            assert len(tracer.launched()) == count, options

    world.run(body)


@requirement(
    "DYN-PASS-8703",
    "Code that Inductor generates for buckets of gathers in operators of their own has the results of uncompiled code.",
    source="torch/_inductor/config.py: bucket_all_gathers_bucket_mode: custom_ops, custom_ops_multidtype",
)
@pytest.mark.needs(features=["inductor"], torch=dynamo.BUCKET_MODES)
@pytest.mark.world(2, timeout=180)
def test_buckets_in_code(world: World) -> None:
    """Gather tensors of two dtypes and three sizes, and use what was gathered."""
    tag = uuid.uuid4().hex

    def body(rank: Rank) -> None:
        def code(x: torch.Tensor, y: torch.Tensor) -> Tensors:
            return [functional.all_gather_tensor(each, 0, dist.group.WORLD) for each in (x, y, x[:2], y.t())]

        kinds = ((ROWS, 4), torch.float32), ((ROWS, 2), torch.float64)
        given = [dyadic(*shape, key=rank.index, dtype=dtype).to(rank.device) for shape, dtype in kinds]
        right = [one + 0 for one in code(*given)]
        for mode in ("custom_ops", "custom_ops_multidtype"):
            options = {**GATHERS, "bucket_all_gathers_bucket_mode": mode}
            with dynamo.cached_as(f"{tag} {mode} {rank.index}"), dynamo.inductor_options(options):
                results = dynamo.compiled(code, backend="inductor")[0](*given)
            for number, (one, result) in enumerate(zip(right, results, strict=True)):
                assert_same(one, result + 0, f"tensor {number} in mode {mode}")

    world.run(body)


def added(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor, group: Any, other: Any) -> Tensors:
    """Add results of reduce-scatters: of each operation, of three, and of pairs that no one collective can replace."""

    def part(x: torch.Tensor, op: str = "sum", among: Any = group) -> torch.Tensor:
        return functional.reduce_scatter_tensor(x, op, 0, among)

    results = [part(y + i, op) + part(y * 2, op) for i, op in enumerate(("sum", "max", "min", "product"))]
    again = part(y + 5)
    return [
        *results,
        part(x) + part(x * 3) + part(x - 1),
        part(z + 1) + part(z, "max"),
        part(z * 2) + part(z - 2, "sum", other),
        part(y - 3) + part(y.double()),
        part(z * 4) - part(z + 3),
        part(z * 5) * part(z + 4),
        part(z + 5) + 1,
        again + part(y - 5),
        again * 2,
    ]


@requirement(
    "DYN-PASS-04",
    "With dedup_reduce_scatters, Inductor joins only linear reduce-scatters of one group and dtype whose results are "
    "added.",
    source="torch/_inductor/config.py: dedup_reduce_scatters; torch/_inductor/fx_passes/fsdp.py",
)
@pytest.mark.needs(torch=dynamo.JOINED_SUMS)
@pytest.mark.world(3, timeout=120)
def test_sums(world: World) -> None:
    """Compile a function of sums without the option and with it."""
    compare(world, added, [({}, 24), ({"dedup_reduce_scatters": True}, 21)])


def alike(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor, group: Any, other: Any) -> Tensors:
    """Add results of reduce-scatters of equal shapes."""
    one, two = (functional.reduce_scatter_tensor(each, "sum", 0, group) for each in (y, y * 2))
    return [one + two]


def crossed(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor, group: Any, other: Any) -> Tensors:
    """Add a row to a column, each the result of a reduce-scatter."""
    row, column = (functional.reduce_scatter_tensor(each, "sum", 0, group) for each in (y, z[:, :1]))
    return [row + column]


@requirement(
    "DYN-PASS-8900",
    "With dedup_reduce_scatters, a sum of reduce-scatters has the uncompiled shape, whichever shapes are added.",
    source="torch/_inductor/config.py: dedup_reduce_scatters; torch/_inductor/fx_passes/fsdp.py",
)
@pytest.mark.needs(torch=dynamo.JOINED_SUMS)
@pytest.mark.parametrize(("code", "joined"), [(alike, 1), (crossed, 2)], ids=["alike", "a row and a column"])
@pytest.mark.world(3, timeout=120)
def test_shapes_of_sums(world: World, code: Code, joined: int) -> None:
    """Compile a sum with the option; count what is launched."""
    compare(world, code, [({"dedup_reduce_scatters": True}, joined)])


SIZED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "all_reduces": lambda x: functional.all_reduce(x, "sum", dist.group.WORLD),
    "all_gathers": lambda x: functional.all_gather_tensor(x[: ROWS // 2], 0, dist.group.WORLD),
    "reduce_scatters": lambda x: functional.reduce_scatter_tensor(x, "sum", 0, dist.group.WORLD),
}
"""Collectives of which the larger of the input and the output has as many bytes as a tensor."""


@requirement(
    "DYN-PASS-03",
    "Inductor fills a bucket of collectives up to the size that the option for their kind sets.",
    source="torch/_inductor/config.py: bucket_all_reduces_fx_bucket_size_determinator and those of other kinds",
)
@pytest.mark.parametrize("kind", SIZED)
@pytest.mark.world(2, timeout=120)
def test_bucket_sizes(world: World, kind: str) -> None:
    """Set sizes of no tensor, one, two and a half, four and all of six equal tensors, and the default."""

    def body(rank: Rank) -> None:
        def six(x: torch.Tensor) -> Tensors:
            return [SIZED[kind](x + i) for i in range(6)]

        x = dyadic(ROWS, key=rank.index, dtype=torch.float32).to(rank.device)
        right = [y + 0 for y in six(x)]
        for tensors in (0, 2.5, 4):
            torch.compiler.reset()
            tracer = Tracer("inductor passes")
            size = None if tensors is None else (lambda bucket, part=tensors: part * x.nbytes / 2**20)
            options = {f"bucket_{kind}_fx": "all", f"bucket_{kind}_fx_bucket_size_determinator": size}
            with dynamo.inductor_options(options):
                results = torch.compile(six, backend=tracer, fullgraph=True)(x)
            for number, (one, result) in enumerate(zip(right, results, strict=True)):
                assert_same(one, result, f"tensor {number} with room for {tensors}")
            full = 6 if tensors is None else max(1, math.floor(tensors))
            assert len(tracer.launched()) == math.ceil(6 / full), f"room for {tensors} tensors"

    world.run(body)


@requirement(
    "DYN-PASS-5040",
    "With compile_on_one_rank, Inductor puts as many collectives into a bucket as without it.",
    source="torch/distributed/config.py: compile_on_one_rank; torch/_inductor/fx_passes/bucketing.py",
)
@pytest.mark.needs(torch=dynamo.ON_ONE_RANK)
@pytest.mark.skipif(runs_with("<2.13"), reason="before 2.13, graphs for every rank can't have buckets")
@pytest.mark.parametrize("group", ["of a mesh", "default"])
@pytest.mark.world(2, timeout=120)
def test_buckets_for_every_rank(world: World, group: str) -> None:
    """Put three collectives of each kind into one bucket."""

    def body(rank: Rank) -> None:
        among: Any = (rank.mesh(), 0) if group == "of a mesh" else dist.group.WORLD
        kinds: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "all_reduces": lambda x: functional.all_reduce(x, "sum", among),
            "all_gathers": lambda x: functional.all_gather_tensor(x, 0, among),
            "reduce_scatters": lambda x: functional.reduce_scatter_tensor(x, "sum", 0, among),
        }
        x = dyadic(ROWS, key=rank.index, dtype=torch.float32).to(rank.device)
        for kind, collective in kinds.items():

            def three(x: torch.Tensor, collective: Any = collective) -> Tensors:
                return [collective(x + i) for i in range(3)]

            torch.compiler.reset()
            tracer = Tracer("inductor passes")
            with dynamo.on_one_rank(), dynamo.inductor_options({f"bucket_{kind}_fx": "all"}):
                results = torch.compile(three, backend=tracer, fullgraph=True)(x)
            for number, (one, result) in enumerate(zip(three(x), results, strict=True)):
                assert_same(one + 0, result, f"{kind} {number}")
            assert len(tracer.launched()) == 1, kind

    world.run(body)


@requirement(
    "DYN-PASS-5041",
    "Inductor fills buckets of collectives by the hints for sizes that are marked as unbacked.",
    source="torch._dynamo.decorators.mark_unbacked: hint_override; torch/_inductor/fx_passes/bucketing.py",
)
@pytest.mark.skipif(runs_with("<2.13"), reason="before 2.13, buckets need sizes that are known")
@pytest.mark.world(2, timeout=120)
def test_buckets_of_hinted_sizes(world: World) -> None:
    """Have room for all of six tensors, for two and a half, or for one, by the hint, which is not the size."""

    def body(rank: Rank) -> None:
        def six(x: torch.Tensor) -> Tensors:
            return [functional.all_reduce(x + i, "sum", dist.group.WORLD) for i in range(6)]

        hint = 2 * ROWS
        for room, buckets in ((10.0, 1), (2.5, 3), (1.0, 6)):
            x = dyadic(ROWS, key=rank.index, dtype=torch.float32).to(rank.device)
            dynamo.marked("unbacked", x, 0, hint_override=hint)
            torch.compiler.reset()
            tracer = Tracer("inductor passes")
            options = {
                "bucket_all_reduces_fx": "all",
                "bucket_all_reduces_fx_bucket_size_determinator": lambda bucket, room=room: room * hint * 4 / 2**20,
            }
            with dynamo.inductor_options(options):
                results = torch.compile(six, backend=tracer, fullgraph=True)(x)
            for number, (one, result) in enumerate(zip(six(x), results, strict=True)):
                assert_same(one + 0, result, f"tensor {number} with room for {room}")
            assert len(tracer.launched()) == buckets, f"room for {room} tensors"

    world.run(body)


@requirement(
    "DYN-PASS-05",
    "Inductor runs the functions and the named passes in reorder_for_compute_comm_overlap_passes in their order, each "
    "on what the last one returned.",
    source="torch/_inductor/config.py: reorder_for_compute_comm_overlap, reorder_for_compute_comm_overlap_passes",
)
@pytest.mark.needs(features=["inductor"])
@pytest.mark.world(2, timeout=180)
def test_overlap_passes(world: World) -> None:
    """Move a gather, which is first, and its wait behind a product by named passes, then the product by a function."""
    tag = uuid.uuid4().hex

    def body(rank: Rank) -> None:
        def code(x: torch.Tensor) -> Tensors:
            return [functional.all_gather_tensor(x, 0, dist.group.WORLD), x @ x]

        def seen(nodes: list[Any]) -> list[Any]:
            orders.append([node.get_name() for node in nodes])
            return list(nodes)

        def swapped(nodes: list[Any]) -> list[Any]:
            return [nodes[1], nodes[0], *nodes[2:]]

        x = dyadic(4, 4, key=rank.index, dtype=torch.float32).to(rank.device)
        right = [y + 0 for y in code(x)]
        for runs in (True, False):
            orders = list[list[str]]()
            options = {
                "reorder_for_compute_comm_overlap": runs,
                "reorder_for_compute_comm_overlap_passes": [
                    seen,
                    "raise_comms",
                    seen,
                    "sink_waits",
                    seen,
                    swapped,
                    seen,
                ],
            }
            with dynamo.cached_as(f"{tag} {runs} {rank.index}"), dynamo.inductor_options(options):
                results = dynamo.compiled(code, backend="inductor")[0](x)
            for number, (one, result) in enumerate(zip(right, results, strict=True)):
                assert_same(one, result, f"tensor {number}")
            assert len(orders) == (4 if runs else 0)
            if runs:
                gather, wait, product = orders[0]
                assert orders[1:] == [orders[0], [gather, product, wait], [product, gather, wait]]

    world.run(body)


NAMED = ("raise_comms", "sink_waits", "reorder_compute_for_overlap", "reorder_communication_preserving_peak_memory")
"""The passes that move collectives and have names."""


@requirement(
    "DYN-PASS-06",
    "With each named pass that reorders, Inductor's code has the results of uncompiled code, also where a collective "
    "needs another's.",
    source="torch/_inductor/config.py: reorder_for_compute_comm_overlap_passes; test_compute_comm_reordering.py",
)
@pytest.mark.needs(features=["inductor"])
@pytest.mark.world(2, timeout=180)
def test_named_passes(world: World) -> None:
    """Run each pass alone, and all in a row with a function that estimates times; rank 1 is late."""
    tag = uuid.uuid4().hex

    def body(rank: Rank) -> None:
        group = dist.group.WORLD

        def code(x: torch.Tensor) -> Tensors:
            first = functional.all_gather_tensor(x, 0, group)
            product = x @ x
            second = functional.all_gather_tensor(first, 0, group)
            other = product @ product
            third = functional.reduce_scatter_tensor(second, "sum", 0, group)
            return [first, second, third, first[:4] @ other, other @ product]

        x = dyadic(4, 4, key=rank.index, dtype=torch.float32).to(rank.device)
        right = [y + 0 for y in code(x)]
        asked = []

        def estimate(operation: Any) -> float:
            asked.append(operation)
            return float(len(asked))

        for number, passes in enumerate((*((name,) for name in NAMED), NAMED)):
            options = {
                "reorder_for_compute_comm_overlap": True,
                "reorder_for_compute_comm_overlap_passes": list(passes),
                "estimate_op_runtime": estimate if passes is NAMED else "default",
            }
            with dynamo.cached_as(f"{tag} {number} {rank.index}"), dynamo.inductor_options(options):
                function, _ = dynamo.compiled(code, backend="inductor")
                for call in range(2):
                    dist.barrier()
                    time.sleep(0.05 * rank.index)
                    results = function(x)
                    assert unwaited() == 0, passes
                    for one, result in zip(right, results, strict=True):
                        assert_same(one, result, f"call {call}, {passes}")
        assert asked

    world.run(body)


@requirement(
    "DYN-PASS-07",
    "Inductor's code launches collectives in the order of the code, whatever the order in which results are used.",
    source="torch/_inductor/config.py: reorder_for_locality, reorder_for_compute_comm_overlap; "
    "test_compute_comm_reordering.py: test_inductor_default_comms_ordering",
)
@pytest.mark.needs(features=["inductor"])
@pytest.mark.world(2, timeout=60, keeps="collectives of code that was compiled before a reset")
def test_order_of_launches(world: World) -> None:
    """Rank 0 runs compiled code and rank 1 the uncompiled one, in which results are used backwards, or one is not."""
    tag = uuid.uuid4().hex

    def body(rank: Rank) -> None:
        group = dist.group.WORLD

        def code(*xs: torch.Tensor) -> Tensors:
            pending = [functional.all_gather_tensor(x, 0, group) for x in xs]
            used = [xs[1]]
            for number in (2, 0, 3):
                used.append(pending[number] @ used[-1][:3])
            return used

        xs = [dyadic(3, 3, key=(rank.index, key), dtype=torch.float32, span=2).to(rank.device) for key in range(4)]
        right = [y + 0 for y in code(*xs)]
        function = code
        if rank.index == 0:
            function, _ = dynamo.compiled(code, backend="inductor")
        with dynamo.cached_as(f"{tag} {rank.index}"):
            results = function(*xs)
        for number, (one, result) in enumerate(zip(right, results, strict=True)):
            assert_same(one, result + 0, f"tensor {number}")

    world.run(body)
