"""The facts about the tests of a checkout: what each proves, runs on and needs.

pytest collects them (:mod:`harness.plugin.suite_facts`), so that results can be compared with the suite.
"""

from __future__ import annotations

import msgspec

from harness.profiles.needs import Needs
from harness.results import Cause, RequirementText


class TestFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A test as the suite defines it."""

    __test__ = False

    requirements: list[str] = []
    """Ids, in the order of the test's marks."""
    size: int = 0
    """The largest number of ranks of its world; 0 if it has no world."""
    sizes: list[int] = []
    """The sizes of its worlds, smallest first, if it has several of which it draws."""
    dtype: str = ""
    property_based: bool = False
    backend: str = ""
    """The backend of its world, if its mark gives one."""
    device: str = ""
    hosts: int = 0
    """The number of hosts that its world is spread over, if its mark gives one."""
    needs: Needs = Needs()
    causes: list[Cause] = []
    """The causes in its source for which it may skip itself as unsupported."""
    skips: list[str] = []
    """The reasons in its source with which it may skip itself as unsupported without a cause."""


class SuiteFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Every test of a suite by node id, and the requirements that the tests prove by id."""

    tests: dict[str, TestFacts]
    requirements: dict[str, RequirementText]


def encode(facts: SuiteFacts) -> bytes:
    """Encode facts as JSON."""
    return msgspec.json.encode(facts)


def decode(data: bytes) -> SuiteFacts:
    """Decode facts from JSON. Errors: msgspec.MsgspecError."""
    return msgspec.json.decode(data, type=SuiteFacts)
