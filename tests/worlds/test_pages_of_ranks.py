"""The server's memory is put into huge pages, where the kernel can."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.worlds import pages

FILLED = """
import json
from harness.worlds import pages

def huge():
    with open("/proc/self/smaps_rollup") as f:
        return next(int(line.split()[1]) << 10 for line in f if line.startswith("AnonHugePages"))

kept = [bytes([i % 251]) * 1000 for i in range(60_000)]
before = huge()
collapsed = pages.collapse()
whole = kept == [bytes([i % 251]) * 1000 for i in range(60_000)]
print(json.dumps([collapsed, huge() - before, whole]))
"""


def test_memory_is_in_huge_pages() -> None:
    """A process with 60 MB of small objects has most of them in huge pages afterwards, and they are as before."""
    done = subprocess.run([sys.executable, "-c", FILLED], capture_output=True, text=True, check=True)
    collapsed, more, whole = json.loads(done.stdout)
    if not collapsed:
        pytest.skip("this kernel has no MADV_COLLAPSE: it is there since Linux 6.1")
    assert whole
    assert collapsed >= 40_000_000
    assert more >= 40_000_000


class Refusing:
    """A libc whose kernel does not know the advice."""

    def __init__(self, _: Any) -> None:
        pass

    def madvise(self, *_: Any) -> int:
        return -1


def test_kernel_that_can_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """An older kernel refuses, and nothing else happens."""
    monkeypatch.setattr(ctypes, "CDLL", Refusing)
    assert pages.collapse() == 0


def test_no_list_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without /proc, nothing is collapsed."""

    def missing(*_: Any, **__: Any) -> str:
        raise FileNotFoundError("/proc/self/maps")

    monkeypatch.setattr(Path, "read_text", missing)
    assert pages.collapse() == 0


def test_only_own_memory_that_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files, shared memory, stacks, what can't be written, and less than a huge page are left alone."""
    maps = """
55e000000000-55e000400000 rw-p 00000000 00:00 0                          [heap]
7f0000100000-7f0000900000 rw-p 00000000 00:00 0
7f0001000000-7f0001400000 rw-p 00000000 08:01 123                        /lib/a file
7f0002000000-7f0002400000 rw-s 00000000 00:01 456                        /memfd:box (deleted)
7f0003000000-7f0003400000 r--p 00000000 00:00 0
7f0004000000-7f0004100000 rw-p 00000000 00:00 0
7ffc00000000-7ffc00400000 rw-p 00000000 00:00 0                          [stack]
""".lstrip()
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: maps)
    assert list(pages._own()) == [(0x55E000000000, 0x400000), (0x7F0000200000, 0x600000)]
