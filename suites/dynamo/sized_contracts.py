"""How contracts change with symbolic sizes (``dynamic=True``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from harness.oracles.tracing import Contract
from harness.stacks.tracing import MESHES_ARE_OPAQUE, OPAQUE
from suites.dynamo.contracts import ADD, SUM, Construct

ROWS = (2, 4, 6)
"""Sizes that one graph serves."""
FIXED = (1,)
"""Sizes that each need a graph, because 0 and 1 are never symbolic."""

SIZES_OF_MESH: Mapping[str, Any] = (
    {
        "folds": ("1", "2", "{rank}", "{rank}"),
        "guards": ((r"L\['m'\]$", OPAQUE), (r"L\['m'\]\.ndim$", "TYPE_MATCH")),
    }
    if MESHES_ARE_OPAQUE
    else {}
)
CHANGES: Mapping[str, Mapping[str, Any]] = {
    "sizes and positions in a mesh": SIZES_OF_MESH,
    "another mesh": {"graph": ADD * 2, "folds": ("2", "2")},
    "placements given": {"graph": ADD * 2, "folds": ("True", "False")},
    "a group as an argument": {"graph": SUM, "folds": ("sum", "{name}")},
    "another batch": {
        "graph": ("mul", "mul"),
        "folds": ("2", "2"),
        "recompiles": (r"2 <= x.size\(\)\[0\]",),
        "results": r"\[(s\d+|1)\]",
    },
    "another number": {
        "graph": ("item", "mul"),
        "folds": (),
        "guards": ((r"L\['n'\]$", "TYPE_MATCH"),),
    },
    "DTensors made and taken apart": {"results": r"\[2\*s\d+\]"},
    "coalesced collectives that gather": {"results": r"\[(2\*)?s\d+\]"},
    "coalesced collectives that scatter": {"results": r"\[(2\*)?s\d+\]"},
    "a collective that knows the size of its group": {"results": r"\[2\*s\d+\]"},
}
"""The changes by construct. All calls of a construct have the arguments of its first call, except for the tensor.
Some results have another size. Numbers, such as an attribute of a mesh, are inputs instead of constants."""

UNSIZED = ("a barrier",)
"""Constructs without a guard on the tensor."""


def sized(contract: Contract) -> Contract:
    """Return the contract with ``dynamic=True`` for tensors of several sizes and otherwise equal arguments."""
    kept = () if contract.construct in UNSIZED else ((r"L\['x'\]$", "TENSOR_MATCH"),)
    changes = {"recompiles": (), "results": r"\[s\d+\]", **CHANGES.get(contract.construct, {})}
    changes["guards"] = (*changes.get("guards", contract.guards), *kept)
    return replace(contract, **changes)


def rows(construct: Construct) -> tuple[int, ...]:
    """Return the number of the tensor's rows in each call."""
    return ROWS + FIXED if construct.contract.construct == "another batch" else ROWS
