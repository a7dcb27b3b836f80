"""Strategies that are made once: making one for each draw costs more than the drawing."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, TypeVar

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

_T = TypeVar("_T")

EITHER = st.booleans()


def among(options: Sequence[_T]) -> SearchStrategy[_T]:
    """As ``st.sampled_from``, of options that can be keys of a dict."""
    return _among(*options)


@functools.lru_cache(1000, typed=True)  # or True would be drawn as the 1 that came before it
def _among(*options: Any) -> SearchStrategy[Any]:
    return st.sampled_from(options)
