"""Hypothesis' constants from loaded modules, which would make a seed's cases depend on more than the seed.

Recent versions of Hypothesis sometimes draw a constant that occurs in the source of a loaded module, unless the module
is installed in site-packages. So the cases of a seed would depend on how Concord is installed, which files are
collected, and which tests ran before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

_FINDER = "_get_local_constants"
"""The name of Hypothesis' own function that finds them."""


@contextlib.contextmanager
def of_no_module() -> Iterator[None]:
    """Draw no constants of modules inside the context. An older Hypothesis, which has none, is left as it is."""
    try:
        from hypothesis.internal.conjecture import providers
    except ImportError:
        yield
        return
    module: Any = providers
    before = getattr(module, _FINDER, None)
    if before is None or not hasattr(module, "Constants") or not hasattr(module, "CONSTANTS_CACHE"):
        yield
        return
    setattr(module, _FINDER, lambda: module.Constants())
    module.CONSTANTS_CACHE.cache.clear()
    try:
        yield
    finally:
        setattr(module, _FINDER, before)
        module.CONSTANTS_CACHE.cache.clear()
