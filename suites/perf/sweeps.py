"""What is measured: collectives, sizes, and numbers of ranks."""

from __future__ import annotations

import torch

from harness.bench.measuring.collectives import Timed

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
