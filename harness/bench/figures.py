"""Bandwidths as nccl-tests defines them, and how large a collective's message is.

Source of the definitions: ``doc/PERFORMANCE.md`` of nccl-tests.  *algbw* is the size of the message over the time;
*busbw* is what every link must have carried for it, to be held against the hardware whatever the number of ranks.
"""

from __future__ import annotations

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
"""Their message is the whole that is put together or taken apart: what each rank gives to one other, times ranks."""


def pieces(collective: str, ranks: int) -> int:
    """How many of what one rank gives to one other there are in the message of a collective."""
    return ranks if collective in SHARED_OUT else 1


def bus_factor(collective: str, ranks: int) -> float:
    """Busbw over algbw: 2(n-1)/n for ``all_reduce``, (n-1)/n where a whole is shared out, 1 for others."""
    if collective in REDUCED_TWICE:
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if collective in SHARED_OUT else 1.0


def algbw(size: int, seconds: float) -> float:
    """Bytes a second, in GB/s (10^9)."""
    return size / seconds / 1e9


def busbw(collective: str, size: int, seconds: float, ranks: int) -> float:
    """What each link carried, in GB/s (10^9)."""
    return algbw(size, seconds) * bus_factor(collective, ranks)


def sizes(largest: int) -> list[int]:
    """Message sizes in bytes for a sweep, ascending: from 8 B in factors of 4, dense around 1 MiB, to ``largest``.

    What is smaller stays when ``largest`` grows, so that series keep their names.
    """
    sparse = [8 << (2 * i) for i in range(32)]
    dense = [(1 << 20) * part // 4 for part in (1, 2, 3, 4, 6, 8)]
    return [size for size in sorted({*sparse, *dense}) if size <= largest]


def largest_message(available: int, ranks: int, limit: int) -> int:
    """The most bytes for one message: ``limit``, or what leaves half of the ``available`` memory free.

    A rank holds up to six buffers of the size: what it gives, what it gets, what is right, and copies of them.
    """
    return min(limit, available // (2 * 6 * max(ranks, 1)))
