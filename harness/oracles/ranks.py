"""Comparison of the results of a world's ranks with the expected results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_LONGEST = 600
"""The number of characters of a value that are shown."""


def assert_on_ranks(expected: Sequence[Any], actual: Sequence[Any], *, or_all: Sequence[Any] | None = None) -> None:
    """Require that each rank returned the expected value.

    ``expected``: a value for each rank, in rank order; ``actual``: the result of :meth:`~harness.World.run`.
    ``or_all``: values that all ranks may return instead, such as errors if a behavior is optional.
    Errors: AssertionError, which says for each wrong rank what was expected, what was found, and where they differ.
    """
    __tracebackhide__ = True
    if list(actual) == list(expected) or (or_all is not None and list(actual) == list(or_all)):
        return
    if len(expected) != len(actual):
        raise AssertionError(f"results of {len(expected)} ranks were expected, and {len(actual)} ranks returned one")
    wrong = [index for index in range(len(actual)) if [actual[index]] != [expected[index]]]
    lines = [f"{len(wrong)} of {len(actual)} ranks returned another result than expected:"]
    for index in wrong:
        lines += [f"rank {index}: expected {_shown(expected[index])}", f"{'':8}found    {_shown(actual[index])}"]
        if or_all is not None:
            lines.append(f"{'':8}or, on all ranks, {_shown(or_all[index])}")
        place = _place(expected[index], actual[index])
        if place:
            lines.append(f"{'':8}first difference at {place}")
    if wrong and or_all is not None and any([a] == [b] for a, b in zip(actual, or_all, strict=True)):
        agreeing = [index for index in range(len(actual)) if [actual[index]] == [or_all[index]]]
        lines.append(f"only ranks {agreeing} returned what all ranks may return instead")
    raise AssertionError("\n".join(lines))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text)} characters)"


def _place(expected: Any, actual: Any) -> str:
    """Return the path to the first value that differs within containers, with both values; empty at the top level."""
    path = ""
    while type(expected) is type(actual):
        if isinstance(expected, Mapping):
            keys = [key for key in expected if key not in actual or [expected[key]] != [actual[key]]]
        elif isinstance(expected, list | tuple):
            both = range(min(len(expected), len(actual)))
            keys = [key for key in both if [expected[key]] != [actual[key]]]
        else:
            break
        if not keys or (isinstance(actual, Mapping) and keys[0] not in actual):
            break
        path += f"[{keys[0]!r}]"
        expected, actual = expected[keys[0]], actual[keys[0]]
    return f"{path}: expected {_shown(expected)}, found {_shown(actual)}" if path else ""
