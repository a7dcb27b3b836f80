"""Pairs of mutants: which are made, what they do, and when both are equivalent."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.audit import mutants
from harness.audit.records import SURVIVED, Result
from harness.audit.run import PAIR, Audit, Plan, Progress, Target, targets

PLAN = Plan(components=("tp_extension",), faults=False, pairs=20)


def pairs(plan: Plan = PLAN) -> list[Target]:
    return [t for t in targets(plan) if t.defect.sort == PAIR]


def test_different_functions() -> None:
    """A pair has edits of two functions, no mutant is in two pairs, and each choice is the same."""
    found = pairs()
    assert len(found) == PLAN.pairs
    for target in found:
        one, other = target.mutants
        assert (one.module, one.function) != (other.module, other.function)
    assert len({m.name for t in found for m in t.mutants}) == 2 * PLAN.pairs
    assert [t.defect for t in found] == [t.defect for t in pairs()]


def test_both_are_put() -> None:
    """A rank calls two functions first, one for each edit."""
    (target, *_) = pairs()
    calls = target.first()
    assert [where for where, _ in calls] == ["harness.audit.mutants:put"] * 2
    assert [argument for _, argument in calls] == [mutants.prepared(m) for m in target.mutants]
    assert target.defect.name == " ++ ".join(m.name for m in target.mutants)


def test_names_of_mutants_have_no_separator() -> None:
    """No edit in words could be taken for two."""
    for component in mutants.SOURCES:
        for module in mutants.sources(component):
            assert not [m.name for m in mutants.mutants(module) if " ++ " in m.name]


def test_without_mutants() -> None:
    """Pairs of no mutants are refused."""
    with pytest.raises(ValueError, match="--pairs 3 --mutants none: pairs are of mutants"):
        targets(Plan(components=("replicate",), mutants="none", pairs=3))


@pytest.mark.parametrize(("listed", "reason"), [(0, ""), (1, ""), (2, "nobody reads it; never called")])
def test_equivalent(tmp_path: Path, listed: int, reason: str) -> None:
    """A pair is equivalent if both of its mutants are, and says both reasons."""
    (target, *_) = pairs()
    lines = [
        f"[[equivalent]]\nmutants = ['''{m.name}''']\nwhy = '{why}'\n"
        for m, why in zip(target.mutants[:listed], ("nobody reads it", "never called"), strict=False)
    ]
    catalog = tmp_path / "fixtures" / "faults" / "equivalent.toml"
    catalog.parent.mkdir(parents=True)
    catalog.write_text("".join(lines))
    audit = Audit(tmp_path, tmp_path / "state", PLAN, places=[], progress=Progress())
    result = Result(defect=target.defect, state=SURVIVED, seconds=1)
    assert audit.with_equivalence(result).equivalent == reason
