"""Concord: a conformance harness for PyTorch's distributed stack.

The public API for tests, programs, stacks, profiles and launchers consists of the names below, those of
:mod:`harness.programs`, and the modules in :data:`PUBLIC_MODULES`. Everything else is private and may change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "Pool",
    "Rank",
    "RanksFailed",
    "Requirement",
    "World",
    "WorldSpec",
    "assert_on_ranks",
    "assert_same",
    "assert_same_all",
    "dyadic",
    "requirement",
    "spmd",
    "unsupported",
]

PUBLIC_MODULES = {
    "harness.bench.figures": "sizes of messages, and what their time means",
    "harness.bench.measuring": "time collectives and training steps on ranks",
    "harness.faults": "declare a fault, and inject it into a process",
    "harness.oracles.baseline": "training on one device, and its comparison",
    "harness.oracles.collectives": "what collectives give, for any case",
    "harness.oracles.tracing": "the contract of a trace",
    "harness.plugin.perf": "what the options of a measured run ask for",
    "harness.profiles": "what a backend claims",
    "harness.profiles.obeyed": "what the running test has to obey",
    "harness.programs": "generated training runs",
    "harness.results": "results files",
    "harness.specs.program": "the parts of a program",
    "harness.stacks": "adapters of the stacks, and what a stack of your own is made with",
    "harness.worlds.handle": "the protocols of launchers",
}
"""The public modules, each with its purpose. Their submodules are public, too."""

if TYPE_CHECKING:
    from harness.oracles.exact import assert_same, assert_same_all, dyadic
    from harness.oracles.ranks import assert_on_ranks
    from harness.plugin.marks import spmd
    from harness.requirements import Requirement, requirement
    from harness.results import unsupported
    from harness.worlds.pool import Pool
    from harness.worlds.postmortem import RanksFailed
    from harness.worlds.rank import Rank
    from harness.worlds.world import World, WorldSpec

_WHERE = {
    "Pool": "harness.worlds.pool",
    "Rank": "harness.worlds.rank",
    "RanksFailed": "harness.worlds.postmortem",
    "Requirement": "harness.requirements",
    "World": "harness.worlds.world",
    "WorldSpec": "harness.worlds.world",
    "assert_on_ranks": "harness.oracles.ranks",
    "assert_same": "harness.oracles.exact",
    "assert_same_all": "harness.oracles.exact",
    "dyadic": "harness.oracles.exact",
    "requirement": "harness.requirements",
    "spmd": "harness.plugin.marks",
    "unsupported": "harness.results",
}


def __getattr__(name: str) -> Any:
    # Import on demand: every pytest run of an environment loads the plug-in, which must cost nothing there.
    import importlib

    if name not in _WHERE:
        raise AttributeError(f"module 'harness' has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)
