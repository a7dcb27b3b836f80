"""What a compiled function was traced to, as plain data, and what it has to be."""

from __future__ import annotations

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
