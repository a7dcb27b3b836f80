"""Bands of series have the fewest names that say which."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from harness.bench.detection.bands import bands, describe
from harness.bench.records import Series

ALL = [
    Series(operation=operation, dtype=dtype, bytes=size, world=world)
    for operation, dtype, size, world in product(
        ("all_gather", "all_reduce"), ("bfloat16", "float32"), (8, 64, 512, 4096), (2, 4)
    )
]


@given(st.sets(st.sampled_from(ALL)))
def test_every_series_is_in_one_band(changed: set[Series]) -> None:
    """Bands partition what changed, and none has anything that did not."""
    found = [one for band in bands(changed, ALL) for one in band]
    assert sorted(found, key=lambda one: one.name) == sorted(changed, key=lambda one: one.name)


@given(
    st.sets(st.sampled_from(("all_gather", "all_reduce")), min_size=1),
    st.sets(st.sampled_from(("bfloat16", "float32")), min_size=1),
    st.sets(st.sampled_from((2, 4)), min_size=1),
    st.integers(0, 3),
    st.integers(0, 3),
)
def test_a_product_is_one_band(operations: set[str], dtypes: set[str], worlds: set[int], a: int, b: int) -> None:
    """All combinations of some values, sizes without a gap, are one band."""
    sizes = (8, 64, 512, 4096)[min(a, b) : max(a, b) + 1]
    changed = [
        s for s in ALL if s.operation in operations and s.dtype in dtypes and s.world in worlds and s.bytes in sizes
    ]
    assert len(bands(changed, ALL)) == 1


def test_sizes_with_a_gap_are_two_bands() -> None:
    """A measured size between two that did not change keeps them apart; one that was never measured does not."""
    base = {"operation": "all_reduce", "dtype": "float32", "world": 2}
    small, large = (Series(bytes=size, **base) for size in (8, 512))  # type: ignore[arg-type]
    assert len(bands([small, large], ALL)) == 2
    assert len(bands([small, large], [small, large])) == 1


def test_descriptions() -> None:
    """A band says what is needed to find it, and no more."""
    band = [s for s in ALL if s.operation == "all_reduce" and s.bytes in (64, 512)]
    assert describe(band, ALL) == "all_reduce every dtype 64 B to 512 B on 2, 4 ranks"
    assert describe([s for s in ALL if s.dtype == "float32"], ALL).startswith(
        "all_gather, all_reduce float32 of every size"
    )
    step = [Series(operation="step.replicate", metric="exposed", variant=(("compiled", value),)) for value in "01"]
    assert describe(step[:1], step) == "step.replicate (compiled 0) (exposed)"
    assert describe(step, step) == "step.replicate (exposed)"
