"""The search for requirements whose tests are all waived (``live_parts.py``)."""

from __future__ import annotations

import datetime
from collections.abc import Mapping

from harness.plugin.waivers import Conditions
from harness.profiles import parse
from harness.profiles.needs import Needs
from harness.suite_facts import SuiteFacts, TestFacts
from tests.unit.live_parts import HOST, without_live_test

TODAY = Conditions(datetime.date(2026, 11, 25), HOST)
WAIVER = '[[waiver]]\ntests = ["{}"]\nreason = "it fails"\nlink = "unreported"\nexpires = 2027-06-30\n'
A, B, C = (f"suites/dynamo/test_it.py::test_{name}" for name in "abc")


def made(tests: Mapping[str, TestFacts], *waived: str) -> list[str]:
    """Return what is found among tests, of which some are waived."""
    text = 'name = "p"\nbackend = "gloo"\ndevice = "cpu"\n' + "".join(WAIVER.format(name) for name in waived)
    return without_live_test(SuiteFacts(tests=dict(tests), requirements={}), parse(text, "p.toml"), TODAY)


def test_waived_alone() -> None:
    """A requirement is found if its only test is waived, and not if another test of it runs."""
    both = TestFacts(requirements=["X-A-01", "X-A-02"])
    assert made({A: both}, A) == ["X-A-01", "X-A-02"]
    assert made({A: both, B: TestFacts(requirements=["X-A-02"])}, A) == ["X-A-01"]
    assert made({A: both}) == []


def test_beside_unsupported() -> None:
    """A test that the backend or PyTorch does not support is no live one, but is not enough by itself."""
    lacking = TestFacts(requirements=["X-A-01"], needs=Needs(torch="torch.distributed.no_such_name"))
    unclaimed = TestFacts(requirements=["X-A-01"], needs=Needs(stack="dynamo", features=("inductor",)))
    assert made({A: TestFacts(requirements=["X-A-01"]), B: lacking}, A) == ["X-A-01"]
    assert made({B: lacking, C: unclaimed}) == []
