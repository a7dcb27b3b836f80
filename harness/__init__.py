"""Concord: a conformance harness for PyTorch's distributed stack.

The names below are the public face; everything else may change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = ["Pool", "Rank", "RanksFailed", "World", "WorldSpec", "assert_on_ranks", "requirement", "spmd"]

if TYPE_CHECKING:
    from harness.oracles.ranks import assert_on_ranks
    from harness.plugin.marks import spmd
    from harness.requirements import requirement
    from harness.worlds.pool import Pool
    from harness.worlds.postmortem import RanksFailed
    from harness.worlds.rank import Rank
    from harness.worlds.world import World, WorldSpec

_WHERE = {
    "Pool": "harness.worlds.pool",
    "Rank": "harness.worlds.rank",
    "RanksFailed": "harness.worlds.postmortem",
    "World": "harness.worlds.world",
    "WorldSpec": "harness.worlds.world",
    "assert_on_ranks": "harness.oracles.ranks",
    "requirement": "harness.requirements",
    "spmd": "harness.plugin.marks",
}


def __getattr__(name: str) -> Any:
    # On demand: the pytest plug-in is loaded in every pytest run of an environment, and must cost nothing there.
    import importlib

    if name not in _WHERE:
        raise AttributeError(f"module 'harness' has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)
