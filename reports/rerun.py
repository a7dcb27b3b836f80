"""The comparison of a bundle with a second run of some of its tests, drawn after the bundle was made.

Nothing here runs a test. A bundle cannot know which tests will be drawn, so a lie about k of n results is found with a
probability that follows from counting (:func:`chance`).
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from harness.requirements import stack_of
from harness.results import DEFAULT_SEED, ENDED_BADLY, Run, TestResult, TorchLacks, WaiverEntry
from harness.thorough.effort import EXAMPLES, EffortError, effort
from reports.text import plural
from reports.tried import other_counts, same_cases

RAN = ("passed", "waived", "flaky", *ENDED_BADLY)
"""Verdicts of tests that ran."""
LIES = (1, 2, 5, 10, 20)
"""Numbers of false results, for the table of chances."""
_BADNESS = {"passed": 0, "unsupported": 0, "waived": 1, "failed": 2, "hung": 3, "crashed": 4}
_FINE = ("passed", "waived", "unsupported")
"""Verdicts that keep no level from being conformant."""
_DECIDES = ("torch", "machine", "device", "accelerator", "driver")
"""Facts of the environment that may change verdicts honestly."""
_DRAWS = (*_DECIDES, "python", "hypothesis", "numpy")
"""Facts of the environment that may change which cases are drawn."""
_LARGEST_SEED = 2**32 - 1

SAME, WORSE, BETTER, OTHER = "same", "worse here", "better here", "otherwise here"
OTHER_CASES, OTHER_COUNTS, NOT_COMPARED = "other cases here", "other collectives here", "not compared"
KINDS = (SAME, WORSE, BETTER, OTHER, OTHER_CASES, OTHER_COUNTS, NOT_COMPARED)


@dataclass(frozen=True, order=True)
class Place:
    """A result of a bundle."""

    run: int
    """The index of its run, from 0."""
    nodeid: str


@dataclass(frozen=True)
class Outcome:
    """How a result of a bundle compares with that of the second run."""

    place: Place
    kind: str
    """One of :data:`KINDS`."""
    there: str
    """The verdict in the bundle, for readers."""
    here: str
    """The verdict in the second run; empty if there is none."""
    why: str = ""
    """Why it was not compared, or what differs beside the verdict."""

    @property
    def doubtful(self) -> bool:
        """Whether its cases or collectives are others, or it ended badly here and the results can't be compared."""
        return self.kind in (OTHER_CASES, OTHER_COUNTS) or (
            self.kind == NOT_COMPARED and self.here in (*ENDED_BADLY, "flaky")
        )

    def __str__(self) -> str:
        verdicts = f"{self.there} in the bundle, {self.here} here" if self.here else f"{self.there} in the bundle"
        about = f"runs/{self.place.run + 1}.jsonl, {self.place.nodeid}"
        return f"{about}: {verdicts}{f' ({self.why})' if self.why else ''}"


def population(runs: Sequence[Run], known: Iterable[str]) -> list[Place]:
    """Return every result that a second run may contradict.

    These are the tests that ran, and those that are unsupported for a reason that only the test can know.
    ``known``: the tests that the local suite has.
    """
    there = set(known)
    return sorted(
        Place(number, nodeid)
        for number, run in enumerate(runs)
        for nodeid, test in run.tests.items()
        if _contradictable(test) and stack_of(nodeid) and nodeid in there
    )


def _contradictable(test: TestResult) -> bool:
    return test.verdict in RAN or (
        test.verdict == "unsupported" and (test.cause is None or isinstance(test.cause, TorchLacks))
    )


def drawn(places: Sequence[Place], count: int, seed: str) -> list[Place]:
    """Draw results uniformly, and return them in their order.

    They are those with the smallest SHA-256 of ``SEED INDEX NODEID``, so that the same seed draws the same ones.
    """

    def rank(place: Place) -> str:
        return hashlib.sha256(f"{seed} {place.run} {place.nodeid}".encode(errors="replace")).hexdigest()

    return sorted(sorted(places, key=rank)[:count])


def chance(results: int, compared: int, lies: int) -> float:
    """Return the probability that at least one of ``lies`` false results is among those that were compared.

    ``results``: of how many they were drawn.  It is one minus the hypergeometric probability of none.
    """
    if lies > results:
        return math.nan
    return 1 - math.comb(results - lies, compared) / math.comb(results, compared)


def chances(results: int, compared: int) -> Iterator[tuple[int, float]]:
    """Iterate over the numbers of :data:`LIES` that a bundle could have, each with its chance to be found."""
    yield from ((lies, chance(results, compared, lies)) for lies in LIES if lies <= results)


def unrepeatable(run: Run) -> str:
    """Say why no session can repeat a run; empty if one can."""
    header = run.header
    seed = header.seed
    if seed != DEFAULT_SEED and not (re.fullmatch(r"[0-9]{1,10}", seed) and int(seed) <= _LARGEST_SEED):
        return "its seed is not one that can be given again"
    if header.faults:
        return "it had defects put into its ranks"
    try:
        if effort({EXAMPLES: header.environment.get(f"variable {EXAMPLES}", "")}).thorough:
            return "it is a thorough run, which draws its own seeds"
    except EffortError as e:
        return str(e)
    return ""


def surroundings(there: Run, here: Run, facts: Iterable[str] = _DECIDES) -> list[str]:
    """Return the facts by which two runs differ in what may change results honestly, in words."""
    pairs = [(fact, there.header.environment.get(fact, ""), here.header.environment.get(fact, "")) for fact in facts]
    return [f"{fact} {old or 'none'} there, {new or 'none'} here" for fact, old, new in pairs if old != new]


def compared(places: Iterable[Place], there: Sequence[Run], here: Mapping[int, Run]) -> list[Outcome]:
    """Compare results of a bundle with those of the second run.

    ``here``: the second run of each run of the bundle of which there is one, by its index.
    """
    return [_compared(place, there[place.run], here.get(place.run)) for place in places]


def _compared(place: Place, run: Run, again: Run | None) -> Outcome:
    old = run.tests[place.nodeid]
    new = again.tests.get(place.nodeid) if again is not None else None
    if again is None or new is None:
        return Outcome(place, NOT_COMPARED, _shown(old, run), "", unrepeatable(run) or "not collected here")
    verdicts = _shown(old, run), _shown(new, again)
    if old.verdict == new.verdict == "unsupported":
        return Outcome(place, SAME if old.reason == new.reason else OTHER, *verdicts, new.reason[:200])
    why = _why_not(old, run) or _why_not(new, again, here=True) or _worlds(old, new)
    if why:
        return Outcome(place, NOT_COMPARED, *verdicts, why)
    if verdicts[0] != verdicts[1]:
        was, now = (_BADNESS[test.verdict] for test in (old, new))
        kind = BETTER if now < was else WORSE if now > was and old.verdict in _FINE else OTHER
        return Outcome(place, kind, *verdicts, new.headline[:200] if kind == WORSE else "")
    if old.cases is not None and new.cases is not None and old.cases != new.cases:
        if surroundings(run, again, _DRAWS):
            return Outcome(place, NOT_COMPARED, *verdicts, "other cases, as other versions may draw")
        counts = f"{plural(old.cases.count, 'case')} there, {new.cases.count:,} here"
        return Outcome(place, OTHER_CASES, *verdicts, f"its cases are not those that its seed draws: {counts}")
    if old.verdict == "passed" and not same_cases(old, run, new, again) and not surroundings(run, again, _DRAWS):
        return Outcome(place, OTHER_CASES, *verdicts, "it tried other cases there than here")
    if old.verdict == "passed" and (why := other_counts(old, run, new, again)) and not surroundings(run, again, _DRAWS):
        return Outcome(place, OTHER_COUNTS, *verdicts, why)
    return Outcome(place, SAME, *verdicts)


def _waiver(test: TestResult, run: Run) -> WaiverEntry | None:
    waivers = run.profile.waivers if run.profile is not None else []
    return next((waiver for waiver in waivers if test.waiver and waiver.place == test.waiver), None)


def _shown(test: TestResult, run: Run) -> str:
    """Return a verdict for readers; of a waived test, with the original verdict and the owner of the defect."""
    if test.verdict != "waived":
        return test.verdict[:40]
    waiver = _waiver(test, run)
    owner = "/".join(filter(None, (waiver.owner, waiver.defect))) if waiver is not None else ""
    return f"waived ({test.bare[:40] or 'unknown'}, of {owner[:100] or 'nobody'})"


def _why_not(test: TestResult, run: Run, *, here: bool = False) -> str:
    """Say why a result is not compared; empty if it is."""
    where = "here" if here else "in the bundle"
    if test.verdict not in RAN and here:
        return f"{test.verdict} here: {test.reason[:200] or 'no reason given'}"
    if test.verdict == "flaky":
        return f"flaky {where}"
    waivers = run.profile.waivers if run.profile is not None else []
    if any(w.intermittent and w.applies and w.place == test.waiver for w in waivers):
        return f"fails intermittently {where}, as its waiver says"
    return ""


def _worlds(old: TestResult, new: TestResult) -> str:
    """Say how the worlds differ that two results had; empty if they do not."""
    if old.world == new.world or old.verdict == "unsupported":
        return ""
    there, here = (
        f"{world}, of {list(world.sizes)}" if world and world.sizes else str(world) for world in (old.world, new.world)
    )
    return f"other worlds: {there} there, {here} here"
