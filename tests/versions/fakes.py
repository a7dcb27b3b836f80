"""Environments that say that they have another torch, and a checkout whose suites run in them.

An environment is a real virtual environment. It sees the packages of the one that runs the tests, after a torch that is
nothing but a version, and after a Concord that must never be imported.
"""

from __future__ import annotations

import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]

BY_VERSION = """
    from importlib.metadata import version
    from pathlib import Path
    import pytest

    Path("ran.txt").open("a").write(f"{version('torch')}\\n")
    VERSION = tuple(map(int, version("torch").split(".")[:2]))

    def test_old():
        assert VERSION < (2, 14), "newer than 2.13"

    def test_fine():
        pass

    def test_later():
        if VERSION < (2, 13):
            pytest.skip("unsupported: not before 2.13")
"""
"""A suite whose verdicts depend on the version of torch. Each session notes that it ran."""


def fake_environment(folder: Path, torch: str) -> Path:
    """Make a virtual environment whose torch has this version."""
    venv.create(folder, with_pip=False, symlinks=True)
    fakes = folder / "fakes"
    (fakes / "torch").mkdir(parents=True)
    version = f'__version__ = "{torch}"\ngit_version = "{"0" * 40}"\n'
    (fakes / "torch" / "version.py").write_text(version)
    (fakes / "torch" / "__init__.py").write_text('raise ImportError("a torch that is only a version")\n')
    (fakes / f"torch-{torch}.dist-info").mkdir()
    metadata = f"Metadata-Version: 2.1\nName: torch\nVersion: {torch}\n"
    (fakes / f"torch-{torch}.dist-info" / "METADATA").write_text(metadata)
    (fakes / "harness").mkdir()
    (fakes / "harness" / "__init__.py").write_text('raise ImportError("the Concord of the environment")\n')
    packages = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    (packages / "fakes.pth").write_text(f"{fakes}\n{sysconfig.get_path('purelib')}\n")
    return folder


def fake_checkout(folder: Path, **suites: str) -> Path:
    """Make a checkout with these suites, and with this harness and its settings."""
    (folder / "suites").mkdir(parents=True)
    (folder / "harness").symlink_to(ROOT / "harness")
    (folder / "fixtures").symlink_to(ROOT / "fixtures")
    for name in ("pyproject.toml", "conftest.py"):
        (folder / name).write_text((ROOT / name).read_text())
    for name, text in suites.items():
        lines = text.strip("\n").splitlines()
        indent = len(lines[0]) - len(lines[0].lstrip())
        (folder / "suites" / f"test_{name}.py").write_text("\n".join(line[indent:] for line in lines) + "\n")
    return folder


def ran(checkout: Path) -> list[str]:
    """The versions of torch with which the suite was imported, in order."""
    file = checkout / "ran.txt"
    return file.read_text().split() if file.is_file() else []


if __name__ == "__main__":
    fake_environment(Path(sys.argv[2]), sys.argv[1])
