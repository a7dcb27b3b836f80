"""The sample accelerator, built and installed as a vendor's customer does it; tests here find their own modules."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # import-mode=importlib leaves the tests' own modules out of it

from installed import PACKAGE, ROOT, Installed  # found through the line above


@pytest.fixture(scope="session")
def sim(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The package, built from its source and installed into a fresh environment that sees this one's PyTorch."""
    folder = tmp_path_factory.mktemp("sim")
    source = shutil.copytree(PACKAGE, folder / "source", ignore=shutil.ignore_patterns("build", "*.egg-info"))
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv" / "bin" / "python"
    query = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    packages = subprocess.run([python, "-c", query], capture_output=True, text=True, check=True).stdout.strip()
    (Path(packages) / "outer.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n{ROOT}\n")
    options = ["--no-build-isolation", "--no-deps", "--no-index", "--disable-pip-version-check"]
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", *options, str(source)]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # ninja, if this one has it
    done = subprocess.run(
        install, capture_output=True, text=True, env={**os.environ, "PATH": path, "MAX_JOBS": "2"}, timeout=280
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return Installed(python)
