"""The decision whether a backend is conformant at each level, with a sentence for every reason against it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from harness.requirements import LEVELS
from harness.results import BAD, DEFAULT_SEED, Run, TestResult
from reports.model import FINE, ORDER, UNDECLARED, LevelReport, RequirementReport, TestReport, counted
from reports.text import plural

_SHOWN = 3
_NOT_TO_ITS_END = (2, 3, 4)
"""Exit statuses of pytest: interrupted, internal error, usage error."""
_SAYS_WHAT_DRAWS = 3
"""Since this version, results say which tests draw from the seed; in older ones, any test may."""


def levels(
    runs: Sequence[Run],
    requirements: Iterable[RequirementReport],
    tests: Sequence[TestReport],
    problems: Sequence[str],
) -> list[LevelReport]:
    """Judge every level, lowest first.

    A level is conformant if

    - each of its mandatory requirements is passed, waived or unsupported, and at least one is not unsupported;
    - all tests of its stack were run with the default seed, and those that draw from the seed with a random one, too;
    - the levels below it are conformant (P is independent of the others);
    - the runs have no ``problems``.
    """
    judged: list[LevelReport] = []
    below = ""
    requirements = list(requirements)
    verdicts = {test.nodeid: test.verdict for test in tests}
    for level, stack in LEVELS.items():
        mine = [r for r in requirements if r.level == level]
        of_stack = [t for t in tests if t.stack == stack]
        why = [*problems, *_seeds(runs, stack), *_requirements(mine, level, verdicts), *_without_requirement(of_stack)]
        if below and level != "P":
            why.append(f"{below}, on which {level} stands, is not conformant.")
        drawing = [t for t in of_stack if t.sizes]
        drawn = Counter(size for t in drawing for size in t.sizes)
        report = LevelReport(
            id=level,
            stack=stack,
            conformant=not why,
            why_not=why,
            requirements=counted([r.verdict for r in mine]),
            tests=counted([t.verdict for t in of_stack]),
            drawn={str(size): drawn[size] for size in sorted(drawn)},
            notes=_smaller(drawing),
        )
        judged.append(report)
        below = "" if report.conformant else level
    return judged


def highest(levels: Iterable[LevelReport]) -> str:
    """Return the highest conformant level of L1 to L5; empty if there is none."""
    return max((level.id for level in levels if level.conformant and level.id != "P"), default="")


def problems(runs: Sequence[Run], differences: Mapping[str, Sequence[str]]) -> list[str]:
    """Describe the problems of the runs as a whole.

    ``differences``: what all runs must have in common and do not, with its values.
    """
    lines = []
    for number, run in enumerate(runs, 1):
        name = f"Run {number}" if len(runs) > 1 else "The run"
        if not run.complete:
            lines.append(f"{name} was cut off before its end.")
        if run.damaged or run.torn:
            lines.append(f"{name} is not as it was written: {run.damaged or 'its last line is torn'}.")
        if run.header.version < 2:
            lines.append(f"{name} is a file of version {run.header.version}, which says neither seed nor selection.")
        if run.header.faults:
            lines.append(f"{name} had defects put into its ranks on purpose: {', '.join(run.header.faults)}.")
        if run.header.effort < 1:
            lines.append(f"{name} drew fewer examples than suites say (CONCORD_EXAMPLES is {run.header.effort:g}).")
        if not run.header.profile:
            lines.append(f"{name} went by no profile, so that nothing is claimed.")
        if run.complete and run.exit_status in _NOT_TO_ITS_END:
            lines.append(f"{name} did not come to its end (exit status {run.exit_status} of pytest).")
        lines += _elsewhere(name, run)
    for what, values in differences.items():
        lines.append(f"The runs differ in {what}: {' and '.join(v or 'none' for v in values)}.")
    return lines


def _elsewhere(name: str, run: Run) -> list[str]:
    """Find worlds of suites whose backend or device is not the profile's."""
    profile = run.profile
    if profile is None or not profile.backend:
        return []
    worlds = [t.world for t in run.tests.values() if t.stack and t.world and t.verdict != "unsupported"]
    others = sorted({(world.backend, world.device) for world in worlds} - {(profile.backend, profile.device)})
    about = f"its profile is about {profile.backend} on {profile.device}"
    return [f"{name} had worlds of {backend} on {device}, and {about}." for backend, device in others]


def _seeds(runs: Sequence[Run], stack: str) -> list[str]:
    """Find what is missing: a run of all tests of a stack, its default seed, or a random seed."""
    whole = [run for run in runs if run.end is not None and stack in run.end.whole]
    if not whole:
        asked = any(test.stack == stack for run in runs for test in run.tests.values())
        reasons = list(dict.fromkeys(str(r) for run in runs if run.end is not None for r in run.end.left_out))
        why = f" ({'; '.join(reasons)})" if asked and reasons else ""
        return [f"Not all tests of {stack} were run{why}." if asked else f"No test of {stack} was run."]
    sentences = []
    if not any(run.header.seed == DEFAULT_SEED for run in whole):
        sentences.append(f"No run of all tests of {stack} has the default seed.")
    drawing = {
        nodeid for run in whole for nodeid, test in run.tests.items() if test.stack == stack and _draws(run, test)
    }
    if drawing and not any(run.header.seed_drawn and drawing <= run.collected for run in runs):
        what = f"all tests of {stack} that draw from the seed"
        sentences.append(f"No run of {what} has one drawn at random (--concord-seed random -m property_based).")
    return sentences


def _draws(run: Run, test: TestResult) -> bool:
    return test.property_based or run.header.version < _SAYS_WHAT_DRAWS


def _requirements(requirements: Sequence[RequirementReport], level: str, verdicts: Mapping[str, str]) -> list[str]:
    mandatory = [r for r in requirements if r.mandatory]
    sentences = [_sentence(r, verdicts) for r in mandatory if r.verdict not in FINE]
    if mandatory and not any(r.verdict in ("passed", "waived", *BAD) for r in mandatory):
        sentences.append(f"No requirement of {level} was passed.")
    return sentences


def _sentence(requirement: RequirementReport, verdicts: Mapping[str, str]) -> str:
    """Describe the verdicts of a requirement's tests, and name the first of its worst tests.

    ``verdicts``: those of all tests, by node id.
    """
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


def _smaller(drawing: Sequence[TestReport]) -> list[str]:
    """Say how many tests that draw their worlds had only smaller ones than they ask for; empty if none."""
    few = [t for t in drawing if t.most_ranks < t.size]
    if not few:
        return []
    most, asked = max(t.most_ranks for t in few), max(t.size for t in few)
    alone = " alone, where nothing is communicated" if most == 1 else ""
    had = f"had worlds of at most {plural(most, 'rank')}{alone}; they ask for up to {asked}"
    return [f"{len(few)} of {plural(len(drawing), 'test')} that draw their worlds {had}."]


def _without_requirement(tests: Sequence[TestReport]) -> list[str]:
    """Describe tests without requirements that ended badly or did not run.

    A test that never began is one of them, because it is unknown what it proves.
    """
    alone = [t for t in tests if not t.requirements]
    sentences = []
    bad = [t.nodeid for t in alone if t.verdict in BAD]
    if bad:
        more = f" and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
        sentences.append(f"Tests that prove no requirement failed: {', '.join(bad[:_SHOWN])}{more}.")
    idle = sum(t.verdict == "not-run" for t in alone)
    if idle:
        sentences.append(
            f"{idle} test{'s' if idle != 1 else ''} that should have been run {'were' if idle != 1 else 'was'} not."
        )
    return sentences
