"""The verdicts of a run: written to the results file as they come, and counted by stack at the end."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

import harness
from harness import results
from harness.plugin import facts
from harness.plugin.attempts import ended_badly
from harness.plugin.folder import LOST, folder_of, lose
from harness.plugin.loaded import Loaded
from harness.plugin.profiles import Profiles
from harness.plugin.seeds import Seeds
from harness.profiles import NEVER_RUN
from harness.provenance import suite_hash
from harness.requirements import stack_of
from harness.results import (
    BAD,
    UNSUPPORTED,
    VERDICTS,
    Cases,
    CasesDrawn,
    Cause,
    Collected,
    GivenWorld,
    Issued,
    RankEvidence,
    Reproducer,
    RequirementText,
    RunEnd,
    Table,
    TestResult,
    foreign,
)
from harness.safe_io.shown import printable
from harness.subjects import TORCH

_OTHER = "(other)"
"""The row of tests that have no stack."""
_NO_LEVEL = (
    "no bundle of this run shows a level, since `concord verify` can't tell what these plug-ins change: run without "
    "them, by -p no:NAME or in an environment that lacks them"
)
_COLUMN = {
    "failed": "red",
    "crashed": "red",
    "hung": "red",
    "flaky": "red",
    "passed": "green",
    "unsupported": "yellow",
    "waived": "yellow",
}


def verdict_of(
    outcomes: Mapping[str, str], properties: Mapping[str, str], reason: str, lost: bool, cause: Cause | None = None
) -> str:
    """Return a test's verdict from its phases.

    ``outcomes``: phase (setup, call, teardown) to pytest's outcome. ``properties``: what the plug-in noted on the test.
    ``reason``: of a skip. ``lost``: whether the worker that ran it died. ``cause``: what the skip carried. Without
    one, a skip is unsupported if its author wrote so at the beginning of the reason.
    """
    if lost:
        return "crashed"
    if "failed" in outcomes.values():
        return properties.get("verdict", "failed")
    if properties.get("waived"):
        return "waived"
    if "skipped" in outcomes.values():
        return "unsupported" if cause is not None or reason.startswith(UNSUPPORTED) else "not-run"
    return "passed" if outcomes.get("call") == "passed" else "not-run"


@dataclass
class Told:
    """What the reports of one attempt at a test have said so far."""

    attempt: int = 1
    """Its number, as counted by the process that runs the test (:mod:`harness.plugin.attempts`)."""
    outcomes: dict[str, str] = field(default_factory=dict)
    """pytest's outcome of each phase (setup, call, teardown)."""
    properties: dict[str, str] = field(default_factory=dict)
    """What the plug-in noted."""
    seconds: float = 0.0
    waited: float = 0.0
    """Seconds for which it waited for devices. They are not part of ``seconds``."""
    reason: str = ""
    """Why it was skipped, or is expected to fail."""
    cause: Cause | None = None
    """Why it is unsupported, if its skip said so."""
    message: str = ""
    """The message of the first failure."""
    ranks: list[dict[str, Any]] = field(default_factory=list)
    lost: bool = False
    """Whether the process that ran it died."""
    text: str = ""
    """The text of the first failure, as pytest shows it."""
    facts: dict[str, Any] = field(default_factory=dict)
    """The facts of :mod:`harness.plugin.facts`."""
    reproducer: dict[str, Any] | None = None
    cases: dict[str, Any] | None = None
    """The cases that a property drew (:mod:`harness.plugin.cases`)."""
    tried: list[Any] = field(default_factory=list)
    """The cases that it executed, as plain data (:meth:`harness.executed.Executed.plain`)."""
    issued: list[Any] | None = None
    """The collectives that its ranks issued (:class:`harness.results.Issued`), as plain data."""

    def add(self, report: pytest.TestReport) -> None:
        """Add the report of one more phase."""
        self.outcomes[str(report.when)] = "failed" if ended_badly(report) else report.outcome
        self.seconds += getattr(report, "duration", 0.0)
        self.waited += getattr(report, "concord_waited", 0.0)
        self.ranks = getattr(report, "concord_ranks", self.ranks)
        self.facts = getattr(report, "concord_facts", self.facts)
        self.reproducer = getattr(report, "concord_reproducer", self.reproducer)
        self.cases = getattr(report, "concord_cases", self.cases)
        self.tried = getattr(report, "concord_tried", self.tried)
        self.issued = getattr(report, "concord_issued", self.issued)
        cause: dict[str, Any] | None = getattr(report, "concord_cause", None)
        if cause is not None:
            self.cause = msgspec.convert(cause, Cause)
        for key, value in report.user_properties:
            if key.startswith("concord."):
                self.properties[key.removeprefix("concord.")] = str(value)
        if report.skipped and isinstance(report.longrepr, tuple):
            self.reason = str(report.longrepr[2]).removeprefix("Skipped: ")
        if report.skipped and hasattr(report, "wasxfail"):
            self.properties["waived"] = "xfail"
            self.reason = str(report.wasxfail)
        self.lost = report.when not in ("setup", "call", "teardown")
        if (ended_badly(report) or hasattr(report, "wasxfail")) and not self.message:
            self.text, self.message = facts.text_of(report), facts.message_of(report)

    def learn(self, bad: Mapping[str, Any]) -> None:
        """Add a failed phase that no report mentions (:mod:`harness.plugin.attempts`)."""
        self.outcomes[bad["when"]] = "failed"
        self.properties.update(verdict=bad["verdict"], headline=bad["headline"])
        self.text, self.message = bad["text"], bad["headline"]
        self.ranks, self.reproducer = bad["ranks"], bad["reproducer"]

    @property
    def headline(self) -> str:
        """What is wrong, according to the ranks' failure or else the exception."""
        return self.properties.get("headline", self.message)

    @property
    def verdict(self) -> str:
        """The test's verdict, if no more reports follow."""
        return verdict_of(self.outcomes, self.properties, self.reason, self.lost, self.cause)


class Summary:
    """Collects reports in the process that prints them."""

    def __init__(self, config: pytest.Config, profiles: Profiles, seeds: Seeds, loaded: Loaded) -> None:
        self.config = config
        self.loaded = loaded
        self.profiles = profiles
        self.seeds = seeds
        self.writer: results.Writer | None = None
        self.lost = False
        """Whether the file could not be written."""
        self.results: dict[str, TestResult] = {}
        self.attempts: dict[str, list[TestResult]] = {}
        self._open: dict[tuple[str, str], Told] = {}
        """Attempts that have not ended, by node id and worker."""
        self._facts: dict[str, dict[str, Any]] = {}
        self._used_worlds = False
        self._requirements: set[str] = set()
        self._table = Table()
        self._environment: dict[str, str] = {}
        self._profile_told = False

    # collecting

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if not self.config.option.collectonly:
            self._collected([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        self._collected(ids)

    def _collected(self, nodeids: Iterable[str]) -> None:
        new = [n for n in nodeids if n not in self.results]
        if not new:
            return
        for nodeid in new:
            self.results[nodeid] = TestResult(nodeid=nodeid, verdict="not-run", stack=stack_of(nodeid))
        self._write(Collected(new))

    def _write(self, record: results.Record) -> None:
        """Write a record. If that fails, the run continues without the file."""
        if self.lost:
            return
        try:
            if self.writer is None:
                folder = folder_of(self.config)
                if folder is None:
                    return
                self.writer = results.Writer(folder / "results.jsonl")
                self.writer.write(self._header())
            self.writer.write(record)
        except OSError as e:
            self._lost(e)

    def _lost(self, error: OSError) -> None:
        """Continue without the file. It keeps what it has, but without its last line no level can rest on it."""
        self.lost = True
        lose(self.config, str(self.writer.path if self.writer is not None else "results.jsonl"), error)
        if self.writer is not None:
            self.writer.abandon()

    def _header(self) -> results.RunHeader:
        return results.header(
            self.config.invocation_params.args,
            *self.profiles.described(),
            subject=self.config.getoption("subject"),
            concord=harness.__version__,
            suite_hash=suite_hash(self.config.rootpath),
            seed=self.seeds.seed,
            seed_drawn=self.seeds.drawn,
            challenge=self.seeds.challenge,
            effort=facts.share_of_examples(),
            faults=list(self.config.getoption("fault")),
            plugins=self.loaded.plugins(),
        )

    def _tell_profile(self) -> None:
        """Write the profile as soon as it is known."""
        profile = None if self._profile_told else facts.profile_text(self.profiles, self.config.getoption("subject"))
        if profile is not None:
            self._profile_told = True
            self._write(profile)

    # results

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        key = report.nodeid, _worker_of(report)
        unsaid: list[dict[str, Any]] = getattr(report, "concord_unsaid", [])
        number = getattr(report, "concord_attempt", self._attempt_by_phase(key, str(report.when)))
        for bad in unsaid:
            if bad["attempt"] != number:
                self._attempt(key, bad["attempt"]).learn(bad)
        told = self._attempt(key, number)
        told.add(report)
        for bad in reversed(unsaid):  # in reverse, so that the first failure is the one reported
            if bad["attempt"] == number:
                told.learn(bad)
        if report.when == "teardown" or told.lost:
            self._finished(report.nodeid, self._open.pop(key))

    def _attempt_by_phase(self, key: tuple[str, str], when: str) -> int:
        """Return which attempt the report of a phase is about, if the report does not say so."""
        told = self._open.get(key, Told())
        return told.attempt + (when in told.outcomes or (when == "setup" and bool(told.outcomes)))

    def _attempt(self, key: tuple[str, str], number: int) -> Told:
        """Return what is known of an attempt. An earlier attempt that is still open has ended unreported."""
        if key in self._open and self._open[key].attempt != number:
            self._finished(key[0], self._open.pop(key))
        return self._open.setdefault(key, Told(attempt=number))

    def _finished(self, nodeid: str, told: Told) -> None:
        properties = told.properties
        verdict = told.verdict
        failed = verdict in BAD or verdict == "waived"
        cause = told.cause if verdict == "unsupported" else None
        about = told.facts or self._facts.get(nodeid, {})
        self._facts[nodeid] = about
        world = about.get("world")
        self._used_worlds |= world is not None
        before = self.attempts.setdefault(nodeid, [])
        for told_of in about.get("requirements", ()):
            if told_of["id"] not in self._requirements:
                self._requirements.add(told_of["id"])
                self._write(msgspec.convert(told_of, RequirementText))
        self._tell_profile()
        tried, new = self._table.refer(told.tried)
        if new:
            self._write(Cases(new))
        result = TestResult(
            nodeid=nodeid,
            verdict=verdict,
            attempt=len(before) + 1,
            stack=stack_of(nodeid),
            requirements=[r for r in properties.get("requirements", "").split(",") if r],
            world=msgspec.convert(world, GivenWorld | None),
            seconds=round(told.seconds, 4),
            waited=round(told.waited, 4),
            reason=told.reason if cause is None else f"{UNSUPPORTED}{cause}",
            cause=cause,
            headline=told.headline.split("\n")[0] if failed else "",
            ranks=[RankEvidence(**r) for r in told.ranks] if failed else [],
            size=about.get("size", 0),
            dtype=about.get("dtype", ""),
            property_based=about.get("property_based", False),
            bare=properties.get("verdict", "failed") if verdict == "waived" else "",
            waiver=properties.get("waived", "") if verdict == "waived" else "",
            cases=msgspec.convert(told.cases, CasesDrawn | None) if verdict == "passed" else None,
            tried=tried,
            issued=msgspec.convert(told.issued, Issued | None),
            finished=round(time.time(), 3),
            text=told.text if failed and not told.ranks else "",
            reproducer=msgspec.convert(told.reproducer, Reproducer) if failed and told.reproducer else None,
        )
        before.append(result)
        self.results[nodeid] = results.merged(before)
        self._write(result)

    # the end

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        output: dict[str, Any] = getattr(node, "workeroutput", {})
        facts.merge(self._environment, output.get("concord_environment", {}))
        self.config.stash.setdefault(LOST, []).extend(output.get("concord_lost", ()))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.writer is not None and not self.lost:
            self._end(session)
        if self.config.stash.get(LOST, None) and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _end(self, session: pytest.Session) -> None:
        assert self.writer is not None
        for (nodeid, _), told in [*self._open.items()]:  # a plug-in has run the test again, and not reported its end
            if told.verdict in BAD:
                self._finished(nodeid, told)
        flaky = any(test.verdict == "flaky" for test in self.results.values())
        if (flaky or self.config.stash.get(LOST, None)) and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        self._tell_profile()
        about: Any = self.config.pluginmanager.get_plugin("concord-facts")
        waivers: Any = self.config.pluginmanager.get_plugin("concord-waivers")
        whole, left_out = facts.selection(self.config, self.results, waivers.left_out)
        name, digest = self.profiles.described()
        verdicts = [test.verdict for test in self.results.values()]
        self._write(
            RunEnd(
                time.time(),
                int(session.exitstatus),
                name,
                digest,
                environment={**about.environment(), **self._environment},
                whole=whole,
                left_out=left_out,
                lost=self.config.stash.get(LOST, []),
                counts={v: verdicts.count(v) for v in VERDICTS if v in verdicts},
                plugins=self.loaded.plugins(),
                files=self.loaded.files(),
                digest=self.writer.digest,
            )
        )
        if self.lost:
            return
        try:
            self.writer.close()
        except OSError as e:
            self._lost(e)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for lost in self.config.stash.get(LOST, ()):
            terminalreporter.write_line(f"not kept whole: {lost}", red=True)
        counts = counts_by_stack(self.results.values(), others=self._used_worlds)
        if not counts or self.config.option.collectonly:
            return
        if set(counts) == {_OTHER}:  # a project of the user's own has no stacks to tell apart
            row = counts[_OTHER]
            terminalreporter.write_line(f"verdicts: {', '.join(f'{row[v]} {v}' for v in VERDICTS if v in row)}")
        else:
            _write_table(terminalreporter, counts, self.config.getoption("subject"))
        for result in self.results.values():
            if result.verdict in ("crashed", "hung", "flaky") and result.headline:
                attempts = [each.verdict for each in self.attempts[result.nodeid]]
                came_to = f" ({', '.join(attempts)})" if len(attempts) > 1 else ""
                line = f"{result.verdict.upper()} {result.nodeid}{came_to}: {result.headline}"
                terminalreporter.write_line(printable(line))
        if self.writer is not None and not self.lost:
            strange = foreign(self.loaded.plugins())
            for name, where in strange.items():
                line = f"plug-in of neither pytest nor Concord: {name} ({where})"
                terminalreporter.write_line(printable(line), yellow=True)
            if strange:
                terminalreporter.write_line(_NO_LEVEL, yellow=True)
            profile = self.profiles.settled
            if profile is not None and profile.never_run:
                terminalreporter.write_line(f"profile {profile.name}: {NEVER_RUN}", yellow=True)
            terminalreporter.write_line(f"results: {_shown(self.writer.path, self.config.rootpath)}")


def _worker_of(report: Any) -> str:
    """Return the pytest-xdist worker that ran the test of a report; empty without one."""
    return str(getattr(getattr(getattr(report, "node", None), "gateway", None), "id", ""))


def _write_table(terminalreporter: Any, counts: Mapping[str, Mapping[str, int]], subject: str) -> None:
    of_subject = "" if subject == TORCH else f", subject {subject}"
    terminalreporter.section(f"verdicts by stack{of_subject}", sep="-")
    width = max(len("stack"), *map(len, counts))
    terminalreporter.write_line("  ".join([f"{'stack':<{width}}", *(f"{v:>{len(v)}}" for v in VERDICTS)]), bold=True)
    for stack, row in counts.items():
        terminalreporter.write(f"{stack:<{width}}")
        for verdict in VERDICTS:
            count = row.get(verdict, 0)
            markup = {_COLUMN[verdict]: True} if count and verdict in _COLUMN else {}
            terminalreporter.write("  ")
            terminalreporter.write(f"{count or '.':>{len(verdict)}}", **markup)
        terminalreporter.write_line("")


def _shown(path: Path, root: Path) -> str:
    try:
        return str(path.relative_to(root))
    except ValueError:
        return str(path)


def counts_by_stack(tests: Iterable[TestResult], *, others: bool) -> dict[str, dict[str, int]]:
    """Return how many tests of each stack have each verdict. ``others``: whether to count tests without a stack."""
    counts: dict[str, dict[str, int]] = {}
    for test in tests:
        if test.stack or others:
            row = counts.setdefault(test.stack or _OTHER, {})
            row[test.verdict] = row.get(test.verdict, 0) + 1
    return counts
