"""The map of imports in pyproject.toml holds, and a breach of it is seen."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

LINT = "import sys; from importlinter.cli import lint_imports_command; lint_imports_command()"

CONTRACTS = """
[tool.importlinter]
root_packages = ["house"]

[[tool.importlinter.contracts]]
name = "Rooms"
type = "layers"
containers = ["house"]
exhaustive = true
layers = ["upper", "lower"]

[[tool.importlinter.contracts]]
name = "No circles"
type = "acyclic_siblings"
ancestors = ["house"]
"""


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter in a folder, without a cache."""
    return subprocess.run(
        [sys.executable, "-c", LINT, "--no-cache"], cwd=folder, capture_output=True, text=True, timeout=120
    )


def test_contracts_hold() -> None:
    """Every contract of pyproject.toml is kept."""
    linted = lint(ROOT)
    assert linted.returncode == 0, linted.stdout[-3000:]
    assert "0 broken" in linted.stdout


def test_the_page_is_the_contract() -> None:
    """The architecture page lists every room of the contract, in its order, and no other."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (layers,) = [contract["layers"] for contract in settings["contracts"] if contract["type"] == "layers"]
    rooms = [room.strip() for layer in layers for room in layer.split(":")]
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == rooms


@pytest.mark.parametrize(
    ("file", "text", "broken"),
    [
        ("upper/a.py", "from house.lower import b", ""),
        ("lower/b.py", "def f():\n    from house.upper import a", "Rooms"),
        ("lower/b.py", "from house.lower import c", "No circles"),
        ("cellar.py", "", "Rooms"),
    ],
    ids=["downwards", "upwards, lazily", "circle", "no place on the map"],
)
def test_breach_is_seen(tmp_path: Path, file: str, text: str, broken: str) -> None:
    """The kinds of contract that the map uses fail for a lazy import upwards, a circle, and an unknown room."""
    (tmp_path / "pyproject.toml").write_text(CONTRACTS)
    for name in ("__init__.py", "upper/__init__.py", "upper/a.py", "lower/__init__.py", "lower/b.py", "lower/c.py"):
        path = tmp_path / "house" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("def f():\n    from house.lower import b\n" if name == "lower/c.py" else "")
    (tmp_path / "house" / file).write_text(text)
    linted = lint(tmp_path)
    assert (linted.returncode != 0) == bool(broken)
    assert not broken or f"{broken} BROKEN" in linted.stdout


def topics(page: str) -> set[str]:
    """The topics that a page on the suites lists, as paths in suites/."""
    return set(re.findall(r"^\| \[`\w+`\]\((\w+/\w+)\) \|", page, re.MULTILINE))


def test_topics_of_suites() -> None:
    """The page beside the suites lists every folder of them that has tests, and no other; none has very many files."""
    suites = ROOT / "suites"
    there = {file.parent.relative_to(suites).as_posix() for file in suites.rglob("test_*.py")}
    assert topics((suites / "README.md").read_text()) == {place for place in there if "/" in place}
    assert max(len(list((suites / place).glob("test_*.py"))) for place in there) <= 40


def test_topics_are_read() -> None:
    """A row names a topic by its path; other tables and links don't count."""
    assert topics("| [`a`](b/a) | x |\n| [`c`](b/c)\n| d | [`e`](b/e) |") == {"b/a"}
