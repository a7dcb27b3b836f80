"""Samples of an audit: which defects they have, of which modules."""

from __future__ import annotations

from collections import Counter

import pytest

from harness.audit import mutants
from harness.audit.run import MUTANT, Plan, targets


def sample(count: int, level: str = "wide") -> list[str]:
    """Return the modules of the mutants of a sample, one for each."""
    plan = Plan(components=("replicate", "collectives"), faults=False, mutants=level, sample=count)
    return [t.mutants[0].module for t in targets(plan) if t.defect.sort == MUTANT]


@pytest.mark.parametrize("count", [1, 7, 40])
def test_modules_in_turn(count: int) -> None:
    """Each component has as many mutants as were asked for, from its modules equally, the foundations included."""
    found = Counter(sample(count))
    for component in ("replicate", "collectives"):
        modules = mutants.sources(component, level="wide")
        assert sum(found[module] for module in modules) == count
        more = [found[module] for module in modules if found[module] < len(mutants.mutants(module))]
        assert max(found[module] for module in modules) - min(more) <= 1  # of those that are not used up


def test_larger_samples_have_the_smaller() -> None:
    """An audit with a larger sample goes on where the smaller one ended; a sample is always the same."""

    def names(count: int) -> set[str]:
        plan = Plan(components=("tp_extension",), faults=False, mutants="wide", sample=count)
        return {t.defect.name for t in targets(plan)}

    assert names(10) < names(30)
    assert names(10) == names(10)


def test_levels() -> None:
    """``source`` is the first module, ``all`` has its neighbors, ``wide`` the foundations; the reference has none."""
    source, every, wide = (mutants.sources("replicate", level=level) for level in mutants.LEVELS)
    assert source == every[:1] == wide[:1]
    assert every == mutants.SOURCES["replicate"] == wide[: len(every)]
    assert wide[len(every) :] == mutants.FOUNDATIONS["replicate"]
    assert mutants.sources("replicate", "reference", "wide") == mutants.REFERENCE["replicate"]
    assert set(sample(3, "source")) == {mutants.SOURCES[c][0] for c in ("replicate", "collectives")}
