"""Output of nccl-tests as its versions write it, with made-up figures: the format strings are those of its sources."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from harness.bench.figures import busbw
from harness.bench.history.nccl_tests import OPERATIONS

SIZES = (1 << 20, 4 << 20, 16 << 20)
SETTINGS = (
    "# nThread 1 nGpus 1 minBytes 1048576 maxBytes 16777216 step: 4(factor) warmup iters: 1 iters: 20 agg iters: 1 "
    "validation: 1 graph: 0"
)
DEVICE = "Made-up Device 80GB"


def seconds_of(size: int) -> float:
    """A made-up time: 20 us, and 100 GB/s."""
    return 20e-6 + size / 100e9


def _float(value: float, width: int) -> str:
    """``getFloatStr`` of the versions since 2.17.4."""
    for digits in (2, 1, 0):
        text = f"{value:{width}.{digits}f}"
        if len(text) <= width:
            return text
    return f"{value:{width}.1e}"


def _time(microseconds: float, *, new: bool) -> str:
    if new:
        return _float(microseconds, 7)
    digits = 0 if microseconds >= 10000 else 1 if microseconds >= 1000 else 2
    return f"{microseconds:7.{digits}f}"


def text(
    version: str = "2.19.6",
    *,
    test: str = "all_reduce",
    ranks: int = 4,
    sizes: Sequence[int] = SIZES,
    dtype: str = "float",
    op: str = "sum",
    root: int = -1,
    wrong: str = "0",
    per_iteration: bool = False,
    timestamps: bool = False,
    device: str = DEVICE,
    ended: bool = True,
) -> str:
    """What the program prints.  ``version``: of nccl-tests; ``wrong``: what the column ``#wrong`` has in place."""
    number = tuple(map(int, version.split(".")))
    new, says_name = number >= (2, 17, 4), number >= (2, 16, 7)
    lines = []
    if new:
        lines.append(f"# nccl-tests version {version} nccl-headers=22808 nccl-library=22808")
    if says_name:
        lines.append(f"# Collective test starting: {test}_perf")
    more = " unalign: 0" if number >= (2, 18) else ""
    lines += [
        f"{SETTINGS}{more}",
        "#",
        "# Using devices",
    ]
    group = "Group  0 " if number >= (2, 13, 4) else ""
    lines += [
        f"#  Rank {rank:2d} {group}Pid {100 + rank:6d} on     host-a device {rank:2d} [0000:{rank:02x}:00] {device}"
        for rank in range(ranks)
    ]
    body = "   time   algbw   busbw  #wrong"
    extra = "    i_min    i_max    i_p99    i_cv%" if per_iteration else ""
    stamp = "            timestamp" if timestamps else ""
    lines += [
        "#",
        "#                                                              out-of-place                       in-place",
        f"#       size         count      type   redop    root  {body}{extra}  {body}{extra}{stamp}",
        f"# {'(B)':>10s}  {'(elements)':>12s}  {'':>8s}  {'':>6s}  {'':>6s}     (us)  (GB/s)  (GB/s)",
    ]
    for size in sizes:
        row = f"{size:12d}  {size // 4:12d}  {dtype:>8s}  {op:>6s}  {root:6d}"
        for place in ("out", "in"):
            seconds = seconds_of(size) if size else 1e-6
            alg, bus = size / seconds / 1e9, busbw(OPERATIONS[test], size, seconds, ranks)
            figures = [_float(alg, 6), _float(bus, 6)] if new else [f"{alg:6.2f}", f"{bus:6.2f}"]
            row += "  ".join(["", _time(seconds * 1e6, new=new), *figures, f"{wrong if place == 'in' else 0:>6}"])
            if per_iteration:
                row += "     1.00     2.00     2.00     3.00"
        lines.append(row + ("  2026-11-25 04:05:06" if timestamps else ""))
    if ended:
        lines += ["# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 12.3456 ", "#"]
    return "\n".join(lines) + "\n"


def document(*, version: int = 3, test: str = "all_reduce", ranks: int = 4, **fields: Any) -> dict[str, Any]:
    """What ``-J`` writes."""
    results = []
    for size in SIZES:
        seconds = seconds_of(size)
        body = {
            "time": seconds * 1e6,
            "alg_bw": size / seconds / 1e9,
            "bus_bw": busbw(OPERATIONS[test], size, seconds, ranks),
            "nwrong": 0.0,
        }
        row = {"size": size, "count": size // 4, "type": "float", "redop": "sum", "root": "    -1"}
        row |= {"out_of_place": dict(body), "in_place": dict(body)}
        results.append(row | {"actual_iterations": 20, "experiment_name": ""})
    devices = [
        {"rank": i, "group": 0, "pid": 1, "hostname": "host-a", "device": i, "device_hex": "0", "device_info": DEVICE}
        for i in range(ranks)
    ]
    return {
        "version": version,
        "start_time": "2026-11-25 04:05:06",
        "args": [f"./build/{test}_perf", "-b", "8"],
        "env": ["HOME=/root", "MY_TOKEN=hunter2"],
        "nccl_version": 22808,
        "config": {"nthreads": 1, "ngpus": 1, "iterations": 20, "blocking_collectives": "false", "devices": devices},
        "results": results,
        "out_of_bounds": {"count": 0, "okay": "true"},
        "average_bus_bandwidth": {"bandwidth": 1.0, "okay": "unchecked"},
        "errors": [],
        "end_time": "2026-11-25 04:06:06",
    } | fields


def dumped(found: dict[str, Any]) -> bytes:
    """The JSON of a document."""
    return json.dumps(found).encode()
