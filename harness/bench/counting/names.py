"""The names of counts, and which of them are compared between two sides."""

from __future__ import annotations

INSTRUCTIONS, FAULTS, SWITCHES = "instructions", "page faults", "context switches"
SENT, SEGMENTS, INTERFACE = "sent bytes", "sent segments", "interface bytes"
CALLS, SENDS = "system calls", "calls that send"
COLLECTIVES, OPERATORS = "collectives", "operators"
ALLOCATIONS, ALLOCATED = "allocations", "allocated bytes"
COPIES, COPIED = "copies", "copied elements"

COMPARED = (COLLECTIVES, SENT, INSTRUCTIONS, OPERATORS, ALLOCATIONS, ALLOCATED, COPIES, COPIED)
"""The counts that were found exact, and instructions, which are too many to agree by chance.

The others vary with the load (docs/performance.md).  Small ones could agree on a few sets by chance: 0 page faults on
all sets of A, 1 on all of B.
"""
