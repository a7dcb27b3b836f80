"""The public face: what it is, that the change log has it, and that nobody outside goes past it."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import harness
import harness.programs

ROOT = Path(__file__).parents[2]
FACES = {"harness": harness, "harness.programs": harness.programs}

LINE = re.compile(r"^- (Added|Removed)(?: to| from)? (`harness[\w.]*`|public modules):(.*(?:\n  .*)*)", re.MULTILINE)


def logged(text: str) -> dict[str, set[str]]:
    """The face that a change log adds up to: names by module, and the public modules under an empty name."""
    face: dict[str, set[str]] = {}
    for change, where, names in reversed(LINE.findall(text)):  # the newest are first
        module = "" if where == "public modules" else where.strip("`")
        named = set(re.findall(r"`([\w.]+)`", names))
        before = face.get(module, set())
        face[module] = before | named if change == "Added" else before - named
    return face


def test_the_change_log_has_the_face() -> None:
    """The names that the change log added and did not remove are the public ones."""
    actual = {name: set(module.__all__) for name, module in FACES.items()}
    assert logged((ROOT / "CHANGELOG.md").read_text()) == {**actual, "": set(harness.PUBLIC_MODULES)}


def test_newer_lines_count() -> None:
    """A newer line of the change log counts over an older one."""
    text = "- Removed from `harness`: `a`.\n- Added to `harness`: `b`.\n\n- Added to `harness`: `a`,\n  `c`.\n"
    assert logged(text) == {"harness": {"b", "c"}}


@pytest.mark.parametrize("module", FACES)
def test_names_are_there(module: str) -> None:
    """Every public name can be imported, and an unknown one is an AttributeError that names it."""
    for name in FACES[module].__all__:
        assert getattr(FACES[module], name) is not None
    with pytest.raises(AttributeError, match=f"module '{module}' has no attribute 'nothing'"):
        _ = FACES[module].nothing


@pytest.mark.parametrize("module", FACES)
def test_no_module_takes_a_name(module: str) -> None:
    """No module of a package is called like one of its public names: once imported, it would be in their place."""
    folder = FACES[module].__path__
    assert not {info.name for info in pkgutil.iter_modules(folder)} & set(FACES[module].__all__)


@pytest.mark.parametrize("module", harness.PUBLIC_MODULES)
def test_modules_are_there(module: str) -> None:
    """Every public module can be imported."""
    importlib.import_module(module)


def test_face_costs_nothing() -> None:
    """Importing the face does not import torch."""
    code = "import sys, harness, harness.programs; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def snippets() -> Iterator[tuple[str, str]]:
    """Python that people outside the harness write: suites, fixtures, samples, and blocks of the pages."""
    for folder in ("suites", "fixtures"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            yield str(file.relative_to(ROOT)), file.read_text()
    for file in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        for i, block in enumerate(re.findall(r"```python\n(.*?)```", file.read_text(), re.DOTALL)):
            yield f"{file.relative_to(ROOT)}, block {i}", block


def past_the_face(text: str) -> list[str]:
    """Everything that a text imports of harness and that is not public."""
    public = [f"{name}." for name in harness.PUBLIC_MODULES if name not in FACES]
    past = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if module.split(".")[0] == "harness" and not node.level:
                own = FACES[module].__all__ if module in FACES else []
                names = [f"{module}.{alias.name}" for alias in node.names if alias.name not in own]
                past += [name for name in names if not f"{name}.".startswith(tuple(public))]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.split(".")[0] == "harness"]
            past += [name for name in names if name not in FACES and not f"{name}.".startswith(tuple(public))]
    return past


def test_nobody_goes_past_the_face() -> None:
    """Suites, fixtures, samples and pages use the public face only."""
    past = {where: names for where, text in snippets() if (names := past_the_face(text))}
    assert past == {}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("from harness import World", []),
        ("from harness.stacks.replicate import DDP", []),
        ("from harness.worlds.world import World", ["harness.worlds.world.World"]),
        ("from harness import worlds", ["harness.worlds"]),
        ("import harness.worlds.wire", ["harness.worlds.wire"]),
        ("def f():\n    from harness.programs.laws import holds", ["harness.programs.laws.holds"]),
    ],
)
def test_ways_past_the_face_are_seen(text: str, expected: list[str]) -> None:
    """Private names are found however they are imported."""
    assert past_the_face(text) == expected
