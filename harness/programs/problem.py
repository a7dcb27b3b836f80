"""What is wrong with a run, as data. Sentences are made from it last, for people; no decision depends on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from harness.oracles.exact import Difference
from harness.programs.residue import Left
from harness.stacks.seen import Pass, Seen

Kind = Literal[
    "values", "dtype", "unexpected", "missing",
    "bits", "one-sided",
    "left behind",
    "uncounted", "outsiders", "counts", "unsynced", "not joined",
    "hook called early", "hook calls", "hook calls differ",
    "not compiled", "graphs",
    "no step", "missing of second",
]  # fmt: skip

_MOST_SHOWN = 6


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a run: its kind, what it concerns, on which ranks, and what was expected and found.

    The meaning of ``expected`` and ``found`` depends on the kind:

    - ``values``: ``found`` is a :class:`~harness.oracles.exact.Difference` from the single device, or from the first
      program of a law; ``dtype``: dtypes; ``unexpected`` and ``missing``: not used;
    - ``bits``, ``one-sided``: two ranks differ; for ``one-sided``, ``found`` is the rank that has the tensor;
    - ``left behind``: a rank's process has changed;
    - ``uncounted``: a rank did not run this forward or backward; ``outsiders``: ranks launched collectives on the group
      ``found`` without being members; ``counts``: the numbers of collectives that the ranks of a group launched, in
      order; ``unsynced``: they launched ``found`` collectives while gradients stay local, and may launch ``expected``;
      ``not joined``: their collectives did not connect all of them;
    - ``hook …``: ``found`` is the calls of the communication hook of the module ``name``;
    - ``not compiled``: ranks without a graph; ``graphs``: the numbers of nodes of each rank's graphs;
    - ``no step``, ``missing of second``: the second program of a law has seen no step, or lacks a tensor.
    """

    kind: Kind
    what: Seen | Pass | Left | None = None
    ranks: tuple[int, ...] = ()
    expected: object = None
    found: object = None
    name: str = ""

    def __str__(self) -> str:
        return sentence(self)


class Different(AssertionError):
    """A run on ranks differs from the run on one device, or the two runs of a law differ from each other.

    ``problems``: everything that differs; ``law``: the law that does not hold, if one was checked.
    """

    def __init__(self, problems: Sequence[Problem], *, law: str = "") -> None:
        self.problems = tuple(problems)
        self.law = law
        more = len(problems) - _MOST_SHOWN
        lines = [*self._head(), *map(str, problems[:_MOST_SHOWN]), *([f"and {more} more"] if more > 0 else [])]
        super().__init__("\n".join(lines))

    def whole(self) -> str:
        """Return the message with all problems, however many there are."""
        return "\n".join([*self._head(), *map(str, self.problems)])

    def _head(self) -> list[str]:
        return [f"the law {self.law!r} does not hold"] if self.law else []


def sentence(problem: Problem) -> str:
    """Describe a problem in one sentence."""
    p, what, ranks = problem, problem.what, ", ".join(map(str, problem.ranks))
    of_rank, pair = f"rank {ranks}: {what}" if ranks else str(what), f"ranks {' and '.join(map(str, p.ranks))}"
    match p.kind:
        case "values":
            assert isinstance(p.found, Difference)
            return f"{of_rank}: {p.found}"
        case "dtype":
            return f"{of_rank}: expected {p.expected}, found {p.found}"
        case "unexpected":
            return f"{of_rank}: unexpected tensor: absent on one device"
        case "missing":
            return f"{of_rank}: missing tensor: present on one device"
        case "bits":
            return f"{pair} differ: {what}: different bits"
        case "one-sided":
            return f"{pair} differ: {what}: only rank {p.found} has it"
        case "left behind":
            return f"rank {ranks}: left behind: {what}"
        case "uncounted":
            return f"{what}: rank {ranks} did not run it"
        case "outsiders":
            return f"{what}: ranks {ranks} launched collectives on the group of ranks {_listed(p.found)}"
        case "counts":
            return f"{what}: ranks {ranks} launched different numbers of collectives: {_listed(p.found)}"
        case "unsynced":
            most = f" (at most {p.expected} allowed)" if p.expected else ""
            return f"{what}: ranks {ranks} launched {p.found} collectives{most} without gradient synchronization"
        case "not joined":
            return f"{what}: gradients are not synchronized over ranks {ranks}: no collective joins them"
        case "hook called early":
            return f"{what}: rank {ranks}: the communication hook of {p.name!r} was called: {p.found}"
        case "hook calls":
            return f"{what}: rank {ranks}: the communication hook of {p.name!r} was called with {p.found}"
        case "hook calls differ":
            return f"{what}: {pair} called the communication hook of {p.name!r} differently"
        case "not compiled":
            return f"nothing was compiled on ranks {ranks}"
        case "graphs":
            return f"ranks compiled different graphs, of {_listed(p.found, ' / ')} nodes"
        case "no step":
            return "the second program has seen no step"
        case "missing of second":
            return f"{what}: missing of the second program"


def _listed(values: object, between: str = ", ") -> str:
    return between.join(map(str, values)) if isinstance(values, tuple) else str(values)


__all__ = ["Different", "Kind", "Problem", "sentence"]
