"""Waivers: a known defect does not fail a run. A defect that is gone, or a waiver that has expired, does.

A defect of another owner (PyTorch, the backend) that does not show fails only a run whose profile keeps that owner.
"""

from __future__ import annotations

import datetime
import functools
from collections import Counter
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.plugin import facts
from harness.plugin.profiles import Profiles
from harness.profiles import Platform, Profile, Waiver, pattern
from harness.results import BAD, Deselected, LeftOut, MaybeLeftOut, NotCollected

_SHOWN = 5
_NARROWING = ("keyword", "markexpr", "deselect", "ignore", "ignore_glob", "lf", "stepwise")
"""Options of pytest that leave out tests."""


@dataclass(frozen=True)
class Conditions:
    """What decides, besides the test, which waivers count."""

    today: datetime.date
    platform: Platform
    subject: str = "torch"

    @classmethod
    def now(cls, platform: Platform, subject: str = "torch") -> Conditions:
        """Return the conditions as they are now. The date is in UTC, so that workers and machines agree."""
        return cls(datetime.datetime.now(datetime.UTC).date(), platform, subject)

    def are_of(self, waiver: Waiver) -> bool:
        """Return whether a waiver is about this platform and this subject."""
        return waiver.when.holds(self.platform) and self.subject in waiver.subjects

    def concerning(self, profile: Profile, nodeid: str) -> list[Waiver]:
        """Return the waivers for a test under these conditions, including expired ones."""
        return [w for w in profile.waivers if w.matches(nodeid) and self.are_of(w)]

    def covering(self, profile: Profile, nodeid: str, verdict: str, report: str = "") -> Waiver | None:
        """Return the waiver that accepts a test's bad verdict, or None if there is none.

        ``report``: the text of the failure, in which a waiver may look for what is known of it.
        """
        for waiver in self.concerning(profile, nodeid):
            if verdict in waiver.verdicts and not waiver.has_expired(self.today) and waiver.is_shown_by(report):
                return waiver
        return None


@dataclass(frozen=True)
class Review:
    """What became of a profile's waivers in a run, as lines for its summary."""

    waived: tuple[str, ...]
    notes: tuple[str, ...]
    """Why waivers did not cover a failure."""
    stale: tuple[str, ...]
    """Each is a reason for the run to fail."""
    absent: tuple[str, ...] = ()
    """Which defects of others did not show."""


@dataclass(frozen=True)
class _Stale:
    """A line that pytest's last line counts. Other plug-ins expect an object that can have attributes."""

    line: str


def review(
    profile: Profile,
    verdicts: Mapping[str, str],
    waived: Mapping[str, tuple[str, str]],
    conditions: Conditions,
    *,
    whole: bool,
    all_names: bool = False,
) -> Review:
    """Review the waivers of a run when it is over.

    ``verdicts``: node id to verdict. ``waived``: node id to the place of the waiver that was used, and the verdict that
    the test would have had. ``whole``: whether every suite was collected, so that a glob without a test is a mistake.
    ``all_names``: whether lines list every test, instead of the first ones.
    """
    used: dict[str, list[str]] = {}
    for nodeid, (place, verdict) in waived.items():
        if verdicts.get(nodeid) == "waived":
            used.setdefault(place, []).append(f"{nodeid} {verdict}")
    concerned: dict[Waiver, list[str]] = {}
    for nodeid in verdicts:
        for waiver in conditions.concerning(profile, nodeid):
            concerned.setdefault(waiver, []).append(nodeid)
    accepted = {
        nodeid
        for waiver, nodeids in concerned.items()
        if waiver.intermittent and not waiver.has_expired(conditions.today)
        for nodeid in nodeids
    }
    lines: list[str] = []
    notes: list[str] = []
    stale: list[str] = []
    absent: dict[str, list[str]] = {}
    for waiver in profile.waivers:
        nodeids = concerned.get(waiver, [])
        if waiver.place in used:
            now = "intermittent, " if waiver.intermittent else ""
            said = f"{waiver.named}, {now}{waiver.link}, until {waiver.expires}"
            lines.append(f"{waiver.place}: {waiver.reason} ({said})")
            lines.append(f"    {listed(sorted(used[waiver.place]), all_names)}")
        bad = [f"{n} {verdicts[n]}" for n in nodeids if verdicts[n] in BAD]
        if bad and waiver.has_expired(conditions.today):
            why = f"expired on {waiver.expires}: {listed(bad, all_names)}; look again at: {waiver.reason}"
            notes.append(f"{waiver.place}: {why} ({waiver.link})")
        elif bad:
            shows = f" with {' or '.join(map(repr, waiver.shows))} in the report" if waiver.shows else ""
            notes.append(f"{waiver.place}: covers only {', '.join(waiver.verdicts)}{shows}: {listed(bad, all_names)}")
        passed = [n for n in nodeids if verdicts[n] == "passed" and n not in accepted]
        if not profile.expects(waiver):
            if passed and not waiver.intermittent and waiver.place not in used and not bad:
                absent.setdefault(waiver.owner, []).append(waiver.defect)
            continue
        if passed and not waiver.intermittent:
            stale.append(
                f"{waiver.place}: stale: passed: {listed(passed, all_names)}; take it out, or make it narrower"
            )
        if whole and conditions.are_of(waiver):
            unmatched = [glob for glob in waiver.tests if not _matches_any(glob, verdicts)]
            stale += [f"{waiver.place}: stale: there is no test {glob!r}" for glob in unmatched]
    if used:
        counts: Counter[str] = Counter()
        for waiver in profile.waivers:  # in the order of owners there, whichever worker was first
            counts[waiver.owner] += len(used.get(waiver.place, ()))
        lines.append(
            f"waived tests by owner: {', '.join(f'{owner} {count}' for owner, count in counts.items() if count)}"
        )
    not_shown = [
        f"{len(ids)} known defect{'s' if len(ids) > 1 else ''} of {owner} did not show: {listed(ids, all_names)}"
        for owner, ids in absent.items()
    ]
    return Review(tuple(lines), tuple(notes), tuple(stale), tuple(not_shown))


def _matches_any(glob: str, nodeids: Iterable[str]) -> bool:
    match = pattern(glob).match
    return any(match(nodeid) for nodeid in nodeids)


def listed(names: list[str], all_names: bool) -> str:
    """Join names in one line: the first ones, and how many more there are."""
    shown = names if all_names else names[:_SHOWN]
    more = [f"and {len(names) - len(shown)} more"] if len(shown) < len(names) else []
    return ", ".join([*shown, *more])


def collects_all_suites(config: pytest.Config) -> bool:
    """Return whether the command line asks for every test under ``suites/``, with no option that leaves any out."""
    if any(config.getoption(option, None) for option in _NARROWING):
        return False
    suites = (config.rootpath / "suites").resolve()
    paths = [config.invocation_params.dir / Path(argument) for argument in config.args]
    return suites.is_dir() and any(suites.is_relative_to(path.resolve()) for path in paths)


class Waivers:
    """Waives reports where tests run, and reviews the waivers where their verdicts are known."""

    def __init__(self, config: pytest.Config, profiles: Profiles) -> None:
        self._config = config
        self._profiles = profiles
        self._waived: dict[str, tuple[str, str]] = {}
        self._left_out: set[LeftOut] = set()
        self._review: Review | None = None

    @property
    def left_out(self) -> list[LeftOut]:
        """What this run left out (deselected tests, files that fail to collect), as far as its processes have said."""
        return sorted(self._left_out, key=str, reverse=True)

    @functools.cached_property
    def _conditions(self) -> Conditions:
        return Conditions.now(self._profiles.platform(), self._config.getoption("subject"))

    # where tests run

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        """Turn a report that a waiver covers into one of an expected failure."""
        report = yield
        profile = self._profiles.chosen_for(item.nodeid)
        if profile is None or not report.failed or call.excinfo is None:
            return report
        properties = dict(item.user_properties)
        verdict = str(properties.get("concord.verdict", "failed"))
        waiver = self._conditions.covering(profile, item.nodeid, verdict, report.longreprtext)
        if waiver is not None:
            report.outcome = "skipped"
            report.wasxfail = f"{waiver.reason} ({waiver.named}, {waiver.link})"
            noted = {"waived": waiver.place, "owner": waiver.owner, "defect": waiver.defect, "verdict": verdict}
            for key, value in ((f"concord.{name}", value) for name, value in noted.items() if value):
                item.user_properties.append((key, value))
                report.user_properties.append((key, value))
        return report

    def pytest_deselected(self) -> None:
        self._left_out.add(Deselected())

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._left_out.add(NotCollected())

    # where their verdicts are known

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        properties = dict(report.user_properties)
        if "concord.waived" in properties:
            verdict = str(properties.get("concord.verdict", "failed"))
            self._waived[report.nodeid] = (str(properties["concord.waived"]), verdict)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        output: dict[str, Any] = getattr(node, "workeroutput", {})
        said = output.get("concord_left_out")
        self._left_out |= {MaybeLeftOut()} if said is None else {msgspec.convert(each, LeftOut) for each in said}
        self._profiles.note_worker(output.get("concord_profile", ""))

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        profile = self._profiles.settled
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput["concord_profile"] = profile.file if profile else ""
            self._config.workeroutput["concord_left_out"] = [facts.plain(each) for each in self.left_out]
            return
        summary: Any = self._config.pluginmanager.get_plugin("concord-summary")
        if profile is None or self._config.option.collectonly:
            return
        verdicts = {nodeid: result.verdict for nodeid, result in summary.results.items()}
        whole = not self._left_out and collects_all_suites(self._config)
        every_name = self._config.option.verbose > 0
        self._review = review(profile, verdicts, self._waived, self._conditions, whole=whole, all_names=every_name)
        if self._review.stale and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        review = self._review
        if review is None or not (review.waived or review.notes or review.stale or review.absent):
            return
        terminalreporter.section("waivers", sep="-")
        for line in review.waived:
            terminalreporter.write_line(line, yellow=not line.startswith(" "))
        for line in review.absent:
            terminalreporter.write_line(line)
        for line in (*review.notes, *review.stale):
            terminalreporter.write_line(line, red=True)
        if review.stale:
            terminalreporter._add_stats("stale", [_Stale(line) for line in review.stale])  # the last line counts them
