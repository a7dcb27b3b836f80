"""Limits are data: each has its finding and versions, drawing keeps to those of the running torch, and to no other."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from harness.programs.options import case_of, takes
from harness.programs.strategies import programs
from harness.specs.program import Layout, Linear, Model, Program, Step
from harness.stacks import limit, registry
from harness.stacks.limit import OLDEST, Limit, defect

FINDINGS = Path(__file__).parents[2] / "docs" / "findings"
EVERY = {name: (*registry.stack(name).limits, *registry.stack(name).resuming) for name in registry.own_names()}


@pytest.mark.parametrize("stack", EVERY)
def test_findings_are_there(stack: str) -> None:
    """A limit that is due to a defect names a script that shows it; each finding is there once in a list."""
    for each in EVERY[stack]:
        assert not each.finding or (FINDINGS / f"{each.finding}.py").is_file()
    named = [each.finding for each in EVERY[stack] if each.finding]
    assert len(set(named)) == len(named)


@pytest.mark.parametrize(
    ("versions", "running", "applies"),
    [
        (OLDEST, "2.13.0+cpu", True),
        (">=2.11,<2.15", "2.13.0+cu130", True),
        (">=2.11,<2.15", "2.14.1", True),
        (">=2.11,<2.15", "2.15.0", False),
        (">=2.11,<2.15", "2.15.0.dev20261101+cpu", False),
    ],
)
def test_versions(versions: str, running: str, applies: bool) -> None:
    """A limit counts in the versions of torch that have the defect; a pre-release is of its version."""
    assert defect("x", "y", lambda case: True, torch=versions).applies(running) == applies


def test_finding_and_versions_go_together() -> None:
    """A limit without a finding always applies, and a finding has versions."""
    assert Limit("y", lambda case: True).applies("9.9")
    with pytest.raises(ValueError, match="both a finding and versions"):
        Limit("y", lambda case: True, finding="x")


class _Drawn(Exception):
    """A program of a region."""


def is_drawn(region: Callable[[Program], bool], most: int) -> bool:
    """Whether a program of a region is among so many that are drawn for replicate_fsdp."""

    @settings(
        max_examples=most,
        database=None,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(programs("replicate_fsdp", (1, 2), dtypes=("float32",)))
    def look(program: Program) -> None:
        if region(program):
            raise _Drawn

    try:
        look()
    except _Drawn:
        return True
    return False


def _thawed_and_cast(program: Program) -> bool:
    case = case_of(program)
    return case.toggles and bool(registry.stack("replicate_fsdp").casts(case.options))


def _idle_and_cast(program: Program) -> bool:
    case = case_of(program)
    return case.optional and case.accumulates and bool(registry.stack("replicate_fsdp").casts(case.options))


@pytest.mark.parametrize("region", [_thawed_and_cast, _idle_and_cast])
def test_region_that_is_mended_is_drawn(region: Callable[[Program], bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """fsdp_thawed.py and fsdp_accumulated_dtype.py exit with 1 on torch 2.13, and with 0 on 2.15."""
    monkeypatch.setattr(limit, "running", lambda: "2.13.0")
    assert not is_drawn(region, 200)
    monkeypatch.setattr(limit, "running", lambda: "2.15.0")
    assert is_drawn(region, 2000)


def test_what_laws_make_is_filtered_by_the_same_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program in a region is not taken where the defect is, and is taken where it is mended."""
    layout = Layout("replicate_fsdp", options=(("reduce_dtype", "bfloat16"),))
    program = Program(
        Model((3,), (Linear(3), Linear(2))), layout, (Step(toggle="linear1"), Step(toggle="linear1")), dtype="float32"
    )
    for running, taken in (("2.13.0", False), ("2.15.0", True)):
        monkeypatch.setattr(limit, "running", lambda running=running: running)
        assert takes(program) == taken


def test_no_name_of_a_stack_in_programs() -> None:
    """Programs ask stacks what they promise, and know none of them by its name, but for the default of a layout."""
    folder = Path(__file__).parents[2] / "harness" / "programs"
    named = re.compile(rf"[\"']({'|'.join(registry.own_names())})[\"']")
    found = [
        f"{file.name}: {line.strip()}"
        for file in sorted(folder.glob("*.py"))
        for line in file.read_text().splitlines()
        if named.search(line)
    ]
    assert found == ['spec.py: stack: StackName = "replicate"']
