"""Requirements: numbered sentences about behaviour, and the mark that says which test proves which."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

_ID = re.compile(r"[A-Z][A-Z0-9]*(-[A-Z0-9]+)+-\d{2,}")
_F = TypeVar("_F", bound=Callable[..., Any])
_sentences: dict[str, str] = {}
"""By id, what tests of this process have said so far."""


@dataclass(frozen=True)
class Requirement:
    """A sentence about behaviour that a test can prove or refute."""

    id: str
    """``STACK-TOPIC-NN``."""
    sentence: str
    source: str
    """Where it comes from: a page of PyTorch's documentation, or a symbol."""

    def __post_init__(self) -> None:
        if not _ID.fullmatch(self.id):
            raise ValueError(f"requirement id {self.id!r}: write STACK-TOPIC-NN, in capitals, as in COLL-ALLREDUCE-01")
        if not self.sentence.strip().endswith("."):
            raise ValueError(f"requirement {self.id}: the sentence must be one, with a full stop: {self.sentence!r}")
        if not self.source.strip():
            raise ValueError(f"requirement {self.id}: say where it comes from (source=...)")


def note(found: Requirement) -> None:
    """Note a requirement of this process.  Errors: ValueError for an id that is another sentence's."""
    said = _sentences.setdefault(found.id, found.sentence)
    if said != found.sentence:
        raise ValueError(f"requirement {found.id} says already: {said!r}; give another id to: {found.sentence!r}")


def requirement(id: str, sentence: str, *, source: str) -> Callable[[_F], _F]:
    """Say which requirement a suite test proves.  A test may prove several: use it once for each.

    Errors: ValueError for a malformed id, one that another test has for another sentence, a sentence that is none, or a
    missing source.
    """
    found = Requirement(id, sentence, source)
    note(found)

    def mark(test: _F) -> _F:
        import pytest

        return pytest.mark.requirement(found)(test)  # type: ignore[no-any-return]

    return mark
