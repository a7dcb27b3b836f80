"""Requirements: numbered sentences about behaviour, and the mark that says which test proves which."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

LEVELS = {
    "L1": "collectives",
    "L2": "replicate",
    "L3": "replicate_fsdp",
    "L4": "tp_extension",
    "L5": "dynamo",
    "P": "perf",
}
"""Levels of conformance, each with its stack; one of L1 to L5 stands on those before it."""

_ID = re.compile(r"[A-Z][A-Z0-9]*(-[A-Z0-9]+)+-\d{2,}")
_F = TypeVar("_F", bound=Callable[..., Any])
_sentences: dict[str, tuple[str, str, bool]] = {}
"""By id, what tests of this process have said so far."""


@dataclass(frozen=True)
class Requirement:
    """A sentence about behaviour that a test can prove or refute."""

    id: str
    """``STACK-TOPIC-NN``."""
    sentence: str
    source: str
    """Where it comes from: a page of PyTorch's documentation, or a symbol."""
    level: str = ""
    """Of :data:`LEVELS`; empty: that of the stack whose suite has the test."""
    mandatory: bool = True
    """Whether its level asks for it; if not, it is reported and no level depends on it."""

    def __post_init__(self) -> None:
        if not _ID.fullmatch(self.id):
            raise ValueError(f"requirement id {self.id!r}: write STACK-TOPIC-NN, in capitals, as in COLL-ALLREDUCE-01")
        if not self.sentence.strip().endswith("."):
            raise ValueError(f"requirement {self.id}: the sentence must be one, with a full stop: {self.sentence!r}")
        if not self.source.strip():
            raise ValueError(f"requirement {self.id}: say where it comes from (source=...)")
        if self.level and self.level not in LEVELS:
            raise ValueError(f"requirement {self.id}: level {self.level!r} is none of {', '.join(LEVELS)}")


def note(found: Requirement) -> None:
    """Note a requirement of this process.

    Errors: ValueError for an id that is another sentence's, or has another level, or is mandatory elsewhere.
    """
    said = _sentences.setdefault(found.id, (found.sentence, found.level, found.mandatory))
    if said[0] != found.sentence:
        raise ValueError(f"requirement {found.id} says already: {said[0]!r}; give another id to: {found.sentence!r}")
    if said[1:] != (found.level, found.mandatory):
        raise ValueError(f"requirement {found.id} has already another level, or is mandatory where it is not here")


def requirement(id: str, sentence: str, *, source: str, level: str = "", mandatory: bool = True) -> Callable[[_F], _F]:
    """Say which requirement a suite test proves.  A test may prove several: use it once for each.

    ``level`` and ``mandatory``: where they are others than those of the suite's stack and True.
    Errors: ValueError for a malformed id, one that another test has for another sentence (or level), a sentence that is
    none, a missing source, or a level that there is not.
    """
    found = Requirement(id, sentence, source, level, mandatory)
    note(found)

    def mark(test: _F) -> _F:
        import pytest

        return pytest.mark.requirement(found)(test)  # type: ignore[no-any-return]

    return mark


def stack_of(nodeid: str) -> str:
    """The stack that a suite test is about: the folder under ``suites/``; empty for any other test."""
    parts = nodeid.split("::")[0].split("/")
    for i, part in enumerate(parts[:-2]):
        if part == "suites":
            return parts[i + 1]
    return ""
