"""Bandwidths, sizes, percentiles: the arithmetic of figures."""

from __future__ import annotations

import pytest

from harness.bench.figures import algbw, bus_factor, busbw, largest_message, pieces, sizes
from harness.bench.records import percentile, size_of
from harness.plugin.perf import size_in_bytes

MIB = 1 << 20


@pytest.mark.parametrize(
    ("collective", "factor"),
    [
        ("all_reduce", 2 * 3 / 4),
        ("all_gather_into_tensor", 3 / 4),
        ("reduce_scatter_tensor", 3 / 4),
        ("all_to_all_single", 3 / 4),
        ("gather", 3 / 4),
        ("scatter", 3 / 4),
        ("broadcast", 1),
        ("reduce", 1),
    ],
)
def test_bus_factor(collective: str, factor: float) -> None:
    """Busbw over algbw on four ranks is what nccl-tests says."""
    assert bus_factor(collective, 4) == factor


def test_bandwidths() -> None:
    """A gigabyte in a second on two ranks: 1 GB/s of message, and of bus."""
    assert algbw(10**9, 1.0) == 1
    assert busbw("all_reduce", 10**9, 1.0, 2) == 1
    assert busbw("all_reduce", 10**9, 1.0, 8) == 1.75


def test_one_rank_has_no_bus() -> None:
    """Nothing crosses a link where there is one rank."""
    assert busbw("all_reduce", 10**9, 1.0, 1) == 0


def test_pieces() -> None:
    """The message of all_gather is what all ranks give; that of all_reduce is one rank's."""
    assert (pieces("all_gather", 4), pieces("all_reduce", 4)) == (4, 1)


def test_sizes_begin_at_eight_bytes_and_are_dense_around_a_mebibyte() -> None:
    """Every quarter of a MiB near it, factors of four elsewhere."""
    found = sizes(16 * MIB)
    assert found[0] == 8
    assert found[-1] == 8 * MIB
    assert [s for s in found if MIB // 4 <= s <= 2 * MIB] == [MIB * q // 4 for q in (1, 2, 3, 4, 6, 8)]
    assert found == sorted(set(found))


@pytest.mark.parametrize("largest", [8, 1000, MIB, 64 * MIB])
def test_a_larger_limit_keeps_what_was_there(largest: int) -> None:
    """Series keep their names when a machine gets more memory."""
    assert [s for s in sizes(4 * largest) if s <= largest] == sizes(largest)


def test_memory_limits_the_message() -> None:
    """Half of what is available, for six buffers a rank; never more than was asked for."""
    assert largest_message(48 * MIB, 4, 64 * MIB) == MIB
    assert largest_message(1 << 50, 4, 64 * MIB) == 64 * MIB


@pytest.mark.parametrize(
    ("text", "size"), [("8", 8), ("64KiB", 1 << 16), ("1.5 MiB", 3 << 19), ("2G", 2 << 30), ("64kb", 1 << 16)]
)
def test_sizes_as_people_write_them(text: str, size: int) -> None:
    """Units are powers of 1024."""
    assert size_in_bytes(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1 parsec", "1e3", "1,5MiB"])
def test_what_is_no_size(text: str) -> None:
    """It is refused with an example of one."""
    with pytest.raises(ValueError, match="is no size: write for example 64KiB"):
        size_in_bytes(text)


@pytest.mark.parametrize(
    ("size", "text"), [(8, "8 B"), (1 << 10, "1 KiB"), (3 << 18, "768 KiB"), (3 << 19, "1.5 MiB"), (1 << 40, "1 TiB")]
)
def test_sizes_for_people(size: int, text: str) -> None:
    """Exact where they are multiples of powers of two."""
    assert size_of(size) == text


def test_percentiles() -> None:
    """Interpolated between neighbours, as numpy does by default."""
    assert [percentile([4.0, 1.0, 3.0, 2.0], p) for p in (0, 50, 100)] == [1, 2.5, 4]


def test_no_percentile_of_nothing() -> None:
    """It is refused rather than made up."""
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)
