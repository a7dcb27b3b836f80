"""Names cached bytecode that is not what its source comes to; run as a script, by :mod:`harness.plugin.cached`.

Python executes ``__pycache__/NAME.pyc`` in a source's place if the source's time and size, or its hash, are those in
it; pytest does so with bytecode of its own for tests.  Here the source is compiled once more and both are compared.

Python compiles a script from its source, so none of our own cached bytecode runs here; nor does any that is looked at.
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
"""All that a code object does; its constants are looked into, and the name of its file says nothing."""


def caches(source: str, tail: str, optimize: int) -> tuple[str, str]:
    """Where Python and pytest keep the bytecode of a source.  ``tail``: with which pytest's names end."""
    plain = importlib.util.cache_from_source(source, optimization=str(optimize or ""))
    return plain, os.path.join(os.path.dirname(plain), os.path.basename(source).removesuffix(".py") + tail)


def is_used(bytecode: bytes, source: bytes, status: os.stat_result) -> bool:
    """Whether the head of a file of bytecode says that it is of this version of Python, and of a source."""
    flags = int.from_bytes(bytecode[4:8], "little")
    if len(bytecode) < 16 or bytecode[:4] != importlib.util.MAGIC_NUMBER or flags > 3:
        return False
    if flags & 1:
        return not flags & 2 or bytecode[8:16] == importlib.util.source_hash(source)
    stamp = (int(status.st_mtime) & 0xFFFFFFFF, status.st_size & 0xFFFFFFFF)
    return stamp == (int.from_bytes(bytecode[8:12], "little"), int.from_bytes(bytecode[12:16], "little"))


def key(value: object) -> object:
    """What is equal for code and constants that do the same; a NaN is equal to itself, and 0.0 is not -0.0."""
    if isinstance(value, types.CodeType):
        return (*(getattr(value, part) for part in _PARTS), key(value.co_consts))
    if isinstance(value, tuple):
        return tuple(map(key, value))
    if isinstance(value, frozenset):
        return frozenset, sorted(repr(key(each)) for each in value)
    return type(value), repr(value) if isinstance(value, float | complex) else value


def compiled(path: str, source: bytes, optimize: int) -> types.CodeType:
    """What Python makes of a source."""
    return compile(source, path, "exec", dont_inherit=True, optimize=optimize)


def rewritten(path: str, source: bytes, optimize: int, hook: bool) -> types.CodeType:
    """What pytest makes of a test's source.  ``hook``: its setting ``enable_assertion_pass_hook``."""
    from _pytest.assertion.rewrite import rewrite_asserts

    tree = ast.parse(source, filename=path)
    rewrite_asserts(tree, source, path, types.SimpleNamespace(getini=lambda name: hook))  # type: ignore[arg-type]
    return compile(tree, path, "exec", dont_inherit=True, optimize=optimize)


def strange(path: str, tail: str, optimize: int, hook: bool) -> Iterator[str]:
    """The SHA-256 of each file of bytecode that would be executed for a source, and is of another text."""
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
            try:  # Python would have read it, too
                found = marshal.loads(bytecode[16:])  # noqa: S302
                text = rewritten(path, source, optimize, hook) if place else compiled(path, source, optimize)
                if key(found) == key(text):
                    continue
            except Exception:
                pass  # either is nothing that Python can read
            yield hashlib.sha256(bytecode).hexdigest()


def main() -> None:
    """Read lists of sources, a line of JSON each, until there are no more; then write what is strange, by source."""
    os.nice(5)
    settings = json.loads(sys.argv[1])
    sys.path[:], sys.pycache_prefix = settings["path"], settings["prefix"]
    how = settings["tail"], settings["optimize"], settings["hook"]
    found: dict[str, list[str]] = {}
    for line in sys.stdin.buffer:
        for path in json.loads(line):
            if digests := list(strange(path, *how)):
                found[path] = digests
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
