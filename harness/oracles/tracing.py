"""Traces of compiled functions and the contracts that they must keep, as plain data."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Operator:
    """One call in a graph."""

    name: str
    constants: tuple[str, ...] = ()
    """The arguments that do not come from another call or an input."""
    result: str = ""
    """Dtype and shape, such as ``float32[4, s0]``."""

    @property
    def is_collective(self) -> bool:
        """Whether calling it launches a collective."""
        return "c10d_functional" in self.name and "wait_tensor" not in self.name


@dataclass(frozen=True)
class Graph:
    """The calls of one graph, in order."""

    operators: tuple[Operator, ...]

    def collectives(self) -> list[str]:
        """Return the collectives that the graph launches, with their constants and results, in order."""
        return [f"{o.name}({', '.join(o.constants)}) -> {o.result}" for o in self.operators if o.is_collective]

    def fingerprint(self) -> tuple[tuple[str, str], ...]:
        """Return what must be the same on every rank: operators and results, but not constants (rank numbers)."""
        return tuple((o.name, o.result) for o in self.operators)


@dataclass(frozen=True)
class Guard:
    """A guard: a condition that must hold for compiled code to be used again."""

    source: str
    """The source of the value, such as ``G['dist'].group.WORLD``."""
    kind: str
    """Dynamo's name for it, such as ``ID_MATCH`` or ``TENSOR_MATCH``."""
    text: str = ""


@dataclass(frozen=True)
class Trace:
    """The record of a function that was compiled and called."""

    graphs: tuple[Graph, ...] = ()
    guards: tuple[Guard, ...] = ()
    """The guards of all its compiled code."""
    recompiles: tuple[str, ...] = ()
    """The reason of each recompilation."""
    breaks: tuple[str, ...] = ()
    """The reason of each graph break."""


@dataclass(frozen=True)
class Contract:
    """A contract: what compiled code promises for a construct.

    ``{name}`` in its texts stands for a fact that may differ by rank, such as the rank itself.
    """

    construct: str
    graph: tuple[str, ...] = ()
    """Every operator of every graph, in order."""
    folds: tuple[str, ...] = ()
    """Every constant of those operators, in order."""
    guards: tuple[tuple[str, str], ...] = ()
    """A pattern for a source, and the kind of guard that it must have.  Other sources may have any guards."""
    recompiles: tuple[str, ...] = ()
    """A pattern for the reason of each recompilation."""
    breaks: tuple[str, ...] = ()
    """A pattern for the reason of each graph break.  Each of these breaks is allowed and must occur."""
    results: str = ""
    """A pattern for the dtype and shape of every tensor that an operator returns; empty allows any."""


def broken(contract: Contract, trace: Trace, facts: Mapping[str, object] | None = None) -> list[str]:
    """Return the violations of a contract by a trace, one sentence each.

    ``facts``: the values that ``{name}`` stands for in the contract's texts, by name.
    """
    known = {name: str(value) for name, value in (facts or {}).items()}

    def said(texts: Sequence[str]) -> list[str]:
        return [re.sub(r"\{(\w+)\}", lambda match: known[match[1]], text) for text in texts]

    operators = [operator for graph in trace.graphs for operator in graph.operators]
    violations = [
        *_differs("operators", said(contract.graph), [operator.name for operator in operators]),
        *_differs("constants", said(contract.folds), [c for operator in operators for c in operator.constants]),
        *_unlike("compiled again for", said(contract.recompiles), trace.recompiles),
        *_unlike("graphs broken by", said(contract.breaks), trace.breaks),
    ]
    for source, kind in contract.guards:
        kinds = sorted({guard.kind for guard in trace.guards if re.search(source, guard.source)})
        if kind not in kinds:
            violations.append(f"no guard {kind} on {source}; there are {kinds or 'none'}")
    violations += [
        f"{operator.name} gives {operator.result}, promised {contract.results}"
        for operator in operators
        if "[" in operator.result and not re.search(contract.results, operator.result)
    ]
    return [f"{contract.construct}: {sentence}" for sentence in violations]


def _differs(what: str, promised: Sequence[str], seen: Sequence[str]) -> list[str]:
    return [] if list(promised) == list(seen) else [f"{what} {list(seen)}, promised {list(promised)}"]


def _unlike(what: str, patterns: Sequence[str], seen: Sequence[str]) -> list[str]:
    if len(patterns) == len(seen) and all(re.search(p, s) for p, s in zip(patterns, seen, strict=True)):
        return []
    return [f"{what} {list(seen)}, promised {list(patterns)}"]
