"""The versions of PyTorch in tox, in the workflow, in the constraints and on the page are the same."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
TOX = (ROOT / "tox.ini").read_text()
WORKFLOW = (ROOT / ".github" / "workflows" / "versions.yml").read_text()
ANY = "constraints-any-torch.txt"


def matrix() -> list[str]:
    """The versions of tox's environments, in order."""
    (named,) = re.findall(r"^\[testenv:torch-\{([\d.,]+)\}\]$", TOX, re.MULTILINE)
    return named.split(",")


def pinned() -> str:
    """The version with which we develop."""
    (version,) = re.findall(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    return version


def test_the_matrix_reaches_from_the_oldest_on() -> None:
    """The versions ascend, begin with the oldest that Concord promises to run on, and have the pinned one."""
    versions = [Version(version) for version in matrix()]
    assert versions == sorted(set(versions))
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (torch,) = (each for each in map(Requirement, needed) if each.name == "torch")
    (least,) = (Version(each.version) for each in torch.specifier)
    assert versions[0].release[:2] == least.release[:2]
    assert pinned() in matrix()


def test_each_environment_of_tox_has_its_torch() -> None:
    """A factor adds the pin of its own version, and none of the constraints pins another."""
    assert re.findall(r"^    ([\d.]+): torch==([\d.]+)$", TOX, re.MULTILINE) == [(v, v) for v in matrix()]
    assert "torch==" not in (ROOT / ANY).read_text()
    assert f"-c {ANY}" in (ROOT / "constraints.txt").read_text().splitlines()


def test_the_workflow_has_the_matrix() -> None:
    """A change runs the oldest, the pinned and the newest version; a night runs all."""
    (change,) = re.findall(r"^ +torch: \[(.*)\]$", WORKFLOW, re.MULTILINE)
    assert re.findall(r'"([\d.]+)"', change) == [matrix()[0], pinned(), matrix()[-1]]
    (night,) = re.findall(r'VERSIONS: "([\d. ]+)"', WORKFLOW)
    assert night.split() == matrix()
    assert f"build/torch-{pinned()}/bin/concord versions" in WORKFLOW
    assert "run: bash .ci/install" in WORKFLOW  # which pins all but torch
    assert WORKFLOW.count("constraints") == WORKFLOW.count(ANY) == 1


@pytest.mark.parametrize("name", ["ci.yml", "nightly.yml"])
def test_other_workflows_have_the_pinned_version(name: str) -> None:
    """Every other job installs the version that the constraints pin."""
    text = (ROOT / ".github" / "workflows" / name).read_text()
    assert set(re.findall(r"torch==([\d.]+)", text)) == {pinned()}


def test_the_page_has_the_matrix() -> None:
    """The page's table has a row for each version."""
    page = (ROOT / "docs" / "versions.md").read_text()
    assert re.findall(r"^\| (\d+\.\d+\.\d+) \|", page, re.MULTILINE) == matrix()
