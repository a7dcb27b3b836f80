"""The limits on the size of a program: every bound that a stored program must keep.

Generated programs are far below the limits: some ten layers of up to eight features, three steps, a few rows per rank.
The limits keep a file that somebody sent from using all memory, or hours, on the receiver's machine. The largest
program within them takes about a minute and 2 GiB before ranks start.
"""

from __future__ import annotations

FILE = 1 << 20
"""Bytes of a stored program."""
RANKS = 64
"""The world size; a single machine has fewer devices."""
LAYERS = 256
"""Layers of the whole model, including those inside others."""
DEPTH = 8
"""How deep layers may be nested."""
DIMENSIONS = 8
"""Dimensions of a row."""
EXTENT = 4096
"""The size of one dimension: features, channels, a kernel, a vocabulary, rows of a micro-batch."""
STEPS = 64
MICRO_BATCHES = 64
"""Micro-batches of one step."""
SPAN = 1024
"""The largest whole number in weights and data."""
DENOMINATOR = 1 << 20
SEED = 1 << 53
"""Numbers up to this one are the same in every reader of JSON."""
WORD = 100
"""Characters of a name."""
NAMES = 256
"""Names in one list of layers or options."""

CALLS = 1 << 13
"""Calls of layers in all forwards together; each is one or more operations, which oracles record."""
ELEMENTS = 1 << 20
"""Numbers that a single device computes and keeps for comparison in the whole run; an oracle makes 64 samples of each.
"""
PRODUCTS = 1 << 26
"""Multiplications of the whole run, forward and backward."""
