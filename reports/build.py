"""The construction of a report from runs: it reads their results and merges them by test and requirement."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import results
from harness.results import ResultsError, Run, TestResult, WaiverEntry
from harness.safe_io.files import FileError, contents
from harness.safe_io.untrusted import Allowance
from reports import levels, minimums
from reports.cases import cases_of
from reports.model import (
    ORDER,
    UNDECLARED,
    AttemptReport,
    Cell,
    Report,
    ReportError,
    RequirementReport,
    RunReport,
    TestReport,
    WaiverReport,
    counted,
    worst,
)
from reports.next_step import steps

FILE = "results.jsonl"
LARGEST = 1 << 30
"""The largest results file that is read, in bytes.  If all tests fail with all the evidence that ranks can give, it has
a tenth of that size."""
DID_NOT_RUN = ("unsupported", "not-run")
"""Verdicts of results whose test ran nothing."""
MAY_DIFFER = ("variable CONCORD_", "variable PYTEST_ADDOPTS", "memory")
"""The beginnings of environment keys that may differ between the runs of a report."""


def load(path: Path) -> tuple[str, bytes]:
    """Load the name and content of a run from a results file or the folder that has one.

    Errors: :class:`ReportError`.
    """
    file = path / FILE if path.is_dir() else path
    try:
        return (file.parent.name if file.name == FILE else file.stem) or file.name, contents(file, LARGEST)
    except FileError as e:
        raise ReportError(f"{e}; a run is a {FILE}, or the folder that has it") from None


@dataclass(frozen=True)
class Parsed:
    """A run with its name and digest."""

    name: str
    digest: str
    """The SHA-256 of its results file."""
    run: Run


def build(files: Sequence[tuple[str, bytes]]) -> Report:
    """Build the report of some runs, ordered by their start.

    ``files``: the name of each run and the content of its results file.
    Errors: :class:`ReportError` if there is no run, a run is given twice, or one cannot be read.
    """
    return made_of(ordered([parsed(name, data) for name, data in files]))


def parsed(name: str, data: bytes, allowance: Allowance | None = None) -> Parsed:
    """Parse a run; ``allowance``: how much of it may be read.  Errors: :class:`ReportError`."""
    try:
        return Parsed(name, hashlib.sha256(data).hexdigest(), results.parse(data, name, allowance))
    except ResultsError as e:
        raise ReportError(str(e)) from None


def ordered(read: Sequence[Parsed]) -> list[Parsed]:
    """Sort runs by their start.  Errors: :class:`ReportError` for no run, or for a run that is given twice."""
    if not read:
        raise ReportError("no run was given")
    if len({each.digest for each in read}) < len(read):
        raise ReportError("the same run was given twice")
    return sorted(read, key=lambda each: (each.run.header.started, each.digest))


def made_of(read: Sequence[Parsed], wrong: Sequence[str] = ()) -> Report:
    """Make the report of runs, in their order; ``wrong``: further problems, with which no level is conformant."""
    names, runs = [(each.name, each.digest) for each in read], [each.run for each in read]
    profile = next((run.profile for run in runs if run.profile is not None), None)
    entries = {waiver.place: waiver for waiver in profile.waivers} if profile else {}
    tests = _tests(runs, entries)
    requirements = _requirements(runs, tests)
    first = runs[0].header
    problems = [*levels.problems(runs, differences(runs)), *wrong]
    least = minimums.shipped()
    judged = levels.levels(runs, requirements, tests, problems, least)
    return Report(
        concord=first.concord,
        made=max(run.end.finished if run.end else run.header.started for run in runs),
        profile=first.profile,
        profile_hash=first.profile_hash,
        backend=profile.backend if profile else "",
        device=profile.device if profile else "",
        about=profile.about if profile else "",
        never_run=profile.never_run if profile else False,
        claims=dict(profile.claims) if profile else {},
        subject=first.subject,
        suite_hash=first.suite_hash,
        environment=dict(first.environment),
        conformant=levels.highest(judged),
        levels_version=least.version,
        steps=[] if wrong else steps(runs, judged, least),
        problems=problems,
        levels=judged,
        counts=counted([test.verdict for test in tests]),
        runs=[_run(name, digest, run) for (name, digest), run in zip(names, runs, strict=True)],
        waivers=_waivers(entries, tests),
        owners=dict(Counter(test.owner for test in tests if test.owner).most_common()),
        requirements=requirements,
        tests=tests,
        matrix=_matrix(tests),
        cases=cases_of(runs, tests),
    )


def differences(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Return what all runs of a report must have in common and do not, with the values in the order of the runs."""
    headers = [run.header for run in runs]
    alike = {
        "the suite (its hash)": [h.suite_hash[:12] for h in headers],
        "the profile": [f"{h.profile} {h.profile_hash[:12]}".strip() for h in headers],
        "the subject": [h.subject for h in headers],
        "the version of Concord": [h.concord for h in headers],
    }
    for key in dict.fromkeys(key for h in headers for key in h.environment if not key.startswith(MAY_DIFFER)):
        alike[f"the environment ({key})"] = [h.environment.get(key, "") for h in headers]
    return {what: list(dict.fromkeys(values)) for what, values in alike.items() if len(set(values)) > 1}


def shown_verdict(test: TestResult) -> str:
    """Return a test's verdict as reports name it."""
    return UNDECLARED if test.undeclared else test.verdict if test.verdict in ORDER else "not-run"


def _tests(runs: Sequence[Run], waivers: Mapping[str, WaiverEntry]) -> list[TestReport]:
    merged = []
    for nodeid in sorted({nodeid for run in runs for nodeid in run.tests}):
        of_runs = [run.tests.get(nodeid) for run in runs]
        verdicts = [shown_verdict(test) if test is not None else "" for test in of_runs]
        number = min((i for i, v in enumerate(verdicts) if v), key=lambda i: ORDER.index(verdicts[i]))
        test = of_runs[number]
        assert test is not None
        waiver = waivers.get(test.waiver) if verdicts[number] == "waived" else None
        merged.append(
            TestReport(
                nodeid=nodeid,
                verdict=verdicts[number],
                verdicts=verdicts,
                stack=test.stack,
                requirements=next((t.requirements for t in of_runs if t is not None and t.requirements), []),
                world=str(test.world or ""),
                size=test.size,
                sizes=_drawn_from(of_runs),
                dtype=test.dtype,
                seconds=test.seconds,
                reason=test.reason,
                headline=test.headline,
                waiver=test.waiver,
                owner=waiver.owner if waiver else "",
                defect=waiver.defect if waiver else "",
                bare=test.bare,
                run=number,
                ranks=test.ranks,
                text=test.text,
                reproducer=test.reproducer,
                attempts=[_attempt(each) for each in runs[number].attempts.get(nodeid, ())],
            )
        )
    return merged


def _drawn_from(of_runs: Sequence[TestResult | None]) -> list[int]:
    """Return the sizes of worlds from which a test drew, of the run with the smallest largest; empty if it did not.

    Older results have only the largest of these sizes, which is less than the test asks for if not every size fitted.
    """
    drawn = [
        list(test.world.sizes) or ([test.world.ranks] if test.world.ranks < test.size else [])
        for test in of_runs
        if test is not None and test.world is not None and test.verdict not in DID_NOT_RUN
    ]
    return min((sizes for sizes in drawn if sizes), key=max, default=[])


def _attempt(test: TestResult) -> AttemptReport:
    return AttemptReport(
        verdict=shown_verdict(test),
        seconds=test.seconds,
        reason=test.reason,
        headline=test.headline,
        ranks=test.ranks,
        text=test.text,
        reproducer=test.reproducer,
    )


def _requirements(runs: Sequence[Run], tests: Sequence[TestReport]) -> list[RequirementReport]:
    texts = {text.id: text for run in reversed(runs) for text in run.requirements.values()}
    of: dict[str, list[TestReport]] = {each: [] for each in texts}
    for test in tests:
        for each in test.requirements:
            of.setdefault(each, []).append(test)
    merged = []
    for each, proving in sorted(of.items()):
        text = texts.get(each)
        verdicts = [test.verdict for test in proving]
        merged.append(
            RequirementReport(
                id=each,
                sentence=text.sentence if text else "",
                source=text.source if text else "",
                level=text.level if text else "",
                mandatory=text.mandatory if text else True,
                verdict=worst(verdicts),
                counts=counted(verdicts),
                tests=[test.nodeid for test in proving],
            )
        )
    return merged


def _run(name: str, digest: str, run: Run) -> RunReport:
    header, end = run.header, run.end
    return RunReport(
        name=name,
        sha256=digest,
        started=header.started,
        finished=end.finished if end else 0.0,
        complete=run.complete,
        seed=header.seed,
        seed_drawn=header.seed_drawn,
        exit_status=run.exit_status,
        arguments=header.arguments,
        effort=header.effort,
        faults=header.faults,
        whole=end.whole if end else [],
        partial=list(map(str, end.left_out)) if end else [],
        counts=counted([shown_verdict(test) for test in run.tests.values()]),
        foreign=results.foreign({**header.plugins, **(end.plugins if end else {})}),
    )


def _waivers(entries: Mapping[str, WaiverEntry], tests: Sequence[TestReport]) -> list[WaiverReport]:
    used: dict[str, list[TestReport]] = {}
    for test in tests:
        if test.verdict == "waived":
            used.setdefault(test.waiver, []).append(test)
    used_waivers = []
    for place, waived in used.items():
        entry = entries.get(place)
        used_waivers.append(
            WaiverReport(
                place=place,
                reason=entry.reason if entry else waived[0].reason,
                link=entry.link if entry else "",
                expires=entry.expires if entry else "",
                intermittent=entry.intermittent if entry else False,
                tests=[test.nodeid for test in waived],
                owner=entry.owner if entry else "",
                defect=entry.defect if entry else "",
            )
        )
    order: Mapping[str, int] = {place: i for i, place in enumerate(entries)}
    return sorted(used_waivers, key=lambda waiver: (order.get(waiver.place, len(order)), waiver.place))


def _matrix(tests: Sequence[TestReport]) -> list[Cell]:
    cells: dict[tuple[str, str, int], list[str]] = {}
    for test in tests:
        if test.stack:
            cells.setdefault((test.stack, test.dtype, test.most_ranks), []).append(test.verdict)
    return [Cell(stack=s, dtype=d, size=n, counts=counted(v)) for (s, d, n), v in sorted(cells.items())]
