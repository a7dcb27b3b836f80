"""The check of unsupported tests: whether their reasons are valid, and whether tests ran that should be unsupported.

Reasons are those with which the plug-in skips (``harness/plugin/worlds.py``), and those in the test's own source. The
facts in a reason are compared with the profile, the suite and the other tests of the run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from harness.profiles.vocabulary import COLLECTIVES, DTYPES, OPS
from harness.results import UNSUPPORTED, Run, TestResult
from harness.suite_facts import TestFacts
from reports.arguments import Asked
from reports.by_profile import Entitled
from reports.checkout import Checkout
from reports.coherence import world_of

_RAN = ("passed", "failed", "crashed", "hung", "flaky", "waived")
_NOT_CLAIMED = re.compile(r"not claimed: (.+) \(profile (.+)\)", re.DOTALL)
_DTYPE = re.compile(rf"\b(?:{'|'.join(DTYPES)})\b")
_COLLECTIVE = re.compile(r"(\w+)(?: of |\()")
_HOST = re.compile(r"(.+): the host has none")
_SIZES = re.compile(r"profile (.+) claims worlds of ([\d, ]+) ranks, not of (\d+)")
_DEVICES = re.compile(r"a world of (\d{1,9}) ranks needs (\d{1,9}) (\S+) devices, and there are (\d{1,9})")
_BACKEND = re.compile(r"torch has no backend '(.+)' here")
_SUBJECT = re.compile(r"subject (\S+) has no (\S+); it implements .*")
_NO_DEVICE = re.compile(r"no (\S+) device: .+", re.DOTALL)


class _Judge:
    """The rules that decide, for one run, whether a test may be unsupported."""

    def __init__(self, run: Run, by: Entitled, asked: Asked) -> None:
        self.run, self.by, self.asked = run, by, asked
        self.ran = [test for test in run.tests.values() if test.verdict in _RAN and test.size]
        self.worlds = {world[1:] for test in self.ran if (world := world_of(test)) is not None}
        self.counted = {
            (found[3], found[4])
            for test in run.tests.values()
            if (found := _DEVICES.fullmatch(test.reason.removeprefix(UNSUPPORTED)))
        }

    def why_not(self, test: TestResult, facts: TestFacts) -> str:
        """Say why the test cannot be unsupported for its reason; empty if it can."""
        reason = test.reason.removeprefix(UNSUPPORTED)
        if test.reason in facts.skips:
            return ""
        known: list[tuple[re.Pattern[str], Callable[[re.Match[str], TestResult, TestFacts], str]]] = [
            (_NOT_CLAIMED, self._not_claimed),
            (_SIZES, self._sizes),
            (_DEVICES, self._devices),
            (_BACKEND, self._backend),
            (_SUBJECT, self._subject),
            (_NO_DEVICE, self._no_device),
            (_HOST, self._host),
        ]
        for pattern, judge in known:
            match = pattern.fullmatch(reason)
            if match:
                return judge(match, test, facts)
        return f"unsupported for a reason that it never gives: {reason[:200]}"

    def _not_claimed(self, found: re.Match[str], test: TestResult, facts: TestFacts) -> str:
        what, profile = found[1], found[2]
        claims, name = self.by.claims, self.by.profile.name
        if profile != name:
            return f"not claimed by the profile {profile}, and the run went by {name}"
        missing = facts.needs.unclaimed(claims)
        if missing:
            return "" if what == missing else f"not claimed is {missing}, and it says {what}"
        dtypes = _DTYPE.findall(what)  # the test itself decides this for each case that it tries
        named = _COLLECTIVE.match(what)
        collective = named[1] if named and named[1] in COLLECTIVES else ""
        if dtypes and any(all(claims.lacks(collective, dtype, op) for dtype in dtypes) for op in ("", *OPS)):
            return ""
        return f"says that {what} is not claimed, and the profile {name} claims what it needs"

    def _sizes(self, found: re.Match[str], test: TestResult, facts: TestFacts) -> str:
        profile = self.by.profile
        claimed = ", ".join(map(str, profile.world_sizes))
        if (found[1], found[2], found[3]) != (profile.name, claimed, str(facts.size)):
            return f"the profile {profile.name} claims worlds of {claimed or 'any number of'} ranks"
        return "" if facts.size not in profile.world_sizes else f"the profile claims worlds of {facts.size} ranks"

    def _devices(self, found: re.Match[str], test: TestResult, facts: TestFacts) -> str:
        size, need, have = int(found[1]), int(found[2]), int(found[4])
        if found[3] == "cpu":
            return "says that it needs devices, and the host has room for worlds of any size"
        if found[3] not in self._kinds(facts):
            return f"says that it needs {found[3]} devices, and nobody asked for such"
        if size != facts.size or need > size or need <= have:
            return f"a world of {facts.size} ranks does not lack devices where it says so: {found[0]}"
        if len({count for kind, count in self.counted if kind == found[3]}) > 1:
            return f"tests of the run do not agree how many {found[3]} devices there are"
        most = max((t.size for t in self.ran if (world := world_of(t)) and world[2] == found[3]), default=0)
        return f"too few devices for {size} ranks, and another test had {most}" if most >= size else ""

    def _backend(self, found: re.Match[str], test: TestResult, facts: TestFacts) -> str:
        if found[1] in {backend for backend, _ in self.worlds}:
            return f"torch has no backend {found[1]}, and other tests of the run had worlds of it"
        wanted = facts.backend or self.by.profile.backend
        return "" if found[1] == wanted else f"torch has no backend {found[1]}, and it asks for {wanted}"

    def _subject(self, found: re.Match[str], test: TestResult, facts: TestFacts) -> str:
        if found[1] != self.run.header.subject or found[1] == "torch":
            return f"the subject {found[1]} lacks it, and the run is of {self.run.header.subject}"
        if found[2] != test.stack or any(t.stack == test.stack for t in self.ran):
            return f"the subject lacks {found[2]}, and other tests of {test.stack} were run"
        return ""

    def _no_device(self, found: re.Match[str], test: TestResult, facts: TestFacts) -> str:
        if found[1] not in self._kinds(facts):
            return f"says that there is no {found[1]} device, and nobody asked for one"
        there = found[1] in {device for _, device in self.worlds}
        return f"there is no {found[1]} device, and other tests of the run had one" if there else ""

    def _kinds(self, facts: TestFacts) -> tuple[str, ...]:
        """Return the types of devices on which the test's world may be."""
        return (facts.device or self.asked.world_device or self.by.profile.device,)

    def _host(self, found: re.Match[str], test: TestResult, facts: TestFacts) -> str:
        world = world_of(test)
        if not facts.needs.of_accelerators or found[1] != facts.needs.of_accelerators:
            return f"says that it needs an accelerator for {found[1]}, and it does not"
        return "" if world is None or world[2] == "cpu" else f"says that it is on the host, and it is on {world[2]}"

    def should_not_run(self, test: TestResult, facts: TestFacts) -> str:
        """Say why a test that was run should have been unsupported; empty if it should not."""
        world, profile = world_of(test), self.by.profile
        if world is None or world[1:] != (profile.backend, profile.device):
            return ""  # the claims do not cover this world
        if profile.world_sizes and facts.size not in profile.world_sizes:
            return f"was run on {facts.size} ranks, and the profile does not claim worlds of that"
        if profile.device == "cpu" and facts.needs.of_accelerators:
            return f"was run on the host, which has none of {facts.needs.of_accelerators}"
        missing = facts.needs.unclaimed(self.by.claims)
        return f"was run, and the profile does not claim {missing}" if missing else ""


def unsupported_problems(run: Run, by: Entitled | None, asked: Asked, checkout: Checkout) -> Iterator[str]:
    """Find tests that are unsupported without a valid reason, and tests that ran although they are unsupported."""
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
