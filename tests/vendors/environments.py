"""A fresh environment with a vendor's package in it.

The environment sees the packages of the one that runs the tests (torch is too large to be fetched again) through a
``.pth`` file.  That is honest because pip puts the vendor's package into the new environment alone, no test imports it
from its sources, and what it says that it needs, which :meth:`Environment.required` shows, is torch and nothing else.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Environment:
    """A virtual environment, and where pip puts packages in it."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def packages(self) -> Path:
        major, minor = sys.version_info[:2]
        return self.folder / "lib" / f"python{major}.{minor}" / "site-packages"

    def run(self, *arguments: str, timeout: float = 300, **env: str) -> subprocess.CompletedProcess[str]:
        """Run its Python in the root of the repository, without what a test session has in its environment."""
        of_sessions = ("PYTEST_", "COV_", "HYPOTHESIS_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(of_sessions)}
        command = [str(self.python), *arguments]
        return subprocess.run(
            command, cwd=ROOT, env={**kept, **env}, capture_output=True, text=True, timeout=timeout, check=False
        )

    def suites(self, profile: Path, *arguments: str, timeout: float, **env: str) -> subprocess.CompletedProcess[str]:
        """Run suites by a profile."""
        options = ("-p", "no:cacheprovider", "-q", "--profile", str(profile))
        return self.run("-m", "pytest", *options, *arguments, timeout=timeout, **env)

    def required(self, package: str) -> list[str]:
        """What a package that is installed here says that it needs."""
        (metadata,) = self.packages.glob(f"{package}-*.dist-info/METADATA")
        return Parser().parsestr(metadata.read_text()).get_all("Requires-Dist") or []


def made(folder: Path, package: Path) -> Environment:
    """Make an environment and install a package into it, built from a copy of its sources."""
    ignored = shutil.ignore_patterns("build", "*.egg-info", "*.so")
    source = shutil.copytree(package, folder.with_name(f"{folder.name}-source"), ignore=ignored)
    venv.create(folder, with_pip=False, symlinks=True)
    found = Environment(folder)
    (found.packages / "of_the_tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(found.python), "install", "-q"]
    options = ["--no-deps", "--no-build-isolation", "--no-index"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [*pip, *options, str(source)],
        env={**os.environ, "PATH": path, "MAX_JOBS": "2"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return found
