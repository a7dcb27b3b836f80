"""The suite that a bundle is held against: what it knows of each test, whatever the bundle says of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from harness.requirements import stack_of
from harness.results import RequirementText
from harness.suite_facts import SuiteFacts, TestFacts

_SWEPT = re.compile(r"(?<=[\[-])\d+B(?=[\]-])")
"""What a benchmark's id has of the size of its messages, which the run's options decide."""


@dataclass(frozen=True)
class Checkout:
    """The suite here."""

    suite_hash: str
    """SHA-256 (:func:`harness.provenance.suite_hash`); empty: there is none."""
    concord: str = ""
    """Version of the Concord here, which is part of the suite."""
    results: int = 0
    """Version of the results files that it writes."""
    facts: SuiteFacts | None = None
    """Of every test; None: nobody has collected them."""
    files: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of each file of harness, suites and fixtures here, by the name that results know it by."""
    profiles: Mapping[str, str] = field(default_factory=dict)
    """Text of each shipped profile, by the name of its file."""

    def test(self, nodeid: str) -> TestFacts | None:
        """What it knows of a test; None if it has no such test.

        Of a benchmark with a size of messages that is swept only on demand: what it knows of the other sizes.
        """
        if self.facts is None:
            return None
        return self.facts.tests.get(nodeid) or self._swept.get(swept(nodeid))

    def requirement(self, name: str) -> RequirementText | None:
        """A requirement; None if it has no such."""
        return self.facts.requirements.get(name) if self.facts is not None else None

    def of_stack(self, stack: str) -> Iterator[str]:
        """The tests of a stack; benchmarks without the sizes of their messages (:func:`swept`)."""
        yield from (swept(n) for n in (self.facts.tests if self.facts is not None else ()) if stack_of(n) == stack)

    @cached_property
    def _swept(self) -> dict[str, TestFacts]:
        tests = self.facts.tests if self.facts is not None else {}
        return {swept(nodeid): facts for nodeid, facts in tests.items() if stack_of(nodeid) == "perf"}


def swept(nodeid: str) -> str:
    """A benchmark's id without the size of its messages; any other as it is."""
    return _SWEPT.sub("*B", nodeid) if stack_of(nodeid) == "perf" else nodeid
