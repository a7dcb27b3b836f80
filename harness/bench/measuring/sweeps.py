"""What is measured of collectives: which of them, which sizes, dtypes, ops and forms, and on how many ranks.

``suites/perf`` has a test for each, and a duet offers each as a series.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from harness.bench.figures import sizes
from harness.bench.measuring.collectives import HAVE_IN_PLACE, Timed

RANKS = (2, 4)
LATENCY, MIDDLE, BANDWIDTH = 1 << 10, 1 << 16, 1 << 20
"""Sizes in bytes: one where only latency counts, one where protocols switch, one where only bandwidth counts."""
SIZES = (LATENCY, MIDDLE, BANDWIDTH)

DTYPES = (torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64)
"""Dtypes besides float32, which is measured at all sizes."""
OPS = ("PRODUCT", "MIN", "MAX", "AVG")

OTHERS = (
    "broadcast",
    "reduce",
    "all_gather_into_tensor",
    "all_gather",
    "reduce_scatter_tensor",
    "reduce_scatter",
    "all_to_all_single",
    "all_to_all",
    "gather",
    "scatter",
)

VALUES = [
    *(Timed("all_reduce", size, dtype) for dtype in DTYPES for size in (LATENCY, BANDWIDTH)),
    *(Timed("all_reduce", size, op=op) for op in OPS for size in (LATENCY, BANDWIDTH)),
    *(Timed("all_reduce", BANDWIDTH, torch.int32, op) for op in ("BAND", "BOR", "BXOR")),
]
"""Other dtypes and reductions, small or large; on two ranks."""
FORMS = [
    *(Timed("all_reduce", size, mode="async") for size in SIZES),
    *(Timed("all_reduce", size, mode="async", in_flight=4) for size in SIZES),
    *(Timed("all_reduce", size, place="out") for size in SIZES),
]
"""Asynchronous calls, several in flight, and calls out of place; on two ranks."""
SUBGROUPS = [Timed("all_reduce", size, group=(1, 3)) for size in SIZES]
"""Two of four ranks."""
COLLECTIVES = [
    *(Timed(collective, size) for collective in OTHERS for size in SIZES),
    *(Timed(collective, BANDWIDTH, place="in") for collective in HAVE_IN_PLACE),
    *(Timed(collective, BANDWIDTH, mode="async", in_flight=4) for collective in OTHERS[:6:2]),
]
"""The other collectives; on all numbers of ranks."""


def every(largest: int) -> Iterator[tuple[Timed, int]]:
    """Yield everything that is measured, with its number of ranks.  ``largest``: bytes of the largest message."""
    for ranks in RANKS:
        yield from ((Timed("all_reduce", size), ranks) for size in sizes(largest))
    yield from ((timed, 2) for timed in (*VALUES, *FORMS))
    yield from ((timed, 4) for timed in SUBGROUPS)
    for ranks in RANKS:
        yield from ((timed, ranks) for timed in COLLECTIVES)


def described(timed: Timed) -> str:
    """Describe a timed collective for a test's id."""
    return "-".join(
        filter(
            None,
            (
                timed.collective,
                timed.op.lower() if timed.op != "SUM" else "",
                str(timed.dtype).removeprefix("torch."),
                f"{timed.bytes}B",
                timed.mode if timed.mode != "sync" else "",
                f"{timed.in_flight}inflight" if timed.in_flight > 1 else "",
                timed.place and f"{timed.place}place",
                "group" if timed.group is not None else "",
            ),
        )
    )
