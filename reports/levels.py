"""The decision whether a backend is conformant at each level, is not, or is not shown to be, with every reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from harness.profiles import Claims
from harness.requirements import LEVELS
from harness.results import BAD, DEFAULT_SEED, Run, TestResult
from reports.by_profile import entitled
from reports.minimums import Minimum, Minimums
from reports.model import (
    CONFORMANT,
    NOT_CONFORMANT,
    NOT_SHOWN,
    ORDER,
    UNDECLARED,
    LevelReport,
    RequirementReport,
    TestReport,
    counted,
)
from reports.shortfall import Evidence, at_most, exceeds, excused, plural_of, shortfalls
from reports.text import listed, plural

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
    minimums: Minimums,
) -> list[LevelReport]:
    """Judge every level, lowest first.

    A level is not conformant if something is wrong (``reds``):

    - a mandatory requirement of it, or a test of its stack without a requirement, ended badly;
    - more of its requirements are waived than may be, for defects that are not PyTorch's own;
    - the level below it is not conformant (P is independent of the others).

    If nothing is wrong, it is not shown as long as something is ``missing``:

    - the runs have ``problems``, or not all tests of its stack were run with the default seed, and those that draw from
      the seed with a random one, too;
    - a mandatory requirement was not run, or none of them passed;
    - the tests fall short of its minimum, or the level below it is not shown.

    If nothing is missing but what falls short, it is ``partial``, with a name that is not the level's.
    """
    requirements, by_name = list(requirements), {test.nodeid: test for test in tests}
    others, claims, illegible = excused(runs, tests), *_claims(runs)
    judged: list[LevelReport] = []
    for level, stack in LEVELS.items():
        mine = [r for r in requirements if r.level == level]
        mandatory, of_stack = [r for r in mine if r.mandatory], [t for t in tests if t.stack == stack]
        minimum = minimums.levels[level]
        counting = [i for i, run in enumerate(runs) if run.header.effort >= minimum.examples] or [*range(len(runs))]
        evidence = Evidence(level, mandatory, by_name, of_stack, others, claims, counting)
        of_pytorch, of_others = evidence.waived()
        reds = [*_failed(mandatory, by_name), *_failed_without_requirement(of_stack)]
        reds += _waived(level, of_others, len(mandatory), minimum)
        missing = [*problems, *_seeds(runs, level, stack, minimum), *_not_run(mandatory, level, by_name)]
        missing += [*_idle_without_requirement(of_stack), *illegible]
        less = [*_undeclared(mandatory), *shortfalls(evidence, minimum)] if of_stack else []
        if judged and level != "P" and judged[-1].answer != CONFORMANT:
            below = judged[-1]
            to_which = reds if below.answer == NOT_CONFORMANT else less if below.partial else missing
            state = "partial" if below.partial else below.answer
            to_which.append(f"{below.id}, on which {level} stands, is {state}.")
        drawing = [t for t in of_stack if t.sizes]
        drawn = Counter(size for t in drawing for size in t.sizes)
        judged.append(
            LevelReport(
                id=level,
                stack=stack,
                answer=NOT_CONFORMANT if reds else NOT_SHOWN if missing or less else CONFORMANT,
                partial=_partial(evidence, minimum) if less and not (reds or missing) else "",
                reds=reds,
                missing=[*missing, *less],
                requirements=counted([r.verdict for r in mine]),
                tests=counted([t.verdict for t in of_stack]),
                waived_of_pytorch=len(of_pytorch),
                waived_of_others=len(of_others),
                may_be_waived=at_most(len(mandatory), minimum.waived),
                drawn={str(size): drawn[size] for size in sorted(drawn)},
                notes=_smaller(drawing),
            )
        )
    return judged


def _claims(runs: Sequence[Run]) -> tuple[Claims | None, list[str]]:
    """Return what the runs' profile claims, and a sentence if it cannot be read."""
    run = next((run for run in runs if run.profile is not None), None)
    if run is None:
        named = any(run.header.profile for run in runs)
        return None, ["What the profile claims is unknown: no run has its text."] if named else []
    by, why = entitled(run)
    return (by.claims, []) if by is not None else (None, [f"What the profile claims is unknown: {why[-1]}."])


def _partial(evidence: Evidence, minimum: Minimum) -> str:
    """Return the name of what falls short of a level, which is not the level's."""
    sizes = evidence.sizes()
    if set(minimum.world_sizes) <= {*sizes}:
        return f"{evidence.level} in part: partial"
    return f"{evidence.level} on {plural_of(sizes)}: partial" if sizes else ""


def highest(levels: Iterable[LevelReport]) -> str:
    """Return the highest conformant level of L1 to L5; empty if there is none."""
    return max((level.id for level in levels if level.answer == CONFORMANT and level.id != "P"), default="")


def problems(runs: Sequence[Run], differences: Mapping[str, Sequence[str]]) -> list[str]:
    """Describe the problems of the runs as a whole.

    ``differences``: what all runs must have in common and do not, with its values.
    """
    lines = []
    for number, run in enumerate(runs, 1):
        lines += unusable(f"Run {number}" if len(runs) > 1 else "The run", run)
    for what, values in differences.items():
        lines.append(f"The runs differ in {what}: {' and '.join(v or 'none' for v in values)}.")
    return lines


def unusable(name: str, run: Run) -> list[str]:
    """Say why a run cannot count for any level; empty if it can.  ``name``: its name in sentences."""
    lines = []
    if not run.complete:
        lines.append(f"{name} was cut off before its end.")
    if run.damaged or run.torn:
        lines.append(f"{name} is not as it was written: {run.damaged or 'its last line is torn'}.")
    if run.header.version < 2:
        lines.append(f"{name} is a file of version {run.header.version}, which says neither seed nor selection.")
    if run.header.faults:
        lines.append(f"{name} had defects put into its ranks on purpose: {', '.join(run.header.faults)}.")
    if not run.header.profile:
        lines.append(f"{name} went by no profile, so that nothing is claimed.")
    if run.complete and run.exit_status in _NOT_TO_ITS_END:
        lines.append(f"{name} did not come to its end (exit status {run.exit_status} of pytest).")
    return [*lines, *_elsewhere(name, run)]


def _elsewhere(name: str, run: Run) -> list[str]:
    """Find worlds of suites whose backend or device is not the profile's."""
    profile = run.profile
    if profile is None or not profile.backend:
        return []
    worlds = [t.world for t in run.tests.values() if t.stack and t.world and t.verdict != "unsupported"]
    others = sorted({(world.backend, world.device) for world in worlds} - {(profile.backend, profile.device)})
    about = f"its profile is about {profile.backend} on {profile.device}"
    return [f"{name} had worlds of {backend} on {device}, and {about}." for backend, device in others]


def _has_tests_of(stack: str, runs: Iterable[Run]) -> bool:
    return any(test.stack == stack for run in runs for test in run.tests.values())


def _seeds(runs: Sequence[Run], level: str, stack: str, minimum: Minimum) -> list[str]:
    """Find what is missing: a run of all tests of a stack, its default seed, or a random seed.

    Runs that drew fewer examples than the level takes do not count.
    """
    counting = [run for run in runs if run.header.effort >= minimum.examples]
    whole = whole_runs(counting, stack)
    if not whole:
        few = [run.header.effort for run in whole_runs(runs, stack)]
        if few:
            takes = f"{level} takes {'all' if minimum.examples == 1 else f'{minimum.examples:g}'} of them"
            return [f"The runs of {stack} drew {max(few):g} of its examples (CONCORD_EXAMPLES), and {takes}."]
        asked = _has_tests_of(stack, counting)
        if not asked and _has_tests_of(stack, runs):
            return [f"Not all tests of {stack} were run, and those with too few of their examples (CONCORD_EXAMPLES)."]
        reasons = list(dict.fromkeys(str(r) for run in counting if run.end is not None for r in run.end.left_out))
        why = f" ({'; '.join(reasons)})" if asked and reasons else ""
        return [f"Not all tests of {stack} were run{why}." if asked else f"No test of {stack} was run."]
    sentences = []
    if not has_default_seed(whole):
        sentences.append(f"No run of all tests of {stack} has the default seed.")
    if not has_drawn_seed(counting, whole, stack):
        what = f"all tests of {stack} that draw from the seed"
        sentences.append(f"No run of {what} has one drawn at random (--concord-seed random -m property_based).")
    return sentences


def whole_runs(runs: Sequence[Run], stack: str) -> list[Run]:
    """Return the runs that have every test of a stack."""
    return [run for run in runs if run.end is not None and stack in run.end.whole]


def has_default_seed(whole: Sequence[Run]) -> bool:
    """Return whether one of the runs has the default seed."""
    return any(run.header.seed == DEFAULT_SEED for run in whole)


def has_drawn_seed(runs: Sequence[Run], whole: Sequence[Run], stack: str) -> bool:
    """Return whether one of the runs drew its seed, and has every test of the stack that draws from the seed."""
    drawing = {n for run in whole for n, test in run.tests.items() if test.stack == stack and _draws(run, test)}
    return not drawing or any(run.header.seed_drawn and drawing <= run.collected for run in runs)


def _draws(run: Run, test: TestResult) -> bool:
    return test.property_based or run.header.version < _SAYS_WHAT_DRAWS


def _failed(mandatory: Sequence[RequirementReport], tests: Mapping[str, TestReport]) -> list[str]:
    return [_sentence(r, tests) for r in mandatory if r.verdict in BAD]


def _not_run(mandatory: Sequence[RequirementReport], level: str, tests: Mapping[str, TestReport]) -> list[str]:
    sentences = [_sentence(r, tests) for r in mandatory if r.verdict == "not-run"]
    if mandatory and not any(r.verdict in ("passed", "waived", *BAD) for r in mandatory):
        sentences.append(f"No requirement of {level} was passed.")
    return sentences


def _undeclared(mandatory: Sequence[RequirementReport]) -> list[str]:
    claims_nothing = "was not run: the profile claims nothing that it is about."
    return [f"{r.id} {claims_nothing}" for r in mandatory if r.verdict == UNDECLARED]


def _waived(level: str, of_others: Sequence[RequirementReport], mandatory: int, minimum: Minimum) -> list[str]:
    if not exceeds(len(of_others), mandatory, minimum.waived):
        return []
    names = listed([r.id for r in of_others[:_SHOWN]], more=len(of_others) - _SHOWN)
    of = plural(mandatory, "mandatory requirement")
    takes = f"and {level} takes at most {at_most(mandatory, minimum.waived)}"
    return [f"{len(of_others)} of {of} are waived for defects that are not PyTorch's own, {takes}: {names}."]


def _sentence(requirement: RequirementReport, tests: Mapping[str, TestReport]) -> str:
    """Describe the verdicts of a requirement's tests, and name the first of its worst tests."""
    counts = requirement.counts
    total = sum(counts.values())
    if not requirement.tests:
        return f"{requirement.id}: no test of it was run."
    says = {"crashed": "crashed", "hung": "hung", "failed": "failed", "flaky": "flaky", "not-run": "not run"}
    parts = [f"{counts[v]} {says[v]}" for v in ORDER if v in says and v in counts]
    first = min(requirement.tests, key=lambda nodeid: ORDER.index(tests[nodeid].verdict))
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


def _failed_without_requirement(tests: Sequence[TestReport]) -> list[str]:
    """Describe tests without requirements that ended badly."""
    bad = [t.nodeid for t in tests if not t.requirements and t.verdict in BAD]
    if not bad:
        return []
    more = f" and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
    return [f"Tests that prove no requirement failed: {', '.join(bad[:_SHOWN])}{more}."]


def _idle_without_requirement(tests: Sequence[TestReport]) -> list[str]:
    """Describe tests without requirements that did not run.

    A test that never began is one of them, because it is unknown what it proves.
    """
    idle = sum(not t.requirements and t.verdict == "not-run" for t in tests)
    if not idle:
        return []
    return [f"{idle} test{'s' if idle != 1 else ''} that should have been run {'were' if idle != 1 else 'was'} not."]
