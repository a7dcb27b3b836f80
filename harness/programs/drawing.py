"""Strategies that are built once, because building a strategy costs more than drawing from it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, TypeVar

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

_T = TypeVar("_T")

EITHER = st.booleans()


def among(options: Sequence[_T]) -> SearchStrategy[_T]:
    """Return ``st.sampled_from(options)`` from a cache. The options must be hashable."""
    return _among(*options)


@functools.lru_cache(1000, typed=True)  # otherwise True would get the strategy that was cached for 1
def _among(*options: Any) -> SearchStrategy[Any]:
    return st.sampled_from(options)
