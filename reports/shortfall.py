"""What the tests of a level fall short of, compared with the level's minimum (:mod:`reports.minimums`).

Falling short is no failure: nothing is wrong with what ran, and it is too little for the level.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from harness.profiles import Claims
from harness.profiles.vocabulary import REDUCING
from harness.results import HostLacks, HostsLack, Run, TestResult, TooFewHosts, TooLittleMemory, TorchLacks
from reports.minimums import Minimum
from reports.model import UNDECLARED, RequirementReport, TestReport
from reports.text import listed, plural

_SHOWN = 3
_PASSED = ("passed", "waived")
_DID_NOT_RUN = ("unsupported", UNDECLARED, "not-run")


@dataclass(frozen=True)
class Evidence:
    """What there is for one level."""

    level: str
    requirements: Sequence[RequirementReport]
    """The mandatory requirements of the level."""
    proving: dict[str, TestReport]
    """Every test by its node id."""
    tests: Sequence[TestReport]
    """The tests of the level's stack."""
    excused: Collection[str]
    """The tests that are unsupported for a reason that is not the backend's (:func:`excused`)."""
    claims: Claims | None
    """What the profile claims; None if there is no profile that can be read."""
    counting: Sequence[int]
    """The indices of the runs that drew enough examples to count."""

    def tests_of(self, requirement: RequirementReport) -> list[TestReport]:
        """Return the tests of a requirement that could have run."""
        return [self.proving[nodeid] for nodeid in requirement.tests if nodeid not in self.excused]

    def sizes(self) -> list[int]:
        """Return the sizes of the worlds on which tests passed or are waived, ascending."""
        passed = [test for test in self.tests if test.verdict in _PASSED and self.ran(test)]
        return sorted({size for test in passed for size in test.sizes or [test.size] if size})

    def ran(self, test: TestReport) -> bool:
        """Return whether a test ran in a run that counts."""
        return any(test.verdicts[i] not in ("", *_DID_NOT_RUN) for i in self.counting)

    def counted(self) -> list[RequirementReport]:
        """Return the mandatory requirements that have a test which could have run."""
        return [requirement for requirement in self.requirements if self.tests_of(requirement)]

    def little(self) -> list[RequirementReport]:
        """Return the requirements that are unsupported, or had one rank alone although their tests ask for more."""
        return [requirement for requirement in self.counted() if self._is_little(requirement)]

    def _is_little(self, requirement: RequirementReport) -> bool:
        tests = self.tests_of(requirement)
        ran = [test for test in tests if self.ran(test)]
        if not ran:  # what is undeclared or was not run is said elsewhere
            return requirement.verdict not in (UNDECLARED, "not-run")
        return max(test.most_ranks for test in ran) <= 1 < max(test.size for test in tests)

    def waived(self) -> tuple[list[RequirementReport], list[RequirementReport]]:
        """Return the requirements with tests that are waived for PyTorch's own defects, and those for others."""
        of_pytorch, of_others = [], []
        for requirement in self.requirements:
            tests = [self.proving[nodeid] for nodeid in requirement.tests]
            owned = {test.of_pytorch for test in tests if test.verdict == "waived"}
            of_pytorch += [requirement] if True in owned else []
            of_others += [requirement] if False in owned else []
        return of_pytorch, of_others


def excused(runs: Sequence[Run], tests: Sequence[TestReport]) -> set[str]:
    """Return the tests that are unsupported for a reason that says nothing about the backend or the devices.

    They are about what this PyTorch lacks, what takes several hosts or more memory, or what the host lacks and an
    accelerator has.
    """
    found = set()
    for test in tests:
        result = runs[test.run].tests.get(test.nodeid)
        if test.verdict == "unsupported" and result is not None and _is_excused(result):
            found.add(test.nodeid)
    return found


def _is_excused(test: TestResult) -> bool:
    match test.cause:
        case TorchLacks() | TooFewHosts() | HostsLack() | TooLittleMemory():
            return True
        case HostLacks():
            return test.world is not None and test.world.device == "cpu"
    return False


def shortfalls(evidence: Evidence, minimum: Minimum) -> Iterator[str]:
    """Say in sentences what a level takes and does not have here."""
    yield from _sizes(evidence, minimum)
    yield from _subgroups(evidence, minimum)
    yield from _claims(evidence, minimum)
    yield from _unsupported(evidence, minimum)
    yield from _drawn(evidence, minimum)


def _sizes(evidence: Evidence, minimum: Minimum) -> Iterator[str]:
    missing = [size for size in minimum.world_sizes if size not in evidence.sizes()]
    if missing:
        takes = f"{evidence.level} takes tests that pass on worlds of {listed(map(str, minimum.world_sizes))} ranks"
        yield f"{takes}; none passed on worlds of {plural_of(missing)}."


def plural_of(sizes: Sequence[int]) -> str:
    """Name numbers of ranks, as in ``one rank`` or ``2 and 3 ranks``."""
    return "one rank" if list(sizes) == [1] else f"{listed(map(str, sizes))} ranks"


def _subgroups(evidence: Evidence, minimum: Minimum) -> Iterator[str]:
    about = {requirement.id: requirement for requirement in evidence.requirements}
    for name in minimum.subgroups:
        requirement = about.get(name)
        if requirement is None or not any(evidence.ran(evidence.proving[nodeid]) for nodeid in requirement.tests):
            verdict = requirement.verdict if requirement is not None else ""
            why = f"it is {verdict}" if verdict in _DID_NOT_RUN else "no run that counts has it"
            yield f"{evidence.level} takes {name}, which is about groups of some ranks; {why}."


def _claims(evidence: Evidence, minimum: Minimum) -> Iterator[str]:
    missing = list(unclaimed(evidence.claims, minimum)) if evidence.claims is not None else []
    if missing:
        what = listed(missing[:_SHOWN], more=len(missing) - _SHOWN)
        yield f"{evidence.level} takes a profile that claims {what}."


def unclaimed(claims: Claims, minimum: Minimum) -> Iterator[str]:
    """Describe each collective, dtype and reduction that a level takes and that is not claimed."""
    for collective in minimum.collectives:
        for dtype in minimum.dtypes:
            for op in minimum.ops if collective in REDUCING else ("",):
                lacks = claims.lacks(collective, dtype, op)
                if lacks:
                    yield lacks


def _unsupported(evidence: Evidence, minimum: Minimum) -> Iterator[str]:
    little, all_of_them = evidence.little(), evidence.counted()
    if exceeds(len(little), len(all_of_them), minimum.unsupported):
        names = listed([requirement.id for requirement in little[:_SHOWN]], more=len(little) - _SHOWN)
        yield (
            f"{len(little)} of {plural(len(all_of_them), 'mandatory requirement')} are unsupported, or had one rank "
            f"alone although their tests ask for more, and {evidence.level} takes at most "
            f"{at_most(len(all_of_them), minimum.unsupported)}: {names}."
        )


def exceeds(count: int, of: int, share: float) -> bool:
    """Return whether a count is a larger share than allowed."""
    return count > at_most(of, share)


def at_most(of: int, share: float) -> int:
    """Return the largest whole number that is no more than a share."""
    return int(of * Fraction(str(share)))


def _drawn(evidence: Evidence, minimum: Minimum) -> Iterator[str]:
    few = [t for t in evidence.tests if t.sizes and len(t.sizes) < minimum.drawn and t.most_ranks < t.size]
    if few:
        names = listed([test.nodeid for test in few[:_SHOWN]], more=len(few) - _SHOWN)
        what = "property drew its worlds" if len(few) == 1 else "properties drew their worlds"
        yield (
            f"{len(few)} {what} from fewer than {minimum.drawn} sizes, although they ask for up to "
            f"{max(test.size for test in few)} ranks: {names}."
        )
