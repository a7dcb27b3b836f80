"""Libraries in Inductor's cache that a killed rank has left half-written."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from harness.worlds.compiled import cache_folder, remove_unfinished
from harness.worlds.local import LocalLauncher

WHOLE = Path(msgspec._core.__file__).read_bytes()
"""A shared library."""
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda whole: b"",
    "less-than-a-header": lambda whole: whole[:40],
    "header-alone": lambda whole: whole[:64],
    "half": lambda whole: whole[: len(whole) // 2],
    "one-byte-less": lambda whole: whole[:-1],
    "zeros": lambda whole: bytes(len(whole)),
}


def put(folder: Path, name: str, content: bytes, seconds_ago: float = 3600) -> Path:
    path = folder / "ab" / name
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_bytes(content)
    os.utime(path, (time.time() - seconds_ago,) * 2)
    return path


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_removed(tmp_path: Path, damage: str) -> None:
    """A library that ends too early goes; whole ones, ones that may still be written, and other files stay."""
    cut = DAMAGES[damage](WHOLE)
    path = put(tmp_path, "cut.so", cut)
    kept = [
        put(tmp_path, "whole.so", WHOLE),
        put(tmp_path, "growing.so", cut, seconds_ago=1),
        put(tmp_path, "cut.txt", cut),
        put(
            tmp_path, "of-another-kind.so", b"INPUT ( libm.so.6 ) /* a linker's script has a library's name, too */" * 2
        ),
    ]
    assert remove_unfinished(tmp_path) == [path]
    assert not path.exists()
    assert all(each.exists() for each in kept)
    assert remove_unfinished(tmp_path) == []


def test_nothing_there(tmp_path: Path) -> None:
    """No cache, a file in its place, and a link that leads nowhere are no errors."""
    assert remove_unfinished(tmp_path / "none") == []
    (tmp_path / "file").touch()
    assert remove_unfinished(tmp_path / "file") == []
    (tmp_path / "link.so").symlink_to(tmp_path / "none")
    assert remove_unfinished(tmp_path) == []


def test_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is where torch has it, with a variable or without."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    monkeypatch.setenv("USER", "some:one")
    monkeypatch.setenv("LOGNAME", "some:one")
    assert cache_folder({}) == Path(default_cache_dir())
    assert cache_folder({"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}) == tmp_path


def test_before_ranks_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What an earlier session has left is gone before the first rank looks for it."""
    path = put(tmp_path, "cut.so", b"")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    launcher = LocalLauncher(["json"])
    try:
        launcher.wait_ready()
        assert not path.exists()
    finally:
        launcher.close()
