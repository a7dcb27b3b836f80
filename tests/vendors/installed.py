"""An environment of its own, with PyTorch and a vendor's package in it."""

from __future__ import annotations

import os
import subprocess
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "fixtures" / "vendors" / "sim"


@dataclass(frozen=True)
class Installed:
    """An environment of its own, with PyTorch and the package."""

    python: Path

    def run(self, code: str, *arguments: str, timeout: float = 60, **env: str) -> subprocess.CompletedProcess[str]:
        """Execute code in a process of that environment."""
        command = [str(self.python), "-c", textwrap.dedent(code), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment(env))

    def prints(self, code: str, **env: str) -> list[str]:
        """The lines that code prints; it must end well."""
        done = self.run(code, **env)
        assert done.returncode == 0, done.stderr
        return done.stdout.split("\n")[:-1]

    def suites(self, *arguments: str, timeout: float = 300, **env: str) -> subprocess.CompletedProcess[str]:
        """Run suites with the package's profile."""
        profile = str(PACKAGE / "sim.toml")
        command = [str(self.python), "-m", "pytest", "-p", "no:cacheprovider", "-q", "--profile", profile, *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, env=environment(env))


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """Nothing of this session's own, but its path to programs."""
    kept = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "TMPDIR", "LANG")}
    return {**kept, "OMP_NUM_THREADS": "1", **more}
