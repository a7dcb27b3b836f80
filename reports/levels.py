"""Whether a backend is conformant at a level; every way of not being so is one sentence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from harness.requirements import LEVELS
from harness.results import BAD, DEFAULT_SEED, Run, TestResult
from reports.model import FINE, ORDER, UNDECLARED, LevelReport, RequirementReport, TestReport, counted

_SHOWN = 3
_NOT_TO_ITS_END = (2, 3, 4)
"""Exit statuses of pytest: interrupted, an error of its own, or of its use."""
_SAYS_WHAT_DRAWS = 3
"""The version of results from which on they say which tests draw from the seed; before, any of them may."""


def levels(
    runs: Sequence[Run],
    requirements: Iterable[RequirementReport],
    tests: Sequence[TestReport],
    problems: Sequence[str],
) -> list[LevelReport]:
    """Every level, lowest first; ``problems``: what is wrong with the runs, which no level stands.

    A level is conformant when every mandatory requirement of it is passed, waived or unsupported, at least one of them
    is not unsupported, all tests of its stack were run with the default seed, those that draw from it with one drawn
    at random as well, and the levels below are conformant, too.
    """
    found: list[LevelReport] = []
    below = ""
    requirements = list(requirements)
    verdicts = {test.nodeid: test.verdict for test in tests}
    for level, stack in LEVELS.items():
        mine = [r for r in requirements if r.level == level]
        of_stack = [t for t in tests if t.stack == stack]
        why = [*problems, *_seeds(runs, stack), *_requirements(mine, level, verdicts), *_without_requirement(of_stack)]
        if below and level != "P":
            why.append(f"{below}, on which {level} stands, is not conformant.")
        report = LevelReport(
            id=level,
            stack=stack,
            conformant=not why,
            why_not=why,
            requirements=counted([r.verdict for r in mine]),
            tests=counted([t.verdict for t in of_stack]),
        )
        found.append(report)
        below = "" if report.conformant else level
    return found


def highest(levels: Iterable[LevelReport]) -> str:
    """The highest of the levels that stand on each other; empty if not even the first is conformant."""
    return max((level.id for level in levels if level.conformant and level.id != "P"), default="")


def problems(runs: Sequence[Run], differences: Mapping[str, Sequence[str]]) -> list[str]:
    """What is wrong with the runs as such.  ``differences``: of what all runs must have alike, the values in each."""
    found = []
    for number, run in enumerate(runs, 1):
        name = f"Run {number}" if len(runs) > 1 else "The run"
        if not run.complete:
            found.append(f"{name} was cut off before its end.")
        if run.damaged or run.torn:
            found.append(f"{name} is not as it was written: {run.damaged or 'its last line is torn'}.")
        if run.header.version < 2:
            found.append(f"{name} is a file of version {run.header.version}, which says neither seed nor selection.")
        if run.header.faults:
            found.append(f"{name} had defects put into its ranks on purpose: {', '.join(run.header.faults)}.")
        if run.header.effort < 1:
            found.append(f"{name} drew fewer examples than suites say (CONCORD_EXAMPLES is {run.header.effort:g}).")
        if not run.header.profile:
            found.append(f"{name} went by no profile, so that nothing is claimed.")
        if run.complete and run.exit_status in _NOT_TO_ITS_END:
            found.append(f"{name} did not come to its end (exit status {run.exit_status} of pytest).")
        found += _elsewhere(name, run)
    for what, values in differences.items():
        found.append(f"The runs differ in {what}: {' and '.join(v or 'none' for v in values)}.")
    return found


def _elsewhere(name: str, run: Run) -> list[str]:
    """Worlds of suites that are of another backend or device than the profile is about."""
    profile = run.profile
    if profile is None or not profile.backend:
        return []
    about = f"({profile.backend} on {profile.device})"
    ran = {t.world.partition(" (")[2] for t in run.tests.values() if t.stack and t.world and t.verdict != "unsupported"}
    others = sorted(world[:-1] for world in ran - {about[1:]})
    return [f"{name} had worlds of {each}, and its profile is about {about[1:-1]}." for each in others]


def _seeds(runs: Sequence[Run], stack: str) -> list[str]:
    whole = [run for run in runs if run.end is not None and stack in run.end.whole]
    if not whole:
        asked = any(test.stack == stack for run in runs for test in run.tests.values())
        reasons = list(dict.fromkeys(r for run in runs if run.end is not None for r in run.end.partial))
        why = f" ({'; '.join(reasons)})" if asked and reasons else ""
        return [f"Not all tests of {stack} were run{why}." if asked else f"No test of {stack} was run."]
    found = []
    if not any(run.header.seed == DEFAULT_SEED for run in whole):
        found.append(f"No run of all tests of {stack} has the default seed.")
    drawing = {
        nodeid for run in whole for nodeid, test in run.tests.items() if test.stack == stack and _draws(run, test)
    }
    if drawing and not any(run.header.seed_drawn and drawing <= run.collected for run in runs):
        what = f"all tests of {stack} that draw from the seed"
        found.append(f"No run of {what} has one drawn at random (--concord-seed random -m property_based).")
    return found


def _draws(run: Run, test: TestResult) -> bool:
    return test.property_based or run.header.version < _SAYS_WHAT_DRAWS


def _requirements(requirements: Sequence[RequirementReport], level: str, verdicts: Mapping[str, str]) -> list[str]:
    mandatory = [r for r in requirements if r.mandatory]
    found = [_sentence(r, verdicts) for r in mandatory if r.verdict not in FINE]
    if mandatory and not any(r.verdict in ("passed", "waived", *BAD) for r in mandatory):
        found.append(f"No requirement of {level} was passed.")
    return found


def _sentence(requirement: RequirementReport, verdicts: Mapping[str, str]) -> str:
    """What its tests came to, and the first of the worst of them.  ``verdicts``: of tests, by node id."""
    counts = requirement.counts
    total = sum(counts.values())
    if requirement.verdict == UNDECLARED:
        return f"{requirement.id} was not run: the profile claims nothing that it is about."
    if not requirement.tests:
        return f"{requirement.id}: no test of it was run."
    says = {"crashed": "crashed", "hung": "hung", "failed": "failed", "flaky": "flaky", "not-run": "not run"}
    parts = [f"{counts[v]} {says[v]}" for v in ORDER if v in says and v in counts]
    first = min(requirement.tests, key=lambda nodeid: ORDER.index(verdicts[nodeid]))
    return f"{requirement.id}: {' and '.join(parts)} of {total} test{'s' if total != 1 else ''}; first {first}."


def _without_requirement(tests: Sequence[TestReport]) -> list[str]:
    """Of tests that prove nothing, and of those that were never begun, of which nobody knows what they prove."""
    alone = [t for t in tests if not t.requirements]
    found = []
    bad = [t.nodeid for t in alone if t.verdict in BAD]
    if bad:
        more = f" and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
        found.append(f"Tests that prove no requirement failed: {', '.join(bad[:_SHOWN])}{more}.")
    idle = sum(t.verdict == "not-run" for t in alone)
    if idle:
        found.append(
            f"{idle} test{'s' if idle != 1 else ''} that should have been run {'were' if idle != 1 else 'was'} not."
        )
    return found
