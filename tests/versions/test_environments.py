"""An environment is asked for its torch, and one in which suites cannot run is refused in one sentence."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.versions.candidates import names, ordered
from harness.versions.environments import EnvironmentProblem, checkout, environment, variables
from tests.versions.fakes import fake_checkout

Fake = Callable[[str], Path]


@pytest.mark.parametrize("of", ["folder", "python"])
def test_it_is_asked(fake: Fake, tmp_path: Path, of: str) -> None:
    """The version of torch comes from the environment's own Python, by its folder or by its path."""
    folder = fake("2.99.1")
    found = environment(folder if of == "folder" else folder / "bin" / "python", fake_checkout(tmp_path))
    assert (found.torch, found.commit, found.folder) == ("2.99.1", "0" * 40, folder)


def wrong(kind: str, fake: Fake, folder: Path) -> Path:
    if kind == "missing":
        return folder / "nothing"
    if kind == "empty":
        folder.mkdir()
        return folder
    if kind == "a text":
        folder.mkdir()
        (folder / "python").write_text("")
        return folder / "python"
    if kind == "another program":
        folder.mkdir()
        (folder / "python").write_text("#!/bin/sh\necho no >&2; exit 3\n")
        (folder / "python").chmod(0o755)
        return folder / "python"
    shutil.copytree(fake("2.13.0"), folder, symlinks=True)
    (pth,) = folder.rglob("fakes.pth")
    texts = {"no torch": "", "old": f"{folder}/fakes\n{pth.read_text()}", "no packages": f"{folder}/fakes\n"}
    pth.write_text(texts[kind])
    if kind == "old":
        (folder / "fakes" / "torch" / "version.py").write_text('__version__ = "2.4.1"\n')
    return folder


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("missing", "there is no such environment"),
        ("empty", "it has no bin/python"),
        ("a text", "it can't be executed"),
        ("another program", "exit status 3: no"),
        ("no torch", "it has no torch"),
        ("old", "it lacks torch>=2.11"),
        ("no packages", "it lacks alembic"),
    ],
)
def test_bad_ones_are_refused(kind: str, says: str, fake: Fake, tmp_path: Path) -> None:
    """One sentence names the environment and says what is wrong."""
    path = wrong(kind, fake, tmp_path / "bad")
    with pytest.raises(EnvironmentProblem) as raised:
        environment(path, fake_checkout(tmp_path / "checkout"))
    assert says in str(raised.value)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_another_harness_is_refused(tmp_path: Path) -> None:
    """The command runs in the checkout from which its own harness is, so that results say which one ran."""
    root = fake_checkout(tmp_path)
    assert checkout(root) == root
    (root / "harness").unlink()
    (root / "harness").mkdir()
    with pytest.raises(ValueError, match="the harness that runs is"):
        checkout(root)


def test_variables_of_this_python_stay_here(tmp_path: Path, fake: Fake) -> None:
    """An environment imports from the checkout first, and knows nothing of the virtual environment of the caller."""
    python = fake("2.13.0") / "bin" / "python"
    inherited = {"PYTHONPATH": "/a:/b", "PATH": "/c", "VIRTUAL_ENV": "/d", "PYTHONHOME": "/e", "CONCORD_HISTORY": "x"}
    assert variables(python, tmp_path, inherited) == {
        "PYTHONPATH": f"{tmp_path}:/a:/b",
        "PATH": f"{python.parent}:/c",
        "VIRTUAL_ENV": str(fake("2.13.0")),
    }


def test_order_is_by_torch(fake: Fake, tmp_path: Path) -> None:
    """Versions are compared as versions; a bad one that is older turns the order around."""
    root = fake_checkout(tmp_path)
    old, middle, new, dev = (environment(fake(v), root) for v in ("2.11.0", "2.13.0", "2.100.0", "2.101.0.dev2027"))
    assert ordered(old, dev, [new, middle]) == [old, middle, new, dev]
    assert ordered(dev, old, [middle, new]) == [dev, new, middle, old]
    with pytest.raises(EnvironmentProblem, match=r"2\.100\.0 is not between 2\.11\.0 and 2\.13\.0"):
        ordered(old, middle, [new])
    with pytest.raises(EnvironmentProblem, match="have the same torch"):
        ordered(old, old, [])


def test_candidates(tmp_path: Path) -> None:
    """Candidates are words, or the lines of a file."""
    file = tmp_path / "nightlies"
    file.write_text("# since the branch\n20270101\n\n20270102  # a holiday\n")
    assert names(str(file)) == names("20270101 20270102") == ["20270101", "20270102"]
    for text, says in (("a b a", "a is given twice"), ("", "names no candidate")):
        with pytest.raises(ValueError, match=says):
            names(text)
