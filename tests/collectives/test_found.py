"""A process group that is wrong in one narrow way is found by the suite's own tests, which say where."""

from __future__ import annotations

import importlib
import re
import tomllib
from pathlib import Path

import pytest

from fixtures.faults.collectives.catalog import CATALOG, NONE
from harness import RanksFailed, World
from harness.audit.records import load
from tests.collectives import found, found_relatives
from tests.collectives.finding import ASSERTION, ERROR, HANG, SILENCE, WRONG, Finding
from tests.collectives.repairs import REPAIRS

FOUND = (*found.FOUND, *found_relatives.FOUND)

ROOT = Path(__file__).parents[2]
SUITE = ROOT / "suites" / "collectives"
HEADER = re.compile(r"^\w+\(.*\), call \d+, rank \d+: .*$", re.MULTILINE)
ELEMENT = re.compile(r"^  \[[\d, ]*\] expected .*, found ", re.MULTILINE)

ON_SIM = tomllib.loads((ROOT / "fixtures" / "vendors" / "sim" / "defects.toml").read_text())
"""What the sample accelerator can have wrong, and which tests notice (tests/vendors/test_sim.py)."""
OF_STREAMS = dict.fromkeys(
    (f"COLL-STREAM-0{n}" for n in range(1, 10)), "the host has no streams; the sample accelerator"
)
NEWER = dict.fromkeys(
    (
        "COLL-FUNC-17",
        "COLL-GATHER-04",
        "COLL-GATHER-05",
        "COLL-GATHER-06",
        "COLL-GRAD-06",
        "COLL-MESH-05",
        "COLL-OBJECT-12",
        "COLL-OBJECT-13",
    ),
    "PyTorch has it since 2.14 or 2.15, and damages are put into the one that is pinned",
)
OF_HOSTS = dict.fromkeys((f"COLL-HOST-{n:02}" for n in range(1, 11)), "on several hosts: tests/cluster/test_found.py")
UNDAMAGED = {**OF_STREAMS, **NEWER, **OF_HOSTS}
"""Requirements without a damage that a test of theirs finds, and why."""


def of_size(size: int) -> pytest.MarkDecorator:
    """A parameter for every finding in a world of a size."""
    some = [finding for finding in FOUND if finding.size == size]
    names = [f"{f.damage} - {f.test.__name__}-{'-'.join(map(str, f.arguments.values()))}" for f in some]
    return pytest.mark.parametrize("finding", some, ids=[name.replace(" ", "_") for name in names])


@pytest.mark.world(1)
@of_size(1)
def test_alone(world: World, finding: Finding) -> None:
    """Found with one rank."""
    check(world, finding)


@pytest.mark.world(2)
@of_size(2)
def test_two(world: World, finding: Finding) -> None:
    """Found with two ranks."""
    check(world, finding)


@pytest.mark.nightly
@pytest.mark.world(3)
@of_size(3)
def test_three(world: World, finding: Finding) -> None:
    """Found with three ranks."""
    check(world, finding)


@pytest.mark.world(4)
@of_size(4)
def test_four(world: World, finding: Finding) -> None:
    """Found with four ranks."""
    check(world, finding)


@pytest.mark.world(6)
@of_size(6)
def test_six(world: World, finding: Finding) -> None:
    """Found with six ranks."""
    check(world, finding)


def check(world: World, finding: Finding) -> None:
    """The test fails as it should and says why; of wrong answers, it names case, call, rank and elements."""
    with pytest.raises((AssertionError, RanksFailed)) as caught:
        finding.run(world)
    text = str(caught.value)
    assert kind_of(caught.value) == finding.kind, text
    headers = HEADER.findall(text)
    assert [h for h in headers or [text] if not re.search(finding.says, h)] == []
    if any(" elements differ" in header for header in headers):
        assert ELEMENT.search(text)


def kind_of(error: BaseException) -> str:
    """How a test failed."""
    if not isinstance(error, RanksFailed):
        headers = HEADER.findall(str(error))
        if not headers:
            return ASSERTION
        return ERROR if all(": raised " in header for header in headers) else WRONG
    if error.verdict == "hung":
        return HANG
    if error.verdict == "crashed":
        return error.verdict
    kind = str(((error.first and error.first.report) or {}).get("type", "")).rpartition(".")[2]
    return {"Mismatch": WRONG, "Failed": SILENCE, "AssertionError": ASSERTION}.get(kind, ERROR)


def requirements_of(test: object) -> set[str]:
    """Identifiers of the requirements that a test is for."""
    return {mark.args[0].id for mark in getattr(test, "pytestmark", []) if mark.name == "requirement"}


def requirements_in(file: Path) -> dict[str, set[str]]:
    """Identifiers of the requirements of a file of the suite, by the name of their tests."""
    module = importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))
    return {name: requirements_of(value) for name, value in vars(module).items() if callable(value)}


def noticed() -> set[str]:
    """Identifiers of the requirements whose tests notice faults written blind, by kind, or from tests and reports."""
    found: set[str] = set()
    for result in load(ROOT / "fixtures" / "faults" / "noticed.json").results:
        place, _, test = result.test.partition("::")
        kinds = ("blind-", "kind-", "upstream-", "reported-", "mended-", "vendor-", "reviewed-", "overlooked-")
        if result.defect.name.startswith(kinds) and place.startswith("suites/collectives/"):
            found |= requirements_in(ROOT / place)[test.partition("[")[0]]
    return found


def test_every_requirement_is_damaged() -> None:
    """For each requirement of the suite there is a damage that a test of it finds, or the reason why there is none."""
    every: set[str] = set()
    for file in SUITE.rglob("test_*.py"):
        every |= set().union(*requirements_in(file).values())
    damaged = set().union(*(requirements_of(finding.test) for finding in FOUND))
    missing = sorted(every - damaged - noticed() - set(UNDAMAGED))
    assert not missing, f"requirements without a damage: {', '.join(missing)}"
    assert set(UNDAMAGED) <= every - damaged


def test_what_only_accelerators_have_is_damaged_there() -> None:
    """Each requirement that can't be damaged on the host has a defect of the sample accelerator that a test of it is
    listed to notice."""
    listed = {test for said in ON_SIM.values() if said.get("streams") for test in said["tests"]}
    noticing = {test for test in listed if test.startswith("suites/collectives/")}
    tests = requirements_in(SUITE / "in_flight" / "test_streams.py")
    assert {test.partition("::")[2].partition("[")[0].rstrip("*") for test in noticing} - {""} == {
        name for name, ids in tests.items() if ids
    }
    assert set().union(*tests.values()) == set(OF_STREAMS)


def test_every_damage_is_looked_for() -> None:
    """No damage of the catalog is without a test that finds it, and no repair without a test that needs it."""
    assert {name for name in CATALOG if name != NONE.name} <= {finding.damage for finding in FOUND}
    assert set(REPAIRS) == {finding.repair for finding in FOUND if finding.repair}
