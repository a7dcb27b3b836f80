"""Which cases the suite runs: lists of them, made from axes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from harness.oracles.collectives import COLLECTIVES, COMPLEX, FLOATS, Case

WHOLE = (torch.uint8, torch.int8, torch.int32, torch.int64)
DTYPES = (torch.bool, *WHOLE, *FLOATS, *COMPLEX)
"""What every backend is asked for.  Others are in OPTIONAL: a backend may refuse them, with a Python error."""
OPTIONAL = (torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2)

OPS = ("SUM", "PRODUCT", "MIN", "MAX", "AVG", "BAND", "BOR", "BXOR")

COUNTS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 66)
LARGE = ((1 << 18) + 1, (1 << 20) + 3)
"""float32 elements: about 1 MiB and 4 MiB, past the sizes at which protocols switch."""
LARGEST = (11 << 18, 16 << 20)
SHAPES = ((), (1,), (3, 5), (2, 0, 3), (1, 4, 1), (2, 3, 4))


def dtypes_of(op: str) -> tuple[torch.dtype, ...]:
    """The dtypes for which a reduction has a meaning."""
    if op in ("BAND", "BOR", "BXOR"):
        return (torch.bool, *WHOLE)
    if op == "AVG":
        return (*FLOATS, *COMPLEX)
    return DTYPES if op == "SUM" else (torch.bool, *WHOLE, *FLOATS)


def swept(base: Case, dtypes: Iterable[torch.dtype], thorough: bool) -> list[Case]:
    """A case for every dtype at a few counts, and for every count at a few dtypes (thorough: all of both)."""
    dtypes = list(dtypes)
    counts = tuple(range(67)) if thorough else COUNTS
    found = []
    for number, dtype in enumerate(dtypes):
        some = counts if thorough or dtype == torch.float32 else (0, 1, 7, counts[3 + number], 66)
        found += [replace(base, dtype=dtype, shape=(count,)) for count in dict.fromkeys(some)]
    return found


def shaped(base: Case, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[Case]:
    """A case for every shape."""
    return [replace(base, shape=shape) for shape in shapes]


def repeated(base: Case, thorough: bool) -> list[Case]:
    """Large tensors, again and again; one of half precision."""
    found = [replace(base, shape=(count,), repeats=30 if thorough else 3) for count in LARGE]
    found.append(replace(base, dtype=torch.float16, shape=(2 * LARGE[0],)))
    return found + ([replace(base, shape=(count,), repeats=3) for count in LARGEST] if thorough else [])


def for_every_root(base: Case, size: int) -> list[Case]:
    """A case for every root, named by its global rank and by its rank in the group."""
    return [replace(base, root=root, root_as=named) for root in range(size) for named in ("global", "group")]


def groups_of(size: int) -> list[tuple[int, ...]]:
    """Subgroups of a world: whole in reverse, one rank, without rank 0, with gaps, overlapping."""
    everyone = tuple(range(size))
    found = [everyone[::-1], (size - 1,), everyone[1:], everyone[:-1], everyone[::2], everyone[1:][::-1]]
    return [group for group in dict.fromkeys(found) if group]


def every_collective(**changes: object) -> list[Case]:
    """One case of each collective, its arguments changed alike; of ROOTED ones with the last but not the only root."""
    return [replace(Case(name), **changes) for name in COLLECTIVES]  # type: ignore[arg-type]
