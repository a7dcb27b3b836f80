"""The check of unsupported tests: whether their causes are valid, and whether tests ran that should be unsupported.

Causes are those for which the plug-in skips (``harness/plugin/worlds.py``), and those in the test's own source. They
are compared with the profile, the suite and the other tests of the run.
"""

from __future__ import annotations

from collections.abc import Iterator

from harness.placement import Need, would_fit
from harness.results import (
    HostLacks,
    NoBackend,
    NoDevice,
    NoFittingSize,
    NoStack,
    NotClaimed,
    Run,
    SizeNotClaimed,
    TestResult,
    TooFewDevices,
    TooFewHosts,
    TooLittleMemory,
)
from harness.suite_facts import TestFacts
from reports.arguments import Asked
from reports.by_profile import Entitled
from reports.checkout import Checkout
from reports.text import plural

_RAN = ("passed", "failed", "crashed", "hung", "flaky", "waived")
BENCHMARKS = "perf"
"""The stack whose messages may be too large for a machine."""
_SHOWN = 200
"""Characters of a reason that a message repeats."""


class _Judge:
    """The rules that decide, for one run, whether a test may be unsupported."""

    def __init__(self, run: Run, by: Entitled, asked: Asked) -> None:
        self.run, self.by, self.asked = run, by, asked
        self.ran = [test for test in run.tests.values() if test.verdict in _RAN and test.size]
        self.worlds = {(test.world.backend, test.world.device) for test in self.ran if test.world is not None}
        causes = [test.cause for test in run.tests.values()]
        self.counted = {(cause.kind, cause.have) for cause in causes if isinstance(cause, TooFewDevices)}
        self.hosts = {cause.have for cause in causes if isinstance(cause, TooFewHosts)}

    def why_not(self, test: TestResult, facts: TestFacts) -> str:
        """Say why the test cannot be unsupported for its cause; empty if it can."""
        cause = test.cause
        allowed = test.reason in facts.skips if cause is None else cause in facts.causes
        if allowed:
            return ""
        match cause:
            case NotClaimed():
                return self._not_claimed(cause, facts)
            case SizeNotClaimed():
                return self._sizes(cause, facts)
            case NoFittingSize():
                return self._fitting(cause, facts)
            case TooFewDevices():
                return self._devices(cause, facts)
            case TooFewHosts():
                return self._hosts(cause, facts)
            case NoBackend():
                return self._backend(cause, facts)
            case NoStack():
                return self._stack(cause, test)
            case NoDevice():
                return self._no_device(cause, facts)
            case HostLacks():
                return self._host(cause, test, facts)
            case TooLittleMemory():
                return self._memory(cause, test)
        given = test.reason[:_SHOWN] if cause is None else str(cause)[:_SHOWN]
        return f"unsupported for a reason that neither its source nor Concord gives: {given}"

    def _not_claimed(self, cause: NotClaimed, facts: TestFacts) -> str:
        claims, name = self.by.claims, self.by.profile.name
        if cause.profile != name:
            return f"says that the profile {cause.profile} does not claim it, but the run's profile is {name}"
        missing = facts.needs.unclaimed(claims, name)
        if missing is not None:
            says = f"says that {cause.what} is not claimed"
            return "" if cause == missing else f"{says}, but what it needs and is not claimed is {missing.what}"
        # The test itself decides this, for each case that it tries.
        if not cause.dtypes or not all(claims.lacks(cause.collective, dtype, cause.op) for dtype in cause.dtypes):
            return f"says that {cause.what} is not claimed, but the profile {name} claims what the test needs"
        unnamed = [word for word in (cause.collective, *cause.dtypes) if word not in cause.what]
        return f"says that {cause.what} is not claimed, but its cause is about {unnamed[0]}" if unnamed else ""

    def _sizes(self, cause: SizeNotClaimed, facts: TestFacts) -> str:
        profile, size = self.by.profile, _least(facts)
        if cause != SizeNotClaimed(profile.name, profile.world_sizes, size):
            claimed = ", ".join(map(str, profile.world_sizes)) or "any number of"
            return f"says that {cause}, but the profile {profile.name} claims worlds of {claimed} ranks"
        if size in profile.world_sizes:
            return f"says that {cause}, but the profile claims worlds of {size} ranks"
        return ""

    def _fitting(self, cause: NoFittingSize, facts: TestFacts) -> str:
        claimed = self._claimed(facts)
        if not set(cause.sizes) <= set(facts.sizes):
            return (
                f"says that {cause}, but in the suite it has worlds of {', '.join(map(str, facts.sizes)) or 'one size'}"
            )
        kind = self._kind(facts)
        most = self._most_ranks(kind)
        there = [size for size in cause.sizes if size in claimed and (kind == "cpu" or size <= most)]
        return f"says that {cause}, but other tests of the run had worlds of {there[0]} ranks" if there else ""

    def _most_ranks(self, kind: str) -> int:
        """Return the size of the largest world on a type of device that a test of the run had; 0 if there is none."""
        return max((t.size for t in self.ran if t.world is not None and t.world.device == kind), default=0)

    def _claimed(self, facts: TestFacts) -> list[int]:
        """Return the sizes of the test's worlds that the profile claims."""
        sizes, claimed = facts.sizes or [facts.size], self.by.profile.world_sizes
        return [size for size in sizes if not claimed or size in claimed]

    def _devices(self, cause: TooFewDevices, facts: TestFacts) -> str:
        if cause.kind == "cpu":
            return "says that it needs more CPU devices, but the host has room for worlds of any size"
        if wrong := self._wrong_kind(cause.kind, facts):
            return f"says that it needs {cause.kind} devices, but {wrong}"
        if cause.size != _least(facts) or cause.need > cause.size or not _too_few(cause, facts.hosts):
            return f"says that there are too few devices for {facts.size} ranks, but its numbers do not fit: {cause}"
        if len({count for kind, count in self.counted if kind == cause.kind}) > 1:
            return f"tests of the run contradict each other about the number of {cause.kind} devices"
        most = self._most_ranks(cause.kind)
        if most >= cause.size:
            return f"says that there are too few devices for {cause.size} ranks, but another test had {most} ranks"
        return ""

    def _hosts(self, cause: TooFewHosts, facts: TestFacts) -> str:
        if cause.hosts != facts.hosts or cause.have >= cause.hosts:
            asks = f"on {facts.hosts} hosts" if facts.hosts else "on any number of hosts"
            return f"says that {cause}, but in the suite its world is {asks}"
        if len(self.hosts) > 1:
            return "tests of the run contradict each other about the number of hosts"
        most = max((test.world.hosts for test in self.ran if test.world is not None), default=1)
        return f"says that {cause}, but another test had a world on {most}" if most > cause.have else ""

    def _backend(self, cause: NoBackend, facts: TestFacts) -> str:
        says = f"says that torch has no backend {cause.backend}"
        if cause.backend in {backend for backend, _ in self.worlds}:
            return f"{says}, but other tests of the run used it"
        wanted = facts.backend or self.by.profile.backend
        return "" if cause.backend == wanted else f"{says}, but the test runs on {wanted}"

    def _stack(self, cause: NoStack, test: TestResult) -> str:
        subject = self.run.header.subject
        says = f"says that the subject {cause.subject} has no {cause.stack}"
        if cause.subject != subject:
            return f"{says}, but the subject of the run is {subject}"
        if subject == "torch":
            return f"{says}, but torch has every stack"
        if cause.stack != test.stack:
            return f"{says}, but it is a test of {test.stack}"
        if cause.stack in cause.implemented or any(t.stack == test.stack for t in self.ran):
            return f"{says}, but the subject implements it or other tests of {test.stack} ran"
        return ""

    def _no_device(self, cause: NoDevice, facts: TestFacts) -> str:
        says = f"says that there is no {cause.kind} device"
        if wrong := self._wrong_kind(cause.kind, facts):
            return f"{says}, but {wrong}"
        there = cause.kind in {device for _, device in self.worlds}
        return f"{says}, but other tests of the run used one" if there else ""

    def _wrong_kind(self, kind: str, facts: TestFacts) -> str:
        """Say that the test's world is on another type of device; empty if it is on this one."""
        wanted = self._kind(facts)
        return "" if kind == wanted else f"the test runs on {wanted}"

    def _kind(self, facts: TestFacts) -> str:
        """Return the type of device of the test's world."""
        return facts.device or self.asked.world_device or self.by.profile.device

    def _host(self, cause: HostLacks, test: TestResult, facts: TestFacts) -> str:
        says = f"says that the host has no {cause.what}"
        if not facts.needs.of_accelerators or cause.what != facts.needs.of_accelerators:
            return f"{says}, but the test needs no such feature of an accelerator"
        device = test.world.device if test.world is not None else "cpu"
        return "" if device == "cpu" else f"{says}, but its world is on {device}"

    def _memory(self, cause: TooLittleMemory, test: TestResult) -> str:
        says = f"says that {cause}"
        if test.stack != BENCHMARKS:
            return f"{says}, but only benchmarks have messages of that size"
        return "" if cause.need > cause.have else f"{says}, but its numbers do not fit"

    def should_not_run(self, test: TestResult, facts: TestFacts) -> str:
        """Say why a test that was run should have been unsupported; empty if it should not."""
        world, profile = test.world, self.by.profile
        if world is None or (world.backend, world.device) != (profile.backend, profile.device):
            return ""  # the claims do not cover this world
        ran = world.ranks if facts.sizes else facts.size
        if profile.world_sizes and ran not in profile.world_sizes:
            return f"ran on {ran} ranks, but the profile does not claim worlds of that size"
        if facts.hosts and world.hosts != facts.hosts:
            return f"ran on {plural(world.hosts, 'host')}, but in the suite its world is on {facts.hosts}"
        if facts.sizes and profile.device == "cpu" and ran != max(self._claimed(facts)):
            return f"ran in worlds of at most {ran} ranks, but the host has room for {max(self._claimed(facts))}"
        fitting = [size for size in self._claimed(facts) if size <= ran]
        if facts.sizes and world.sizes and sorted(fitting) != list(world.sizes):
            drew, could = (", ".join(map(str, sizes)) for sizes in (world.sizes, fitting))
            return f"drew from worlds of {drew} ranks, but in the suite and the profile they are {could}"
        if profile.device == "cpu" and facts.needs.of_accelerators:
            return f"ran on the host, but needs an accelerator for {facts.needs.of_accelerators}"
        missing = facts.needs.unclaimed(self.by.claims)
        return f"ran, but the profile does not claim {missing.what}" if missing is not None else ""


def _too_few(cause: TooFewDevices, hosts: int) -> bool:
    """Return whether the numbers of devices are too small, with some number of ranks on a device.

    ``hosts``: on how many hosts the test's world is; 0 if it does not say.
    """
    if not cause.each:
        return cause.need > cause.have
    if sum(cause.each) != cause.have:
        return False
    over = [hosts] if hosts else range(1, min(cause.size, len(cause.each)) + 1)
    for sharing in range(1, cause.size + 1):
        needs = [Need(cause.size, sharing, count) for count in over]
        if any(sum(need.on_each) == cause.need for need in needs) and not any(would_fit(n, cause.each) for n in needs):
            return True
    return False


def _least(facts: TestFacts) -> int:
    """Return the smallest number of ranks with which the test could run."""
    return facts.sizes[0] if facts.sizes else facts.size


def unsupported_problems(run: Run, by: Entitled | None, asked: Asked, checkout: Checkout) -> Iterator[str]:
    """Find tests that are unsupported without a valid cause, and tests that ran although they are unsupported."""
    if by is None:
        return
    judge = _Judge(run, by, asked)
    for test in run.tests.values():
        facts = checkout.test(test.nodeid)
        if facts is None:
            continue
        if test.verdict == "unsupported":
            why = judge.why_not(test, facts)
        else:
            why = judge.should_not_run(test, facts) if test.verdict in _RAN else ""
        if why:
            yield f"{test.nodeid}: {why}"
