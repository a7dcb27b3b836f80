"""Where a file is from: a distribution as it was installed, or nobody's."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

import pytest

from harness.plugin import loaded
from harness.plugin.loaded import Owners
from harness.results import OWN_CONFTEST, foreign

ROOT = Path(__file__).parents[2]


def install(folder: Path, name: str, files: dict[str, str]) -> None:
    """Lay out a distribution as pip does."""
    lines = []
    for file, text in files.items():
        (folder / file).write_text(text)
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        lines.append(f"{file},sha256={digest},{len(text)}")
    info = folder / f"{name.replace('-', '_')}-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
    (info / "RECORD").write_text("\n".join([*lines, f"{info.name}/METADATA,,", f"{info.name}/RECORD,,"]) + "\n")


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that packages are installed in."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    return folder


def test_a_file_as_it_was_installed(packages: Path, pytestconfig: pytest.Config) -> None:
    """A file of a distribution is known by its name and version."""
    install(packages, "some-plugin", {"some_plugin.py": "x = 1\n"})
    assert Owners(pytestconfig).of(str(packages / "some_plugin.py")) == "some-plugin 1.5"


def test_a_file_that_was_changed_after_it_was_installed(packages: Path, pytestconfig: pytest.Config) -> None:
    """A file of a distribution with another text is nobody's: its own hash stands for it."""
    install(packages, "some-plugin", {"some_plugin.py": "x = 1\n"})
    (packages / "some_plugin.py").write_text("x = 2\n")
    expected = hashlib.sha256(b"x = 2\n").hexdigest()
    assert Owners(pytestconfig).of(str(packages / "some_plugin.py")) == expected


def test_a_file_of_nobody(packages: Path, pytestconfig: pytest.Config) -> None:
    """A file that was put beside installed ones, and what has no file, are said to be so."""
    (packages / "stray.py").write_text("")
    assert Owners(pytestconfig).of(str(packages / "stray.py")) == hashlib.sha256(b"").hexdigest()
    assert Owners(pytestconfig).of("") == "no file"


def test_what_the_interpreter_starts_with(
    packages: Path, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A .pth file that executes something is named if no distribution installed it; one that has only paths is not."""
    install(packages, "some-plugin", {"owned.pth": "import sys\n"})
    (packages / "stray.pth").write_text("import sys\n")
    (packages / "paths.pth").write_text("/nowhere\n")
    monkeypatch.setattr(loaded.site, "getsitepackages", lambda: [str(packages)])
    monkeypatch.setattr(loaded.site, "ENABLE_USER_SITE", False)
    assert Owners(pytestconfig).startup == {"stray.pth": hashlib.sha256(b"import sys\n").hexdigest()}


@pytest.mark.parametrize("record", ["sha256=wrong", "", "md5=1B2M2Y8AsgTpgAmY7PhCfg"], ids=["other", "none", "md5"])
def test_startup_files_of_another_text(
    record: str, packages: Path, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A .pth file that executes something is its distribution's only with the hash that the distribution states."""
    install(packages, "some-plugin", {"owned.pth": "import sys\n", "changed.pth": "import sys\n"})
    (packages / "changed.pth").write_text("import os\n")
    install(packages, "other-plugin", {"stated.pth": "import re\n"})
    list_of_other = packages / "other_plugin-1.5.dist-info" / "RECORD"
    list_of_other.write_text(f"stated.pth,{record},10\n")
    monkeypatch.setattr(loaded.site, "getsitepackages", lambda: [str(packages)])
    monkeypatch.setattr(loaded.site, "ENABLE_USER_SITE", False)
    expected = {
        name: hashlib.sha256((packages / name).read_bytes()).hexdigest() for name in ("changed.pth", "stated.pth")
    }
    assert Owners(pytestconfig).startup == expected


def test_a_file_whose_hash_is_not_stated(packages: Path, pytestconfig: pytest.Config) -> None:
    """A file that a distribution only names is nobody's: anything may be in it."""
    install(packages, "some-plugin", {"some_plugin.py": "x = 1\n"})
    (packages / "some_plugin-1.5.dist-info" / "RECORD").write_text("some_plugin.py,,\n")
    assert Owners(pytestconfig).of(str(packages / "some_plugin.py")) == hashlib.sha256(b"x = 1\n").hexdigest()


def test_who_is_known() -> None:
    """Plug-ins of pytest and Concord, the suites' own conftest.py, and the one beside them are no strangers."""
    strange = {"a": "pytest-evil 1.0", "b": "pytest", "conftest.py": "0" * 64, "tests/conftest.py": "0" * 64}
    strange |= {"pytest": "pytest 9.2.0, pytest-evil 1.0", "c": "no file"}
    familiar = {"x": "pytest 9.2.0", "y": "concord-harness 0.1.0", "suites/perf/conftest.py": "1" * 64}
    familiar |= {"b": "pytest"}
    assert foreign({**strange, **familiar}) == {name: where for name, where in strange.items() if name != "b"}
    assert foreign({"conftest.py": OWN_CONFTEST[-1]}) == {}


def test_the_conftest_beside_the_suites() -> None:
    """Its hash is the one that readers know."""
    assert hashlib.sha256((ROOT / "conftest.py").read_bytes()).hexdigest() in OWN_CONFTEST
