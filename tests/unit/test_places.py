"""How files are named in messages."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.worlds import places
from harness.worlds.places import short_path, show_from


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory; nothing else is shown relative to anything."""
    monkeypatch.setattr(places, "_shown_from", [])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_below_the_working_directory(folder: Path) -> None:
    """A file below the working directory is named by its path from there."""
    assert short_path(f"{folder}/tests/test_x.py") == "tests/test_x.py"


def test_elsewhere(folder: Path) -> None:
    """A file anywhere else is named in full, also where the names begin alike."""
    assert short_path(f"{folder}-other/test_x.py") == f"{folder}-other/test_x.py"


def test_below_another_folder(folder: Path) -> None:
    """A file below a folder that was named is named by its path from there."""
    show_from("/", "/repo")
    assert [short_path("/repo/test_x.py"), short_path("/usr/x.py")] == ["test_x.py", "/usr/x.py"]


def test_working_directory_that_is_gone(folder: Path) -> None:
    """Without a working directory, files are named in full."""
    gone = folder / "gone"
    gone.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(gone)
        gone.rmdir()
        assert short_path(f"{gone}/x.py") == f"{gone}/x.py"


@pytest.mark.parametrize("file", ["", "<string>", "test_x.py"])
def test_no_path(file: str) -> None:
    """What is no absolute path stays as it is."""
    assert short_path(file) == file


@pytest.mark.parametrize(
    ("file", "generated"),
    [
        ("<string>", True),
        ("<eval_with_key>.1", True),
        ("<eval_with_key>.1 from /lib/torch/fx/experimental/proxy_tensor.py:1738 in wrapped", True),
        (f"/tmp/torchinductor_me/ab/c{'a2' * 25}b.py", True),
        ("<stdin>", False),
        ("<ipython-input-3-0d>", False),
        ("suites/compiled.py", False),
        ("", False),
    ],
)
def test_generated(file: str, generated: bool) -> None:
    """Graphs and Inductor's files are of no user; what is typed into a notebook or a prompt is."""
    assert places.is_generated(file) is generated
