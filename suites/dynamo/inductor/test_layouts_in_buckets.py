"""Tensors of every layout and size in the buckets that Inductor makes of collectives.

Graphs are changed by Inductor's passes and executed as they are, without generating code.
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
from harness.stacks.tracing import Tracer

SOURCE = "torch/_inductor/config.py: bucket_all_gathers_fx, bucket_reduce_scatters_fx, bucket_all_reduces_fx"
MEMBERS = [1, 2]
"""The ranks of the group, which are not their ranks in it."""

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x.view(4, 24),
    "transposed": lambda x: x.view(24, 4).t(),
    "transposed in the middle": lambda x: x.view(2, 6, 8).transpose(1, 2),
    "every second column": lambda x: x.view(4, 24)[:, ::2],
    "last rows": lambda x: x.view(8, 12)[4:],
    "expanded": lambda x: x[:6].view(1, 6).expand(4, 6),
    "channels last": lambda x: x.view(2, 2, 4, 6).to(memory_format=torch.channels_last),
    "of one dimension": lambda x: x[::3],
    "of two elements": lambda x: x[5:7],
    "of nothing": lambda x: x[:0].view(0, 3),
    "computed": lambda x: x.view(12, 8).t() * 2,
    "copied as transposed": lambda x: x.view(12, 8).t().clone(),
}
"""Tensors whose first dimension is even, of 96 elements or a part of them."""

KINDS: dict[str, tuple[str, list[str], Callable[[torch.Tensor, Any], torch.Tensor]]] = {
    "sums": ("bucket_all_reduces", [], lambda x, g: functional.all_reduce(x, "sum", g)),
    "largest": ("bucket_all_reduces", [], lambda x, g: functional.all_reduce(x, "max", g)),
    "gathers": (
        "bucket_all_gathers",
        ["default", "custom_ops", "custom_ops_multidtype"],
        lambda x, g: functional.all_gather_tensor(x, 0, g),
    ),
    "scatters": (
        "bucket_reduce_scatters",
        ["default", "custom_ops", "coalesced"],
        lambda x, g: functional.reduce_scatter_tensor(x, "sum", 0, g),
    ),
    "scattered largest": (
        "bucket_reduce_scatters",
        ["default"],
        lambda x, g: functional.reduce_scatter_tensor(x, "max", 0, g),
    ),
}
"""Collectives: the option that puts them into buckets, its modes, and the call."""

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8)


def modes(kind: str) -> list[Mapping[str, Any]]:
    """Return the options that put collectives of a kind into buckets, in each mode."""
    option, names, _ = KINDS[kind]
    return [{f"{option}_fx": "all"} | {f"{option}_bucket_mode": name} for name in names] or [{f"{option}_fx": "all"}]


def compare(rank: Rank, kind: str, code: Callable[[torch.Tensor], list[torch.Tensor]], x: torch.Tensor) -> None:
    """Compile a function with its collectives in buckets; compare values, dtypes, strides and what was given."""
    right = [y + 0 for y in code(x.clone())]
    for options in modes(kind):
        torch.compiler.reset()
        tracer = Tracer("inductor passes")
        given = x.clone()
        with dynamo.inductor_options(options):
            results = torch.compile(code, backend=tracer, fullgraph=True)(given)
        assert unwaited() == 0
        for number, (one, result) in enumerate(zip(right, results, strict=True)):
            what = f"{kind}, tensor {number}, with {options}"
            assert_same(one, result, what)
            assert one.stride() == result.stride(), what
        assert_same(x, given, f"what was given, with {options}")
        assert len(tracer.launched()) < len(right), f"{kind} with {options}: {len(tracer.launched())} collectives"


@requirement(
    "DYN-PASS-8657",
    "Collectives of tensors of any layout or size have in a bucket the values and strides of uncompiled ones.",
    source=SOURCE,
)
@pytest.mark.needs(torch=dynamo.BUCKET_MODES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.world(3, timeout=120)
def test_layouts(world: World, kind: str) -> None:
    """Put tensors of all layouts into buckets, in a group whose ranks are not the global ones, in each mode."""

    def body(rank: Rank) -> None:
        group: Any = dist.new_group(MEMBERS)
        if rank.index not in MEMBERS:
            return

        def code(x: torch.Tensor) -> list[torch.Tensor]:
            return [KINDS[kind][2](layout(x + n), group) for n, layout in enumerate(LAYOUTS.values())]

        x = dyadic(96, key=rank.index, dtype=torch.float32, span=4).to(rank.device)
        compare(rank, kind, code, x)

    world.run(body)


@requirement(
    "DYN-PASS-8658",
    "Collectives of each dtype have in a bucket the values and dtypes of uncompiled ones.",
    source=SOURCE,
)
@pytest.mark.needs(torch=dynamo.BUCKET_MODES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.world(2, timeout=120)
def test_dtypes(world: World, kind: str) -> None:
    """Give each kind two tensors of each dtype, one after the other, which share a bucket."""

    def body(rank: Rank) -> None:
        def code(x: torch.Tensor) -> list[torch.Tensor]:
            xs = [(x + n).to(dtype) for dtype in DTYPES for n in range(2)]
            return [KINDS[kind][2](y, dist.group.WORLD) for y in xs]

        x = torch.arange(1.0, 9.0).to(rank.device) + 9 * rank.index
        compare(rank, kind, code, x)

    world.run(body)
