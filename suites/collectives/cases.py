"""The cases that the suite runs, made from axes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from harness.oracles.collectives import COLLECTIVES, COMPLEX, FLOATS, IN_PLACE, REDUCING, ROOTED, Case
from harness.stacks.collectives import functional

WHOLE = (torch.uint8, torch.int8, torch.int32, torch.int64)
DTYPES = (torch.bool, *WHOLE, *FLOATS, *COMPLEX)
"""Dtypes that every backend has to support. For those in OPTIONAL, it may raise a Python error."""
OPTIONAL = (torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2)

OPS = ("SUM", "PRODUCT", "MIN", "MAX", "AVG", "BAND", "BOR", "BXOR")

COUNTS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 66)
LARGE = ((1 << 18) + 1, (1 << 20) + 3)
"""float32 elements: about 1 MiB and 4 MiB, past the sizes at which protocols switch."""
LARGEST = (11 << 18, 16 << 20)
SHAPES = ((), (1,), (3, 5), (2, 0, 3), (1, 4, 1), (2, 3, 4))


FUNCTIONAL = ("all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
"""Collectives that have a functional form."""
COALESCED = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")
"""Collectives that a coalescing manager accepts."""


def here(names: Iterable[str]) -> list[Any]:
    """Parametrize over functional collectives, each of which this version of torch may lack."""
    return [pytest.param(name, marks=pytest.mark.needs(torch=f"{functional.__name__}.{name}")) for name in names]


def dtypes_of(op: str) -> tuple[torch.dtype, ...]:
    """Return the dtypes for which a reduction is defined."""
    if op in ("BAND", "BOR", "BXOR"):
        return (torch.bool, *WHOLE)
    if op == "AVG":
        return (*FLOATS, *COMPLEX)
    return DTYPES if op == "SUM" else (torch.bool, *WHOLE, *FLOATS)


def swept(base: Case, dtypes: Iterable[torch.dtype], thorough: bool) -> list[Case]:
    """Return cases with every dtype at a few counts and float32 at every count.

    ``thorough``: every dtype at every count.
    """
    dtypes = list(dtypes)
    counts = tuple(range(67)) if thorough else COUNTS
    cases = []
    for number, dtype in enumerate(dtypes):
        some = counts if thorough or dtype == torch.float32 else (0, 1, 7, counts[3 + number], 66)
        cases += [replace(base, dtype=dtype, shape=(count,)) for count in dict.fromkeys(some)]
    return cases


def shaped(base: Case, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[Case]:
    """Return a case for every shape."""
    return [replace(base, shape=shape) for shape in shapes]


def repeated(base: Case, thorough: bool) -> list[Case]:
    """Return cases that repeat calls with large tensors, and one call in float16.

    The largest tensor is called only once if the collective has a piece for each rank. With ``thorough``, there are
    more calls and larger tensors.
    """
    few = (3, 3) if base.collective in IN_PLACE else (3, 1)
    cases = [replace(base, shape=(count,), repeats=30 if thorough else n) for count, n in zip(LARGE, few, strict=True)]
    cases.append(replace(base, dtype=torch.float16, shape=(2 * LARGE[0],), repeats=1))
    return cases + ([replace(base, shape=(count,), repeats=3) for count in LARGEST] if thorough else [])


def for_every_root(base: Case, size: int) -> list[Case]:
    """Return a case for every root, named by its global rank and by its rank in the group."""
    return [replace(base, root=root, root_as=named) for root in range(size) for named in ("global", "group")]


def groups_of(size: int) -> list[tuple[int, ...]]:
    """Return subgroups of a world: all ranks in reverse, one rank, without rank 0, with gaps, overlapping."""
    everyone = tuple(range(size))
    groups = [everyone[::-1], (size - 1,), everyone[1:], everyone[:-1], everyone[::2], everyone[1:][::-1]]
    return [group for group in dict.fromkeys(groups) if group]


def every_collective(**changes: object) -> list[Case]:
    """Return one case of each collective, with the same changes of its arguments."""
    return [replace(Case(name), **changes) for name in COLLECTIVES]  # type: ignore[arg-type]


# crossings: every value of an argument together with every value of every other


Pair = frozenset[tuple[str, int]]
"""Two axes, each with the index of a value."""


def crossed(
    axes: Mapping[str, Sequence[Any]], fits: Callable[[dict[str, Any]], bool] = lambda row: True
) -> list[dict[str, Any]]:
    """Return rows of one value from each axis, in which any two values that fit occur together at least once.

    The algorithm is greedy and deterministic. A row begins with a pair that has not occurred yet, and takes the value
    with the most new pairs from each further axis. ``fits`` is called with two values at a time. The number of rows is
    close to the product of the two longest axes.
    """
    good: dict[Pair, None] = {}
    for one, other in itertools.combinations(axes, 2):
        for (i, a), (j, b) in itertools.product(enumerate(axes[one]), enumerate(axes[other])):
            if fits({one: a, other: b}):
                good[frozenset({(one, i), (other, j)})] = None
    missing, rows = dict(good), []
    while missing:
        row = dict(sorted(next(iter(missing))))
        for axis in (axis for axis in axes if axis not in row):
            count = len(axes[axis])
            turns = [(number + len(rows)) % count for number in range(count)]  # breaks ties differently each time
            new = {n: [frozenset({(axis, n), taken}) for taken in row.items()] for n in turns}
            fitting = [n for n in turns if all(pair in good for pair in new[n])]
            if not fitting:
                break
            row[axis] = max(fitting, key=lambda n: sum(pair in missing for pair in new[n]))
        for pair in itertools.combinations(row.items(), 2):
            missing.pop(frozenset(pair), None)
        if len(row) == len(axes):
            rows.append({axis: axes[axis][row[axis]] for axis in axes})
    return rows


def obstacle(case: Case) -> str:
    """Return the reason to leave a case out of crossings, or an empty string."""
    if case.collective in REDUCING and case.dtype not in dtypes_of(case.op):
        return "the reduction has no meaning for the dtype"
    if case.form == "functional" and case.collective not in FUNCTIONAL:
        return "there is no functional form"
    if case.form == "coalesced" and case.collective not in COALESCED:
        return "coalescing managers do not take it"
    if case.collective == "gather" and case.dtype in COMPLEX:
        return "COLL-GATHER-02 is about it alone"
    if case.form == "functional" and case.collective == "all_to_all_single" and case.dtype in COMPLEX:
        return "COLL-FUNC-08 is about it alone"
    if case.layout == "expanded" and (not case.shape or 0 in case.shape):
        return "nothing is there to be expanded"
    if not case.shape and case.collective in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"):
        return "what has no dimension can't be joined"
    return ""


def crossing(
    collective: str,
    size: int,
    thorough: bool,
    *,
    layouts: Sequence[str] = ("contiguous", "offset"),
    out_layouts: Sequence[str] = ("contiguous", "offset"),
    forms: Sequence[str] = ("sync", "async"),
) -> list[Case]:
    """Return cases, of two calls each, that cross op, dtype, layouts, group, form, shape and name of the root.

    By default, any two values occur together. With ``thorough``, every combination of op, dtype, layouts, group, form
    and name occurs, with shapes in turn.
    """
    everyone = tuple(range(size))
    # A group of one rank or an empty tensor would cover pairs without testing them, so these cases are added below.
    several = [group for group in dict.fromkeys([everyone[1:], everyone[::-2]]) if len(group) > 1]
    axes: dict[str, Sequence[Any]] = {
        "dtype": DTYPES,
        "op": OPS if collective in REDUCING else ("SUM",),
        "layout": layouts,
        "out_layout": ("contiguous",) if collective in IN_PLACE or forms == ["functional"] else out_layouts,
        "group": [None, *several],
        "form": forms,
        "root_as": ("group", "global") if collective in ROOTED else ("global",),
    }
    shapes = ((3, 5), (7,), (1,), (1030,), (2, 3, 2), (33,))

    def case_of(row: dict[str, Any]) -> Case:
        dtype = dtypes_of(row.get("op", "SUM"))[0]  # for a row without a dtype: any that fits
        return Case(collective, root=len(row.get("group") or everyone) - 1, repeats=2, **{"dtype": dtype, **row})

    if not thorough:
        rows = crossed({**axes, "shape": shapes}, lambda row: not obstacle(case_of(row)))
        alone = case_of({"group": (size - 1,), "form": forms[0], "shape": (7,)})
        empty = case_of({"form": forms[0], "shape": (0,)})
        return [*map(case_of, rows), *(case for case in (alone, empty) if not obstacle(case))]
    cases, turn = [], itertools.cycle(shapes)
    for values in itertools.product(*axes.values()):
        row = dict(zip(axes, values, strict=True))
        fitting = [
            case
            for shape in itertools.islice(turn, len(shapes))
            if not obstacle(case := case_of({**row, "shape": shape}))
        ]
        cases += fitting[:1]
        next(turn)
    return cases
