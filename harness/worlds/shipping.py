"""Preparation of functions for ranks: a function is pickled by value if a rank can't import it, and pickled only once
if nothing that it depends on can have changed since.

A test runs the same function on ranks again and again, and pickling it takes longer than the trip there and back.
"""

from __future__ import annotations

import dis
import os
import sys
import weakref
from dataclasses import dataclass
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any

import cloudpickle

from harness.worlds import wire

_PLAIN = (int, float, complex, str, bytes, bool, type(None), type(Ellipsis))


@dataclass(frozen=True)
class _Known:
    """A function's pickle, and what must not have changed for the pickle to be valid."""

    pickled: bytes
    code: CodeType | None
    codes: tuple[tuple[FunctionType, CodeType], ...]
    names: tuple[tuple[dict[str, Any], str, Any], ...]
    """Scope, name, and the object that the name referred to."""
    cells: tuple[tuple[CellType, Any], ...]

    def good(self, fn: FunctionType) -> bool:
        """Return whether the pickle is still valid for the function."""
        try:
            return fn.__code__ is self.code and (
                all(f.__code__ is code for f, code in self.codes)
                and all(scope.get(name) is value for scope, name, value in self.names)
                and all(cell.cell_contents is value for cell, value in self.cells)
            )
        except ValueError:  # an emptied cell
            return False


_MOST = 500
_cache: weakref.WeakKeyDictionary[Any, _Known | None] = weakref.WeakKeyDictionary()


def frame_of(job: int, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> list[bytes]:
    """Return the frame that tells a rank to run a function.

    Errors: TypeError that says what can't be sent, and why.
    """
    if not callable(fn):
        raise TypeError(f"world.run needs a function that takes a rank, not {fn!r}")
    try:
        ready = _ready(fn)
        if ready is not fn and not args and not kwargs:
            return wire.plain(("run", job, (ready, args, kwargs)))
        return wire.dumps(("run", job, (ready, args, kwargs)))
    except Exception as e:
        raise TypeError(f"{name}, or an argument of it, can't be sent to the ranks: {type(e).__name__}: {e}") from e


def _ready(fn: Any) -> Any:
    """Return the function itself, or its pickle if that can be cached; makes sure that the function can be pickled."""
    known = _cache.get(fn, _UNKNOWN) if type(fn) is FunctionType else None
    if known is not None and known is not _UNKNOWN and known.good(fn):
        return known.pickled
    module = sys.modules.get(getattr(fn, "__module__", None) or "")
    if module is not None and is_test_code(module):
        cloudpickle.register_pickle_by_value(module)
    if type(fn) is not FunctionType:
        return fn
    if known is not None:
        known = _cache[fn] = _remember(fn)
    return fn if known is None else known.pickled


def _remember(fn: FunctionType) -> _Known | None:
    """Pickle a function for reuse; None if it carries tensors, or depends on something that can change in place."""
    look = _Look()
    if not look.function(fn):
        return None
    frame = wire.dumps(fn)
    if len(frame) > 2:
        return None  # it carries tensors
    # The function itself is left out: a cache that held it would keep it alive.
    codes = tuple((f, code) for f, code in look.codes if f is not fn)
    names = tuple(entry for entry in look.names if entry[2] is not fn)
    if len(_cache) >= _MOST:
        _cache.clear()
    return _Known(frame[1], fn.__code__, codes, names, tuple(look.cells))


_UNKNOWN = _Known(b"", None, (), (), ())


class _Look:
    """Goes through everything that a function's pickle contains."""

    def __init__(self) -> None:
        self.codes: list[tuple[FunctionType, CodeType]] = []
        self.names: list[tuple[dict[str, Any], str, Any]] = []
        self.cells: list[tuple[CellType, Any]] = []
        self._seen: set[int] = set()

    def function(self, fn: FunctionType) -> bool:
        """Return whether a function that is pickled by value depends only on unchanging things, and changes none."""
        if id(fn) in self._seen:
            return True
        self._seen.add(id(fn))
        if fn.__dict__ or fn.__kwdefaults__ or not all(self.value(v) for v in fn.__defaults__ or ()):
            return False
        self.codes.append((fn, fn.__code__))
        for cell in fn.__closure__ or ():
            try:
                self.cells.append((cell, cell.cell_contents))
            except ValueError:
                return False
        scope = fn.__globals__
        names = _names(fn.__code__)
        if names is None:
            return False
        mine = [(scope, name, scope[name]) for name in names if name in scope]
        self.names += mine
        return all(self.value(v) for _, _, v in mine) and all(self.value(v) for _, v in self.cells)

    def value(self, value: Any) -> bool:
        """Return whether a value's pickle can't change as long as it is the same object."""
        kind = type(value)
        if kind in _PLAIN:
            return True
        if kind is tuple:
            return all(self.value(item) for item in value)
        if kind is ModuleType:
            return value.__name__ not in cloudpickle.list_registry_pickle_by_value()
        if kind is FunctionType and not _by_reference(value):
            return self.function(value)
        return (kind in (FunctionType, BuiltinFunctionType) or isinstance(value, type)) and _by_reference(value)


def _by_reference(value: Any) -> bool:
    """Return whether a function or class is pickled as a name."""
    module = getattr(value, "__module__", None)
    return (
        module in sys.modules
        and module != "__main__"
        and module not in cloudpickle.list_registry_pickle_by_value()
        and "<locals>" not in value.__qualname__
    )


def _names(code: CodeType) -> set[str] | None:
    """Return the names that code may look up in its global scope, or None if it assigns to one there."""
    if any(i.opname in ("STORE_GLOBAL", "DELETE_GLOBAL") for i in dis.get_instructions(code)):
        return None
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            inner = _names(constant)
            if inner is None:
                return None
            names |= inner
    return names


def is_test_code(module: Any) -> bool:
    """Return whether a rank may be unable to import a module: it is not installed, and not part of Concord."""
    file = getattr(module, "__file__", None)
    if not file:
        return False
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    if os.path.abspath(file).startswith(tuple(os.path.join(root, ours, "") for ours in ("harness", "reports"))):
        return False
    return "site-packages" not in file and not file.startswith(os.path.dirname(os.__file__) + os.sep)
