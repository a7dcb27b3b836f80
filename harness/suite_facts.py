"""What a checkout knows of its tests: what each proves, runs on and needs.

Collected by pytest (:mod:`harness.plugin.telling`), for whoever holds results against the suite.
"""

from __future__ import annotations

import msgspec

from harness.profiles.needs import Needs
from harness.results import RequirementText


class TestFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A test, as the suite has it."""

    __test__ = False

    requirements: list[str] = []
    """Ids, in the order of its marks."""
    size: int = 0
    """How many ranks its world has, at most; 0: it has none."""
    dtype: str = ""
    property_based: bool = False
    backend: str = ""
    """Of its world, where its mark says so."""
    device: str = ""
    needs: Needs = Needs()
    skips: list[str] = []
    """Reasons, as its source has them, with which it may skip itself as unsupported."""


class SuiteFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Every test of a suite, by node id, and the requirements that they prove, by id."""

    tests: dict[str, TestFacts]
    requirements: dict[str, RequirementText]


def encode(facts: SuiteFacts) -> bytes:
    """Facts as JSON."""
    return msgspec.json.encode(facts)


def decode(data: bytes) -> SuiteFacts:
    """Read them again.  Errors: msgspec.MsgspecError."""
    return msgspec.json.decode(data, type=SuiteFacts)
