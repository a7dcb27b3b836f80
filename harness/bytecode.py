"""Find cached bytecode that does not match its source; run as a script by :mod:`harness.plugin.cached`.

Python executes ``__pycache__/NAME.pyc`` instead of a source if that file records the source's time and size, or its
hash. pytest does the same with bytecode of its own for tests. This script compiles the source again and compares both.

Python compiles a script from its source, so none of our own cached bytecode runs here. The bytecode that is compared
does not run either.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import marshal
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path

_PARTS = (
    *("co_name", "co_qualname", "co_flags", "co_argcount", "co_posonlyargcount", "co_kwonlyargcount", "co_stacksize"),
    *("co_code", "co_exceptiontable", "co_names", "co_varnames", "co_freevars", "co_cellvars"),
    *("co_firstlineno", "co_linetable"),
)
"""The attributes that determine what a code object does, besides its constants. The name of its file is ignored."""


def caches(source: str, tail: str, optimize: int) -> tuple[str, str]:
    """Return the paths at which Python and pytest keep the bytecode of a source. ``tail``: suffix of pytest's."""
    plain = importlib.util.cache_from_source(source, optimization=str(optimize or ""))
    return plain, os.path.join(os.path.dirname(plain), os.path.basename(source).removesuffix(".py") + tail)


def is_used(bytecode: bytes, source: bytes, status: os.stat_result) -> bool:
    """Return whether Python would use a file of bytecode for a source, going by the file's header."""
    flags = int.from_bytes(bytecode[4:8], "little")
    if len(bytecode) < 16 or bytecode[:4] != importlib.util.MAGIC_NUMBER or flags > 3:
        return False
    if flags & 1:
        return not flags & 2 or bytecode[8:16] == importlib.util.source_hash(source)
    stamp = (int(status.st_mtime) & 0xFFFFFFFF, status.st_size & 0xFFFFFFFF)
    return stamp == (int.from_bytes(bytecode[8:12], "little"), int.from_bytes(bytecode[12:16], "little"))


def key(value: object) -> object:
    """Return a value that is equal for code or constants that do the same. NaN equals itself; 0.0 and -0.0 differ."""
    if isinstance(value, types.CodeType):
        return (*(getattr(value, part) for part in _PARTS), key(value.co_consts))
    if isinstance(value, tuple):
        return tuple(map(key, value))
    if isinstance(value, frozenset):
        return frozenset, sorted(repr(key(each)) for each in value)
    return type(value), repr(value) if isinstance(value, float | complex) else value


def compiled(path: str, source: bytes, optimize: int) -> types.CodeType:
    """Compile a source as Python does."""
    return compile(source, path, "exec", dont_inherit=True, optimize=optimize)


def rewritten(path: str, source: bytes, optimize: int, hook: bool) -> types.CodeType:
    """Compile a test's source as pytest does. ``hook``: pytest's setting ``enable_assertion_pass_hook``."""
    from _pytest.assertion.rewrite import rewrite_asserts

    tree = ast.parse(source, filename=path)
    rewrite_asserts(tree, source, path, types.SimpleNamespace(getini=lambda name: hook))  # type: ignore[arg-type]
    return compile(tree, path, "exec", dont_inherit=True, optimize=optimize)


def strange(path: str, tail: str, optimize: int, hook: bool) -> Iterator[str]:
    """Yield the SHA-256 of each file of bytecode that would be executed for a source and does not match it."""
    try:
        source, status = Path(path).read_bytes(), os.stat(path)
    except OSError:
        return
    for place, cache in enumerate(caches(path, tail, optimize)):
        try:
            bytecode = Path(cache).read_bytes()
        except OSError:
            continue
        if is_used(bytecode, source, status):
            try:  # Python would read it, too
                cached = marshal.loads(bytecode[16:])  # noqa: S302
                expected = rewritten(path, source, optimize, hook) if place else compiled(path, source, optimize)
                if key(cached) == key(expected):
                    continue
            except Exception:
                pass  # Python can't read the bytecode or the source
            yield hashlib.sha256(bytecode).hexdigest()


def main() -> None:
    """Read lists of sources from standard input, one line of JSON each, then write the mismatches by source."""
    os.nice(5)
    settings = json.loads(sys.argv[1])
    sys.path[:], sys.pycache_prefix = settings["path"], settings["prefix"]
    how = settings["tail"], settings["optimize"], settings["hook"]
    mismatches: dict[str, list[str]] = {}
    for line in sys.stdin.buffer:
        for path in json.loads(line):
            if digests := list(strange(path, *how)):
                mismatches[path] = digests
    sys.stdout.write(json.dumps(mismatches))


if __name__ == "__main__":
    main()
