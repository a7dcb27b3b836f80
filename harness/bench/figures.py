"""Bandwidths as nccl-tests defines them, and message sizes of collectives.

Source of the definitions: ``doc/PERFORMANCE.md`` of nccl-tests.  *algbw* is the message size over the time.  *busbw* is
the bandwidth that every link must have had, which can be compared with the hardware's for any number of ranks.
"""

from __future__ import annotations

from harness.bench.records import Series

REDUCED_TWICE = frozenset({"all_reduce"})
SHARED_OUT = frozenset(
    {
        "all_gather",
        "all_gather_into_tensor",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "all_to_all",
        "all_to_all_single",
        "gather",
        "scatter",
    }
)
"""Collectives that assemble or distribute a whole.  The whole is their message: what each rank gives to one other rank,
times the number of ranks."""


HSDP = "hsdp.reduce"
"""HSDP's reduction of gradients: a reduce_scatter within a replica, then an all_reduce between replicas.  Its busbw is
its algbw, because its two levels may be on two kinds of links."""

BUSBW_DEFINED = REDUCED_TWICE | SHARED_OUT | {"broadcast", "reduce"}
"""Collectives whose busbw is the bandwidth of a link."""

USUAL = (8, 512, 8 << 10, 128 << 10, 1 << 20, 2 << 20)
"""Sizes in bytes that show most of what there is to see of a collective."""


def usual(series: Series) -> bool:
    """Return whether a series is one of the few to measure if nothing says which: all_reduce of float32 on 2 ranks."""
    plain = series.operation == "all_reduce" and series.op == "sum" and series.dtype == "float32" and not series.variant
    return plain and series.metric == "time" and series.world == 2 and series.bytes in USUAL


def pieces(collective: str, ranks: int) -> int:
    """Return the number of parts in the message of a collective, where a part is what one rank gives to one other."""
    return ranks if collective in SHARED_OUT else 1


def bus_factor(collective: str, ranks: int) -> float:
    """Return busbw over algbw: 2(n-1)/n for ``all_reduce``, (n-1)/n for ``SHARED_OUT``, 1 for others."""
    if collective in REDUCED_TWICE:
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if collective in SHARED_OUT else 1.0


def algbw(size: int, seconds: float) -> float:
    """Return the algorithm bandwidth in GB/s (10^9).  ``size``: bytes."""
    return size / seconds / 1e9


def busbw(collective: str, size: int, seconds: float, ranks: int) -> float:
    """Return the bandwidth of each link in GB/s (10^9).  ``size``: bytes."""
    return algbw(size, seconds) * bus_factor(collective, ranks)


def sizes(largest: int) -> list[int]:
    """Return message sizes in bytes for a sweep, ascending: from 8 B in factors of 4, dense around 1 MiB.

    None is above ``largest``.  Smaller sizes stay the same when ``largest`` grows, so that series keep their names.
    """
    sparse = [8 << (2 * i) for i in range(32)]
    dense = [(1 << 20) * part // 4 for part in (1, 2, 3, 4, 6, 8)]
    return [size for size in sorted({*sparse, *dense}) if size <= largest]


def usual_largest(on_host: bool) -> int:
    """Return the bytes of the largest message that is measured if nobody says more."""
    return 16 << 20 if on_host else 1 << 30


def largest_message(available: int, ranks: int, limit: int | None = None) -> int:
    """Return the bytes of the largest message that leaves half of the ``available`` memory free, up to a ``limit``.

    A rank holds up to six buffers of this size: inputs, outputs, expected values, and copies of them.
    """
    most = available // (2 * 6 * max(ranks, 1))
    return most if limit is None else min(limit, most)
