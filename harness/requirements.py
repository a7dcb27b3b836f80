"""Requirements: numbered sentences about behavior, and the mark that links a test to those that it proves."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

LEVELS = {
    "L1": "collectives",
    "L2": "replicate",
    "L3": "replicate_fsdp",
    "L4": "tp_extension",
    "L5": "dynamo",
    "P": "perf",
}
"""The levels of conformance, each with its stack. Each of L1 to L5 includes the levels before it."""
STACK_BY_PREFIX = {
    "COLL": "collectives",
    "REPL": "replicate",
    "DDP": "replicate",
    "RFSDP": "replicate_fsdp",
    "TP": "tp_extension",
    "DYN": "dynamo",
    "PERF": "perf",
}
"""The stack of Concord's own requirements, by the prefix of their ids."""

if TYPE_CHECKING:
    import pytest

_ID = re.compile(r"[A-Z][A-Z0-9]*(-[A-Z0-9]+)+-\d{2,}")
_sentences: dict[str, tuple[str, str, bool, str]] = {}
"""Sentence, level, whether it is mandatory, and source, for each id that this process has seen."""


@dataclass(frozen=True)
class Requirement:
    """A sentence about behavior that a test can prove or refute."""

    id: str
    """``STACK-TOPIC-NN``."""
    sentence: str
    source: str
    """The page of PyTorch's documentation or the symbol that promises it."""
    level: str = ""
    """One of :data:`LEVELS`; if empty, the level of the stack whose suite has the test."""
    mandatory: bool = True
    """Whether its level depends on it. If not, it is only reported."""

    def __post_init__(self) -> None:
        if not _ID.fullmatch(self.id):
            raise ValueError(f"requirement id {self.id!r}: write STACK-TOPIC-NN, in capitals, as in COLL-ALLREDUCE-01")
        if not self.sentence.strip().endswith("."):
            raise ValueError(f"requirement {self.id}: write one sentence with a full stop, not {self.sentence!r}")
        if not self.source.strip():
            raise ValueError(f"requirement {self.id}: state the page or symbol that promises it (source=...)")
        if self.level and self.level not in LEVELS:
            raise ValueError(f"requirement {self.id}: unknown level {self.level!r}: choose one of {', '.join(LEVELS)}")


def note(new: Requirement) -> None:
    """Register a requirement in this process.

    Errors: ValueError if its id already has another sentence, level or source, or is mandatory in one place only.
    """
    sentence, level, mandatory, source = _sentences.setdefault(
        new.id, (new.sentence, new.level, new.mandatory, new.source)
    )
    if sentence != new.sentence:
        raise ValueError(
            f"requirement {new.id} already has the sentence {sentence!r}; give another id to: {new.sentence!r}"
        )
    if (level, mandatory) != (new.level, new.mandatory):
        raise ValueError(f"requirement {new.id} has another level elsewhere, or is mandatory in one place only")
    if source != new.source:  # or results would have that of the test that ran first
        raise ValueError(f"requirement {new.id} already has the source {source!r}; it can't also have {new.source!r}")


def requirement(
    id: str, sentence: str, *, source: str, level: str = "", mandatory: bool = True
) -> pytest.MarkDecorator:
    """State which requirement a suite test proves. Use it once for each requirement.

    It decorates a test. If only some parameters prove the requirement, put it into the ``marks`` of their
    ``pytest.param``. ``level`` and ``mandatory`` are needed only if they differ from the level of the suite's stack and
    from True.

    Errors: ValueError for a malformed id, an id that has another sentence, level or source elsewhere, a sentence
    without a full stop, a missing source, or an unknown level.
    """
    import pytest

    new = Requirement(id, sentence, source, level, mandatory)
    note(new)
    return pytest.mark.requirement(new)


def stack_of(nodeid: str) -> str:
    """Return the stack of a suite test, which is its folder under ``suites/``; empty for any other test."""
    parts = nodeid.split("::")[0].split("/")
    for i, part in enumerate(parts[:-2]):
        if part == "suites":
            return parts[i + 1]
    return ""
