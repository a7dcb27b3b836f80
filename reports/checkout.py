"""The local suite with which a bundle is compared, and its facts about each test."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import msgspec

from harness.profiles.vocabulary import COLLECTIVES, DTYPES, OPS, REDUCING
from harness.requirements import stack_of
from harness.results import RequirementText
from harness.suite_facts import SuiteFacts, TestFacts

_SWEPT = re.compile(r"(?<=[\[-])\d+B(?=[\]-])")
"""The message size in a benchmark's id, which depends on the run's options."""
_RANKS = re.compile(r"(\d+)ranks?")


@dataclass(frozen=True)
class Checkout:
    """The local suite."""

    suite_hash: str
    """The SHA-256 of the suite (:func:`harness.provenance.suite_hash`); empty if there is no suite."""
    concord: str = ""
    """The version of the local Concord, which is part of the suite."""
    results: int = 0
    """The version of the results files that it writes."""
    facts: SuiteFacts | None = None
    """Facts about every test; None if the tests have not been collected."""
    files: Mapping[str, str] = field(default_factory=dict)
    """The SHA-256 of each local file of harness, suites and fixtures, by its name in results."""
    profiles: Mapping[str, str] = field(default_factory=dict)
    """The text of each shipped profile, by file name."""
    defects: Mapping[str, str] = field(default_factory=dict)
    """The text of each shipped file of defects, by owner."""

    def test(self, nodeid: str) -> TestFacts | None:
        """Return the facts about a test; None if the suite has no such test.

        A benchmark that is measured only on demand has the facts of the others of its function, on its own ranks and
        in its own dtype.
        """
        if self.facts is None:
            return None
        found = self.facts.tests.get(nodeid) or self._swept.get(swept(nodeid))
        return found or (self._on_demand(nodeid) if stack_of(nodeid) == "perf" else None)

    def _on_demand(self, nodeid: str) -> TestFacts | None:
        """Return the facts of a benchmark that is measured only on demand; its id says what differs."""
        function, bracket, parameters = nodeid.partition("[")
        tests = self.facts.tests.items() if self.facts is not None and bracket else ()
        facts = next((facts for name, facts in tests if name.partition("[")[0] == function), None)
        if facts is None:
            return None
        words = parameters.rstrip("]").split("-")
        ranks = [int(match[1]) for word in words if (match := _RANKS.fullmatch(word))]
        collective = next((word for word in words if word in COLLECTIVES), facts.needs.collective)
        dtype = next((word for word in words if word in DTYPES), facts.dtype)
        reducing = collective in REDUCING
        op = next((op for op in OPS if op.lower() in words), "SUM" if reducing and facts.needs.collective else "")
        return msgspec.structs.replace(
            facts,
            size=ranks[0] if ranks else facts.size,
            dtype=dtype if facts.dtype else "",
            needs=replace(facts.needs, collective=collective, dtype=dtype if facts.needs.dtype else "", op=op),
        )

    def requirement(self, name: str) -> RequirementText | None:
        """Return the requirement with this id; None if the suite has none."""
        return self.facts.requirements.get(name) if self.facts is not None else None

    def of_stack(self, stack: str) -> Iterator[str]:
        """Iterate over the tests of a stack, without the message sizes of benchmarks (:func:`swept`)."""
        yield from (swept(n) for n in (self.facts.tests if self.facts is not None else ()) if stack_of(n) == stack)

    @cached_property
    def _swept(self) -> dict[str, TestFacts]:
        tests = self.facts.tests if self.facts is not None else {}
        return {swept(nodeid): facts for nodeid, facts in tests.items() if stack_of(nodeid) == "perf"}


def swept(nodeid: str) -> str:
    """Replace the message size in a benchmark's id by ``*B``; other ids stay as they are."""
    return _SWEPT.sub("*B", nodeid) if stack_of(nodeid) == "perf" else nodeid
