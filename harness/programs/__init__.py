"""Generated training runs: draw a program, train it on ranks, and compare it with one device or with another run.

The names below are public.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["Program", "assert_law", "assert_same_as_alone", "examples", "programs"]

if TYPE_CHECKING:
    from harness.programs.assertion import assert_same_as_alone
    from harness.programs.laws import assert_law
    from harness.programs.share import examples
    from harness.programs.strategies import programs
    from harness.specs.program import Program

_WHERE = {
    "Program": "harness.specs.program",
    "assert_law": "harness.programs.laws",
    "assert_same_as_alone": "harness.programs.assertion",
    "examples": "harness.programs.share",
    "programs": "harness.programs.strategies",
}


def __getattr__(name: str) -> Any:
    # Names are imported on demand: each module of this package imports this file first, and some of these names import
    # such modules.
    import importlib

    if name not in _WHERE:
        raise AttributeError(f"module 'harness.programs' has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)
