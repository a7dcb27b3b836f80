"""The check of tests whose worlds are on several hosts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from harness.profiles import Profile
from harness.profiles.model import EVERYTHING
from harness.results import Cause, GivenWorld, TestResult, TooFewDevices, TooFewHosts
from harness.suite_facts import TestFacts
from reports.arguments import Asked
from reports.coherence import _world
from reports.unsupported import _Judge

NODEID = "suites/collectives/groups/test_hosts.py::test_a[4ranks]"


CPU = Profile("p", "any", "cpu")


def result(hosts: int, cause: Cause | None = None) -> TestResult:
    """A result of a test whose world is on so many hosts, or that is unsupported."""
    verdict, reason = ("unsupported", f"unsupported: {cause}") if cause is not None else ("passed", "")
    world = GivenWorld(4, "any", "cpu", hosts=hosts)
    return TestResult(nodeid=NODEID, verdict=verdict, world=world, size=4, cause=cause, reason=reason)


def judged(test: TestResult, *others: TestResult, asks: int = 2, profile: Profile = CPU) -> str:
    tests = {str(i): each for i, each in enumerate([test, *others])}
    run: Any = SimpleNamespace(tests=tests, header=SimpleNamespace(subject="torch"))
    entitled: Any = SimpleNamespace(profile=profile, claims=EVERYTHING)
    judge, facts = _Judge(run, entitled, Asked()), TestFacts(size=4, hosts=asks)
    return judge.why_not(test, facts) if test.cause is not None else judge.should_not_run(test, facts)


def test_honest() -> None:
    """A test runs on the hosts that it asks for, and on any number if it does not ask; or there are too few."""
    assert judged(result(2)) == ""
    assert judged(result(3), asks=0) == ""
    assert judged(result(1, TooFewHosts(2, 1)), result(1), result(1, TooFewHosts(3, 1))) == ""


@pytest.mark.parametrize(
    ("test", "others", "asks", "says"),
    [
        (result(1), (), 2, "ran on 1 host, but in the suite its world is on 2"),
        (result(3), (), 2, "ran on 3 hosts, but in the suite its world is on 2"),
        (result(1, TooFewHosts(2, 1)), (), 0, "but in the suite its world is on any number of hosts"),
        (result(1, TooFewHosts(3, 1)), (), 2, "but in the suite its world is on 2 hosts"),
        (result(1, TooFewHosts(2, 2)), (), 2, "but in the suite its world is on 2 hosts"),
        (result(1, TooFewHosts(2, 1)), (result(2),), 2, "but another test had a world on 2"),
        (result(1, TooFewHosts(3, 1)), (result(1, TooFewHosts(3, 2)),), 3, "contradict each other about the number of"),
    ],
)
def test_forged(test: TestResult, others: tuple[TestResult, ...], asks: int, says: str) -> None:
    """Hosts that are said to be missing and are not, and other hosts than the test asks for, are contradictions."""
    assert says in judged(test, *others, asks=asks)


def test_more_hosts_than_ranks() -> None:
    """A host without a rank is not one of the world's."""
    assert list(_world(result(5))) == ["its world of 4 ranks is on 5 hosts"]
    assert list(_world(result(4))) == []


CUDA = Profile("p", "any", "cuda")


def of_devices(cause: TooFewDevices, asks: int = 0) -> str:
    """What the judge says of a test on four GPUs for which they are said to be too few."""
    return judged(result(1, cause), asks=asks, profile=CUDA)


@pytest.mark.parametrize(
    ("cause", "asks"),
    [
        (TooFewDevices(4, 4, "cuda", 3), 0),
        (TooFewDevices(4, 4, "cuda", 3, (2, 1)), 0),
        (TooFewDevices(4, 4, "cuda", 4, (3, 1)), 0),
        (TooFewDevices(4, 4, "cuda", 9, (8, 1)), 2),
        (TooFewDevices(4, 2, "cuda", 1), 0),
        (TooFewDevices(4, 4, "cuda", 5, (1, 1, 1, 1, 1)), 2),
    ],
)
def test_devices_are_too_few(cause: TooFewDevices, asks: int) -> None:
    """Devices are too few in all, or none of the ways to spread the ranks over the hosts has enough on each."""
    assert of_devices(cause, asks) == ""


@pytest.mark.parametrize(
    ("cause", "asks"),
    [
        (TooFewDevices(4, 4, "cuda", 4), 0),
        (TooFewDevices(4, 4, "cuda", 4, (2, 2)), 0),
        (TooFewDevices(4, 4, "cuda", 8, (8, 1)), 2),
        (TooFewDevices(4, 4, "cuda", 9, (8, 1)), 0),
        (TooFewDevices(4, 4, "cuda", 6, (3, 3)), 2),
        (TooFewDevices(4, 3, "cuda", 3, (2, 1)), 0),
    ],
)
def test_devices_are_enough(cause: TooFewDevices, asks: int) -> None:
    """Devices that would do, and numbers that contradict each other, are no reason."""
    assert "its numbers do not fit" in of_devices(cause, asks)
