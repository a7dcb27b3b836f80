"""The recorder of the values that tests give parameters."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness.commands.given import CURRENT, collect, gaps, start, words_of, write_wanted
from harness.commands.parameters import parse

TABLE = """
["torch.f"]
a."None" = "suites/x/test_y.py::test_z"
a."a value" = "gap: nobody gives it"
b."None" = "not tested: it is the default"

["torch.g"]
outside = "it is no part of the stack"
"""


def test_gaps() -> None:
    """Parameters with a gap have all of their words, and the others are left out."""
    assert gaps({"x": parse(TABLE, "x.toml")}) == {"torch.f": {"a": ["None", "a value"]}}


@pytest.mark.parametrize(
    ("value", "words", "found"),
    [
        (None, ["None", "a value"], ["None"]),
        (3, ["None", "a value"], ["a value"]),
        (0, ["0", "another number"], ["0"]),
        (False, ["0", "False", "True"], ["False"]),
        (-1, ["a negative number", "another number"], ["a negative number"]),
        ("", ["an empty text", "another value"], ["an empty text"]),
        ("SUM", ["SUM", "sum"], ["SUM"]),
        ("eager", ["'eager'", "a function"], ["'eager'"]),
        (dist.ReduceOp.MAX, ["MAX", "MIN"], ["MAX"]),
        (dist.ReduceOp(dist.ReduceOp.MIN), ["MAX", "MIN"], ["MIN"]),
        (torch.ones(2), ["a tensor", "None"], ["a tensor"]),
        ([1], ["a list", "another value"], ["a list"]),
        (len, ["a function"], ["a function"]),
        (2.5, ["a list"], []),
    ],
)
def test_words(value: Any, words: list[str], found: list[str]) -> None:
    """A value has its own words, or else the word for all others."""
    assert words_of(value, words) == found


def test_default() -> None:
    """A value that is the parameter's default has this word alone."""
    assert words_of(8, ["another value", "the default"], 8) == ["the default"]
    assert words_of(9, ["another value", "the default"], 8) == ["another value"]


def test_recorded(tmp_path: Path) -> None:
    """Calls are recorded once, with the test that runs: of functions in Python and of methods in C++."""
    write_wanted(
        tmp_path,
        {
            "torch.distributed.get_node_local_rank": {"fallback_rank": ["None", "another number"]},
            "torch.distributed.Work.is_success": {"()": ["called"]},
        },
    )
    (tmp_path / CURRENT).write_text("suites/x/test_y.py::test_z")
    before = sys.getprofile()
    start(str(tmp_path))
    try:
        for _ in range(2):
            assert dist.get_node_local_rank(fallback_rank=7) == 7
        dist.Work().is_success()
    finally:
        sys.setprofile(before)
        threading.setprofile(None)  # type: ignore[arg-type]  # typeshed has no None here
    assert collect(tmp_path) == {
        ("suites/x/test_y.py::test_z", "torch.distributed.get_node_local_rank", "fallback_rank", "another number"),
        ("suites/x/test_y.py::test_z", "torch.distributed.Work.is_success", "()", "called"),
    }
