"""Huge pages for the memory that ranks are forked with: a fork copies one entry for 2 MiB, and not 512."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path

HUGE = 1 << 21
"""Bytes of a huge page (x86-64, and arm64 with pages of 4 KiB)."""

_MADV_COLLAPSE = 25
"""Since Linux 6.1; the mmap module does not have it."""


def collapse() -> int:
    """Have the kernel put this process's own memory into huge pages, as far as it can.  Returns how many bytes it did.

    A process with torch, Dynamo and Inductor has some 270 MiB, in 70,000 pages.  Most of what a rank that does little
    takes from the processor is their entries in page tables, copied by the fork and given back at the end.  With huge
    pages, a fork and its end took 3 ms instead of 15 (tests/bench/test_ranks.py, on a virtual machine).
    A rank that writes to a page still gets a copy of its 4 KiB alone.  A kernel that can't does nothing.
    """
    with contextlib.suppress(OSError, AttributeError):  # no /proc, or a libc without madvise
        madvise = ctypes.CDLL(None).madvise
        return sum(
            size
            for start, size in _own()
            if madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _MADV_COLLAPSE) == 0
        )
    return 0


def _own() -> Iterator[tuple[int, int]]:
    """Yield the address and the size of each aligned part of this process's anonymous memory and its heap."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, permissions, _, _, _, *name = line.split(maxsplit=5)
        if permissions != "rw-p" or (name and name[0].strip() != "[heap]"):
            continue
        start, end = (int(address, 16) for address in addresses.split("-"))
        start, end = -(-start // HUGE) * HUGE, end // HUGE * HUGE
        if start < end:
            yield start, end - start
