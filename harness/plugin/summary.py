"""Verdicts of a run: written to the results file as they come, counted by stack at the end."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from harness import results
from harness.plugin.profiles import Profiles
from harness.results import BAD, VERDICTS, Collected, RankEvidence, RunEnd, TestResult, stack_of
from harness.subjects import TORCH

_OTHER = "(other)"
"""Where tests of no stack are counted."""
_COLUMN = {
    "failed": "red",
    "crashed": "red",
    "hung": "red",
    "passed": "green",
    "unsupported": "yellow",
    "waived": "yellow",
}


def verdict_of(outcomes: Mapping[str, str], properties: Mapping[str, str], reason: str, lost: bool) -> str:
    """A test's verdict from its phases.

    ``outcomes``: phase (setup, call, teardown) to pytest's outcome; ``properties``: what the plug-in noted on it;
    ``reason``: of a skip; ``lost``: whether the worker that ran it died.
    """
    if lost:
        return "crashed"
    if "failed" in outcomes.values():
        return properties.get("verdict", "failed")
    if properties.get("waived"):
        return "waived"
    if "skipped" in outcomes.values():
        return "unsupported" if reason.startswith("unsupported: ") else "not-run"
    return "passed" if outcomes.get("call") == "passed" else "not-run"


def merged(old: TestResult | None, new: TestResult) -> TestResult:
    """What stays of two results of one test (a rerun): the later one."""
    return new if old is None or new.verdict != "not-run" else old


@dataclass
class Told:
    """What the reports of one test have said so far."""

    outcomes: dict[str, str] = field(default_factory=dict)
    """Of each phase (setup, call, teardown)."""
    properties: dict[str, str] = field(default_factory=dict)
    """What the plug-in noted."""
    seconds: float = 0.0
    reason: str = ""
    """Why it was skipped, or is expected to fail."""
    message: str = ""
    """Of what failed first."""
    ranks: list[dict[str, Any]] = field(default_factory=list)
    lost: bool = False
    """Whether the process that ran it died."""

    def add(self, report: pytest.TestReport) -> None:
        """Listen to the report of one more phase."""
        self.outcomes[str(report.when)] = report.outcome
        self.seconds += getattr(report, "duration", 0.0)
        self.ranks = getattr(report, "concord_ranks", self.ranks)
        for key, value in report.user_properties:
            if key.startswith("concord."):
                self.properties[key.removeprefix("concord.")] = str(value)
        if report.skipped and isinstance(report.longrepr, tuple):
            self.reason = str(report.longrepr[2]).removeprefix("Skipped: ")
        if report.skipped and hasattr(report, "wasxfail"):
            self.properties["waived"] = "xfail"
            self.reason = str(report.wasxfail)
        self.lost = report.when not in ("setup", "call", "teardown")
        if (report.failed or hasattr(report, "wasxfail")) and not self.message:
            crash = getattr(report.longrepr, "reprcrash", None)
            self.message = str(getattr(crash, "message", report.longrepr or "")).strip()

    @property
    def headline(self) -> str:
        """What is wrong: as the ranks' failure says it, or as the exception does."""
        return self.properties.get("headline", self.message)

    @property
    def verdict(self) -> str:
        """The test's, if there is nothing more to be told."""
        return verdict_of(self.outcomes, self.properties, self.reason, self.lost)


class Summary:
    """Listens to reports in the process that prints them."""

    def __init__(self, config: pytest.Config, profiles: Profiles) -> None:
        self.config = config
        self.profiles = profiles
        self.writer: results.Writer | None = None
        self.results: dict[str, TestResult] = {}
        self._open: dict[str, Told] = {}
        self._used_worlds = False

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
        if self.writer is None:
            folder = self.config.getoption("concord_results") or self.config.getini("concord_results")
            if not folder:
                return
            name = time.strftime("%Y%m%d-%H%M%S") + f"-{os.getpid()}"
            path = self.config.rootpath / Path(folder) / name / "results.jsonl"
            self.writer = results.Writer(path)
            arguments, subject = self.config.invocation_params.args, self.config.getoption("subject")
            self.writer.write(results.header(arguments, *self.profiles.described(), subject=subject))
        self.writer.write(record)

    # results

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        told = self._open.setdefault(report.nodeid, Told())
        told.add(report)
        if report.when == "teardown" or told.lost:
            self._finished(report.nodeid, self._open.pop(report.nodeid))

    def _finished(self, nodeid: str, told: Told) -> None:
        properties = told.properties
        self._used_worlds |= "world" in properties
        verdict = told.verdict
        failed = verdict in BAD or verdict == "waived"
        result = TestResult(
            nodeid=nodeid,
            verdict=verdict,
            stack=stack_of(nodeid),
            requirements=[r for r in properties.get("requirements", "").split(",") if r],
            world=properties.get("world", ""),
            seconds=round(told.seconds, 4),
            reason=told.reason,
            headline=told.headline.split("\n")[0] if failed else "",
            ranks=[RankEvidence(**r) for r in told.ranks] if failed else [],
        )
        self.results[nodeid] = merged(self.results.get(nodeid), result)
        self._write(result)

    # the end

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.writer is not None:
            self.writer.write(RunEnd(time.time(), int(session.exitstatus), *self.profiles.described()))
            self.writer.close()

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        counts = counts_by_stack(self.results.values(), others=self._used_worlds)
        if not counts or self.config.option.collectonly:
            return
        if set(counts) == {_OTHER}:  # a project of the user's own: there is nothing to tell apart
            row = counts[_OTHER]
            terminalreporter.write_line(f"verdicts: {', '.join(f'{row[v]} {v}' for v in VERDICTS if v in row)}")
        else:
            _write_table(terminalreporter, counts, self.config.getoption("subject"))
        for result in self.results.values():
            if result.verdict in ("crashed", "hung") and result.headline:
                terminalreporter.write_line(f"{result.verdict.upper()} {result.nodeid}: {result.headline}")
        if self.writer is not None:
            terminalreporter.write_line(f"results: {_shown(self.writer.path, self.config.rootpath)}")


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
    """How many tests of each stack came to each verdict; tests of no stack only if ``others``."""
    counts: dict[str, dict[str, int]] = {}
    for test in tests:
        if test.stack or others:
            row = counts.setdefault(test.stack or _OTHER, {})
            row[test.verdict] = row.get(test.verdict, 0) + 1
    return counts
