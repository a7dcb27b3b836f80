"""How large a program may be: every bound that a stored program is held against, in one place.

What is drawn is below all of them: some ten layers of up to eight features, three steps, a few rows for each rank.
They keep a file that somebody sent from taking all memory, or hours, on the machine of who looks at it: the largest
program that they let through takes about a minute and 2 GiB before ranks start.
"""

from __future__ import annotations

FILE = 1 << 20
"""Bytes of a stored program."""
RANKS = 64
"""Of a world: more than one machine has devices."""
LAYERS = 256
"""In the whole model, those inside others included."""
DEPTH = 8
"""Of layers inside layers."""
DIMENSIONS = 8
"""Of a row."""
EXTENT = 4096
"""Of one dimension: features, channels, a kernel, a vocabulary, rows of a micro-batch."""
STEPS = 64
MICRO_BATCHES = 64
"""Of one step."""
SPAN = 1024
"""Of whole numbers in weights and data."""
DENOMINATOR = 1 << 20
SEED = 1 << 53
"""Numbers up to it are the same in every reader of JSON."""
WORD = 100
"""Characters of a name."""
NAMES = 256
"""In one list of layers, or of options."""

CALLS = 1 << 13
"""Of layers in all forwards together: each is an operation or several, which oracles record."""
ELEMENTS = 1 << 20
"""Numbers that one device computes and keeps for comparison in the whole run; an oracle makes 64 samples of each."""
PRODUCTS = 1 << 26
"""Multiplications of the whole run, forward and backward."""
