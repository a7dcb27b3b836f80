"""A ceiling ends what takes too much with one error, and leaves no limit behind."""

from __future__ import annotations

import resource
import signal

import pytest

from harness.safe_io.ceiling import Exceeded, ceiling


def limits() -> object:
    return (
        resource.getrlimit(resource.RLIMIT_AS),
        signal.getsignal(signal.SIGPROF),
        signal.getitimer(signal.ITIMER_PROF),
    )


def forever() -> None:
    while True:
        pass


def test_memory() -> None:
    """More memory than allowed is an error that says how much was allowed."""
    before = limits()
    with pytest.raises(Exceeded, match=r"more than 64 MiB of memory"), ceiling(64 << 20, 60):
        bytearray(256 << 20)
    assert limits() == before
    assert len(bytearray(256 << 20)) == 256 << 20


def test_time() -> None:
    """More CPU time than allowed is an error that says how much was allowed."""
    before = limits()
    with pytest.raises(Exceeded, match=r"more than 0.05 s of CPU"), ceiling(64 << 20, 0.05):
        forever()
    assert limits() == before


def test_within() -> None:
    """What stays below the ceiling is left alone, and so are its own errors."""
    before = limits()
    with pytest.raises(KeyError), ceiling(64 << 20, 10):
        raise KeyError("mine")
    with ceiling(64 << 20, 10):
        found = len(bytearray(1 << 20))
    assert (found, limits()) == (1 << 20, before)
