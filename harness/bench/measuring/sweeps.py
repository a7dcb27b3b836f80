"""What is measured of collectives: which of them, which sizes, dtypes, ops and forms, and on how many ranks.

``suites/perf`` has a test for each, and a duet offers each as a series.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import torch

from harness.bench.figures import sizes
from harness.bench.measuring.asked import DTYPES_MORE, GROUPS, LEVELS, MODELS, RANKS, at_least
from harness.bench.measuring.collectives import HAVE_IN_PLACE, TWO_LEVELS, Timed, shards_of
from harness.bench.measuring.payloads import PAYLOADS, SMALLEST, Payload

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


FURTHER = (torch.complex64, torch.complex128, torch.bool)
"""Dtypes that every backend has to support, and few models send."""
FEW_DTYPES = [Timed("all_reduce", LATENCY, torch.complex64)]
"""What is measured of further dtypes if nobody asks for more."""
EVERY_DTYPE = [
    *FEW_DTYPES,
    *(Timed("all_reduce", size, dtype) for dtype in FURTHER for size in SIZES),
    *(Timed("all_reduce", size, dtype) for dtype in DTYPES for size in (MIDDLE, 16 * BANDWIDTH)),
    *(Timed(name, size, dtype) for name in OTHERS for dtype in (*DTYPES, *FURTHER) for size in (LATENCY, BANDWIDTH)),
]
EVERY_DTYPE = list(dict.fromkeys(EVERY_DTYPE))
"""Every dtype at more sizes, and with every collective; a profile need not claim all of them."""
NEIGHBORS = [Timed("all_reduce", size, group=(0, 1)) for size in SIZES]
"""Two ranks of the same host, where the world is spread over hosts; :data:`SUBGROUPS` are of different ones there."""
TWO_LEVEL_SIZES = (BANDWIDTH,)
MORE_TWO_LEVEL_SIZES = (LATENCY, MIDDLE, BANDWIDTH, 16 * BANDWIDTH)
"""Bytes of the gradients that HSDP reduces."""


def dtypes(more: Collection[str]) -> list[Timed]:
    """Return what is measured of dtypes besides :data:`VALUES`."""
    return EVERY_DTYPE if DTYPES_MORE in more else FEW_DTYPES


def groups(more: Collection[str]) -> list[Timed]:
    """Return what is measured of two of four ranks."""
    return [*SUBGROUPS, *NEIGHBORS] if GROUPS in more else SUBGROUPS


def payloads(more: Collection[str]) -> list[Payload]:
    """Return which messages of models are measured."""
    return PAYLOADS if MODELS in more else [SMALLEST]


def two_level_sizes(more: Collection[str]) -> tuple[int, ...]:
    """Return the bytes of the gradients that are reduced on two levels."""
    return MORE_TWO_LEVEL_SIZES if LEVELS in more else TWO_LEVEL_SIZES


def two_levels(size: int, ranks: int, hosts: int = 1) -> Timed:
    """Return HSDP's reduction of so many bytes of gradients."""
    return Timed(TWO_LEVELS, size, shards=shards_of(ranks, hosts))


def every(
    largest: int, asked: Collection[int] = (), more: Collection[str] = (), room: Callable[[int], int] | None = None
) -> Iterator[tuple[Timed, int]]:
    """Yield every collective that is measured, with its number of ranks.

    ``largest``: bytes of the largest message.  ``asked``: numbers of ranks, the usual ones by default.  ``more``: some
    of :data:`MORE`.  ``room``: returns the bytes of a message that fits, for a number of ranks; ``largest`` by default.
    """
    swept, pairs, fours = asked or RANKS, at_least(2, asked) or (2,), at_least(4, asked) or (4,)
    for ranks in swept:
        yield from ((Timed("all_reduce", size), ranks) for size in sizes(largest))
    for ranks in pairs:
        yield from ((timed, ranks) for timed in (*VALUES, *FORMS, *dtypes(more)) if timed.bytes <= largest)
    for ranks in fours:
        yield from ((timed, ranks) for timed in groups(more))
        yield from ((two_levels(size, ranks), ranks) for size in two_level_sizes(more) if size <= largest)
    for ranks in swept:
        yield from ((timed, ranks) for timed in COLLECTIVES)
        most = room(ranks) if room is not None and MODELS in more else largest
        messages = (payload.timed(ranks) for payload in payloads(more))
        yield from ((timed, ranks) for timed in messages if timed.bytes <= most)


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
