"""Cached bytecode, compared with its source."""

from __future__ import annotations

import hashlib
import os
import py_compile
import subprocess
import sys
from importlib.util import cache_from_source
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from _pytest.assertion import rewrite

from harness import bytecode
from harness.plugin.cached import Cached

TEXT = """
LARGE, NAN, EDGES = 10**40, 1e999 - 1e999, (0.0, -0.0, 1j, ..., b"x", frozenset({1, 2}))

def outer(a, *, b=1):
    class Inner:
        '''Documented.'''
        def method(self): return [x for x in (a, b) if x in {"one", "two"}]
    assert a, "said"
    try:
        yield (lambda: b)
    finally:
        del a
"""
KINDS = py_compile.PycInvalidationMode


def strange(path: Path) -> list[str]:
    return list(bytecode.strange(str(path), rewrite.PYC_TAIL, sys.flags.optimize, False))


def planted(path: Path, text: str, mode: KINDS) -> str:
    """Put bytecode of a text in the place of that of a file; returns its SHA-256."""
    own, times = path.read_bytes(), path.stat()
    path.write_text(text)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    pyc = Path(cache_from_source(str(path)))
    py_compile.compile(str(path), str(pyc), doraise=True, invalidation_mode=mode)
    data = bytearray(pyc.read_bytes())
    path.write_bytes(own)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    if mode is KINDS.TIMESTAMP:
        data[12:16] = len(own).to_bytes(4, "little")
    elif mode is KINDS.CHECKED_HASH:
        data[8:16] = bytecode.importlib.util.source_hash(own)
    pyc.write_bytes(data)
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "test_it.py"
    path.write_text(TEXT)
    return path


@pytest.mark.parametrize("mode", KINDS)
def test_bytecode_of_its_source(mode: KINDS, source: Path) -> None:
    """Whatever a source has in it, its own bytecode is that of it, after a move too."""
    planted(source, TEXT, mode)
    assert strange(source) == []


@pytest.mark.parametrize("mode", KINDS)
@pytest.mark.parametrize(("old", "new"), [("assert a", "assert 1"), ("-0.0", "+0.0"), ('"two"', '"2"'), ("b=1", "b=2")])
def test_bytecode_of_another_text(old: str, new: str, mode: KINDS, source: Path) -> None:
    """The least difference is one, however Python decides that bytecode fits a source."""
    digest = planted(source, TEXT.replace(old, new), mode)
    assert strange(source) == [digest]


def test_bytecode_that_nobody_executes(source: Path) -> None:
    """Bytecode of an older source, and of another Python, is passed over, as Python does."""
    planted(source, TEXT.replace("b=1", "b=2"), KINDS.TIMESTAMP)
    pyc = Path(cache_from_source(str(source)))
    data = pyc.read_bytes()
    pyc.write_bytes(b"\0\0\r\n" + data[4:])
    assert strange(source) == []
    pyc.write_bytes(data)
    os.utime(source, (1, 1))
    assert strange(source) == []


@pytest.mark.parametrize("rest", [b"", b"N", b"\xe3\0"], ids=["empty", "None", "cut"])
def test_bytecode_that_cannot_be_read(rest: bytes, source: Path) -> None:
    """What is no code is not what the source comes to."""
    planted(source, TEXT, KINDS.UNCHECKED_HASH)
    pyc = Path(cache_from_source(str(source)))
    pyc.write_bytes(pyc.read_bytes()[:16] + rest)
    assert strange(source) == [hashlib.sha256(pyc.read_bytes()).hexdigest()]


@pytest.mark.parametrize("hook", [False, True])
def test_bytecode_of_pytest(hook: bool, source: Path) -> None:
    """What pytest itself makes of a test is that of its source, with the same settings."""
    config: Any = SimpleNamespace(getini=lambda name: hook)
    stamp, code = rewrite._rewrite_test(source, config)
    pyc = Path(cache_from_source(str(source))).with_name(source.stem + rewrite.PYC_TAIL)
    pyc.parent.mkdir()
    with pyc.open("wb") as file:
        rewrite._write_pyc_fp(file, stamp, code)
    how = str(source), rewrite.PYC_TAIL, sys.flags.optimize
    found = [list(bytecode.strange(*how, says)) for says in (hook, not hook)]
    assert found == [[], [hashlib.sha256(pyc.read_bytes()).hexdigest()]]


def test_the_script_executes_no_bytecode_of_ours() -> None:
    """It needs no module of Concord's, whose bytecode could be planted as well."""
    lines = Path(bytecode.__file__).read_text().split("\n")
    imports = [line.split()[1] for line in lines if line.startswith(("import ", "from "))]
    assert not any(name.startswith(("harness", "reports")) for name in imports)
    done = subprocess.run([sys.executable, "-I", "-S", bytecode.__file__, "{}"], capture_output=True, text=True)
    assert "KeyError: 'path'" in done.stderr


def test_ctrl_c_is_not_for_it(tmp_path: Path) -> None:
    """Ctrl-C reaches all processes of the terminal's group, and the comparison that pytest waits for goes on."""
    path = tmp_path / "module.py"
    path.write_text(TEXT)
    py_compile.compile(str(path))
    cached = Cached(SimpleNamespace(getini=lambda name: False))  # type: ignore[arg-type]
    cached.check([str(path)])
    assert cached._process is not None
    assert os.getpgid(cached._process.pid) != os.getpgrp()
    assert cached.strange() == {}
