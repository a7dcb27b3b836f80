"""The check of a run against its profile's text, from which claims, waivers and their scope are derived again."""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

import msgspec

from harness.profiles import Claims, Platform, Profile, ProfileError, Waiver, defects_among, parse
from harness.profiles.recorded import as_recorded
from harness.results import ENDED_BADLY, ProfileText, Run, TestResult, WaiverEntry, merged


@dataclass(frozen=True)
class Entitled:
    """What a run may claim and waive according to its profile's text."""

    profile: Profile
    platform: Platform
    claims: Claims
    """The claims on the platform of the run."""
    recorded: ProfileText
    """The record of the profile that the run should have written."""
    subject: str
    defects: Mapping[str, str] = field(default_factory=dict)
    """The texts of the known defects, by owner."""

    def counts(self, waiver: Waiver) -> bool:
        """Whether a waiver applies to the platform and the subject of the run."""
        return waiver.when.holds(self.platform) and self.subject in waiver.subjects


def entitled(run: Run) -> tuple[Entitled | None, list[str]]:
    """Parse the text of a run's profile with the local reader, and return the problems of the text as well.

    The first result is None if the run has no text, or if it cannot be read.
    """
    told, header = run.profile, run.header
    if told is None:
        waived = any(test.verdict == "waived" for test in run.records())
        return None, [f"the text of its profile {header.profile!r} is not there"] if header.profile or waived else []
    if told.file not in told.texts:
        return None, [f"the text of {told.file} is not there"]
    problems = []
    texts = "\0".join(told.texts.values())
    if hashlib.sha256(texts.encode(errors="surrogatepass")).hexdigest() != header.profile_hash:
        problems.append(f"the text of {told.file} is not the one that its hash is of")
    try:
        known = defects_among(told.texts)
        profile = parse(told.texts[told.file], told.file, _Below(told.texts), known)
    except ProfileError as e:
        return None, [*problems, f"its profile can't be read: {e.mistakes[0]}"]
    surplus = set(told.texts) - set(profile.files)
    if surplus:
        problems.append(f"texts that its profile does not inherit from: {', '.join(sorted(surplus)[:3])}")
    platform = platform_of(header.environment, profile)
    recorded = as_recorded(profile, told.texts, platform, header.subject)
    defects = {each.owner: told.texts[each.file] for each in known}
    return Entitled(profile, platform, profile.claims.on(platform), recorded, header.subject, defects), problems


class _Below:
    """A finder of the profile from which another inherits, which looks only at the texts that the run recorded."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = texts

    def __call__(self, name: str, file: str) -> tuple[str, str]:
        after = list(self._texts)[list(self._texts).index(file) + 1 :]
        for other in after[:1]:
            if PurePosixPath(other).stem == name:
                return other, self._texts[other]
        raise ValueError(f"the text of the profile {name!r} is not in the run")


def platform_of(environment: Mapping[str, str], profile: Profile) -> Platform:
    """Return the platform of a run according to its recorded environment."""
    name = environment.get("device", profile.device) if profile.device != "cpu" else profile.device
    return Platform(
        torch=environment.get("torch", ""),
        python=environment.get("python", ""),
        machine=environment.get("machine", ""),
        os=environment.get("os", ""),
        device_name=name if profile.asks_for_device_name else "",
    )


def profile_problems(run: Run, by: Entitled) -> Iterator[str]:
    """Find where a run contradicts its profile's text."""
    told, real = run.profile, by.recorded
    assert told is not None
    if real.name != run.header.profile:
        yield f"it went by the profile {run.header.profile!r}, and the text is that of {real.name!r}"
    for what in ("name", "file", "backend", "device", "about", "never_run"):
        if getattr(told, what) != getattr(real, what):
            yield f"the profile's {what} is {getattr(told, what)!r}, and its text says {getattr(real, what)!r}"
    for claim in sorted({*told.claims, *real.claims}):
        if told.claims.get(claim) != real.claims.get(claim):
            says, text = told.claims.get(claim, "nothing"), real.claims.get(claim, "nothing")
            yield f"the profile claims {claim}: {says}; its text says {text}"
    yield from _waivers(told.waivers, {entry.place: entry for entry in real.waivers})
    for test in run.records():
        if test.verdict == "waived" and (why := _uncovered(test, by, _day(run))):
            yield f"{test.nodeid}: {why}"


def _waivers(told: list[WaiverEntry], real: Mapping[str, WaiverEntry]) -> Iterator[str]:
    for entry in told:
        written = real.get(entry.place)
        if written is None:
            yield f"the waiver {entry.place} is not in the profile's text"
            continue
        older = () if entry.owner else ("owner", "defect")  # of a Concord that did not record them
        for what in (each for each in WaiverEntry.__struct_fields__ if each not in older):
            if getattr(entry, what) != getattr(written, what):
                says, text = (_said(getattr(each, what)) for each in (entry, written))
                yield f"the waiver {entry.place}: its {what} is {says}, and by the profile's text {text}"
    for place in real.keys() - {entry.place for entry in told}:
        yield f"the waiver {place} is in the profile's text, and not among those of the run"
    if len({entry.place for entry in told}) < len(told):
        yield "the same waiver is there twice"


def _said(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _day(run: Run) -> datetime.date:
    """Return the day on which the run began, in UTC; the last of all days, which no waiver covers, for an invalid time.

    A waiver applies until the end of its last day.
    """
    try:
        return datetime.datetime.fromtimestamp(run.header.started, datetime.UTC).date()
    except (ValueError, OverflowError, OSError):
        return datetime.date.max


def _uncovered(test: TestResult, by: Entitled, day: datetime.date) -> str:
    """Say why the profile does not cover a waived test; empty if it does."""
    waiver = next((w for w in by.profile.waivers if w.place == test.waiver), None)
    if waiver is None:
        return f"waived by {test.waiver}, and the profile has no such waiver"
    if not waiver.matches(test.nodeid):
        return f"waived by {waiver.place}, which is not about it"
    if test.bare not in waiver.verdicts:
        return f"waived by {waiver.place}, which does not cover {test.bare}"
    if not by.counts(waiver):
        return f"waived by {waiver.place}, which is about another torch or subject"
    if waiver.has_expired(day):
        return f"waived by {waiver.place}, which had expired on {waiver.expires}"
    return ""


def stale(run: Run, by: Entitled) -> Iterator[str]:
    """Find waivers that make the run fail because a test that they cover passed."""
    about = {w: [t for t in run.tests.values() if w.matches(t.nodeid)] for w in by.profile.waivers if by.counts(w)}
    day = _day(run)
    accepted = {
        test.nodeid
        for waiver, tests in about.items()
        if waiver.intermittent and not waiver.has_expired(day)
        for test in tests
    }
    for waiver, tests in about.items():
        if waiver.intermittent or not by.profile.expects(waiver):
            continue
        passed = [test.nodeid for test in tests if test.verdict == "passed" and test.nodeid not in accepted]
        if passed:
            yield f"{waiver.place} is about {passed[0]}, which passed"


def unmatched(run: Run, by: Entitled) -> Iterator[str]:
    """Find waivers that cover no test of the run, which make a run of all suites fail."""
    for waiver in filter(by.profile.expects, by.profile.waivers):
        if by.counts(waiver) and not any(waiver.matches(nodeid) for nodeid in run.tests):
            yield f"{waiver.place} is about no test"


def with_profile_of(run: Run, by: Entitled | None) -> Run:
    """Return the run with the facts from its profile's text, and without the waivers that the text does not allow."""
    if by is None:
        return run
    day = _day(run)

    def entitled_to(test: TestResult) -> TestResult:
        if test.verdict != "waived" or not _uncovered(test, by, day):
            return test
        return msgspec.structs.replace(test, verdict=test.bare if test.bare in ENDED_BADLY else "failed")

    attempts = {nodeid: list(map(entitled_to, several)) for nodeid, several in run.attempts.items()}
    tests = {
        nodeid: merged(attempts[nodeid]) if nodeid in attempts else entitled_to(test)
        for nodeid, test in run.tests.items()
    }
    return msgspec.structs.replace(run, profile=by.recorded, tests=tests, attempts=attempts)
