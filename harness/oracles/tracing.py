"""What a compiled function was traced to, as plain data, and what was promised of it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Operator:
    """One call in a graph."""

    name: str
    constants: tuple[str, ...] = ()
    """Its arguments that come from no other call and no input."""
    result: str = ""
    """Data type and shape, as in ``float32[4, s0]``."""

    @property
    def is_collective(self) -> bool:
        """Whether calling it launches a collective."""
        return "c10d_functional" in self.name and "wait_tensor" not in self.name


@dataclass(frozen=True)
class Graph:
    """The calls of one graph, in order."""

    operators: tuple[Operator, ...]

    def collectives(self) -> list[str]:
        """The collectives that it launches, with their constants and results, in order."""
        return [f"{o.name}({', '.join(o.constants)}) -> {o.result}" for o in self.operators if o.is_collective]

    def fingerprint(self) -> tuple[tuple[str, str], ...]:
        """What has to be the same on every rank: operators and results, and no constants, which may be rank numbers."""
        return tuple((o.name, o.result) for o in self.operators)


@dataclass(frozen=True)
class Guard:
    """What has to hold for compiled code to be used again."""

    source: str
    """Where the value is found, as in ``G['dist'].group.WORLD``."""
    kind: str
    """As Dynamo calls it: ``ID_MATCH``, ``TENSOR_MATCH``."""
    text: str = ""


@dataclass(frozen=True)
class Trace:
    """What was seen of a function that was compiled and called."""

    graphs: tuple[Graph, ...] = ()
    guards: tuple[Guard, ...] = ()
    """Of all its compiled code."""
    recompiles: tuple[str, ...] = ()
    """Why it was compiled again, each time."""
    breaks: tuple[str, ...] = ()
    """Why graphs ended before the function did."""


@dataclass(frozen=True)
class Contract:
    """What is promised of a construct in compiled code; ``{name}`` in texts stands for what a rank knows of itself."""

    construct: str
    graph: tuple[str, ...] = ()
    """Every operator of every graph, in order."""
    folds: tuple[str, ...] = ()
    """Every constant of those operators, in order."""
    guards: tuple[tuple[str, str], ...] = ()
    """Patterns of sources, and the kind of guard that each must have; elsewhere there may be any."""
    recompiles: tuple[str, ...] = ()
    """A pattern for the reason of each further compilation."""
    breaks: tuple[str, ...] = ()
    """A pattern for the reason of each break that is allowed, which must be there, too."""
    results: str = ""
    """A pattern of the data type and shape of every tensor that an operator gives; empty: any."""


def broken(contract: Contract, trace: Trace, facts: Mapping[str, object] | None = None) -> list[str]:
    """What a trace does not keep of its contract, a sentence each."""
    known = {name: str(value) for name, value in (facts or {}).items()}

    def said(texts: Sequence[str]) -> list[str]:
        return [re.sub(r"\{(\w+)\}", lambda match: known[match[1]], text) for text in texts]

    operators = [operator for graph in trace.graphs for operator in graph.operators]
    found = [
        *_differs("operators", said(contract.graph), [operator.name for operator in operators]),
        *_differs("constants", said(contract.folds), [c for operator in operators for c in operator.constants]),
        *_unlike("compiled again for", said(contract.recompiles), trace.recompiles),
        *_unlike("graphs broken by", said(contract.breaks), trace.breaks),
    ]
    for source, kind in contract.guards:
        there = sorted({guard.kind for guard in trace.guards if re.search(source, guard.source)})
        if kind not in there:
            found.append(f"no guard {kind} on {source}; there are {there or 'none'}")
    found += [
        f"{operator.name} gives {operator.result}, promised {contract.results}"
        for operator in operators
        if "[" in operator.result and not re.search(contract.results, operator.result)
    ]
    return [f"{contract.construct}: {sentence}" for sentence in found]


def _differs(what: str, promised: Sequence[str], seen: Sequence[str]) -> list[str]:
    return [] if list(promised) == list(seen) else [f"{what} {list(seen)}, promised {list(promised)}"]


def _unlike(what: str, patterns: Sequence[str], seen: Sequence[str]) -> list[str]:
    if len(patterns) == len(seen) and all(re.search(p, s) for p, s in zip(patterns, seen, strict=True)):
        return []
    return [f"{what} {list(seen)}, promised {list(patterns)}"]
