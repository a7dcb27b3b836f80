"""The sample process group, installed as a vendor's package would be, on the suites that it claims to pass."""

from __future__ import annotations

from pathlib import Path

import pytest
from environments import ROOT, Environment, made

PACKAGE = ROOT / "fixtures" / "vendors" / "shm"
SMOKE = (
    "fixtures/vendors/shm/tests",
    "suites/collectives/operations/test_all_gather.py",
    "suites/collectives/arguments/test_misuse.py",
    "suites/collectives/in_flight/test_waiting.py",
    "suites/replicate/hooks/test_hooks.py",
)


@pytest.fixture(scope="module")
def shm(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """A fresh environment in which the package has been built and installed."""
    return made(tmp_path_factory.mktemp("shm") / "environment", PACKAGE)


def profile(shm: Environment) -> Path:
    """The profile that the package brings along."""
    return shm.packages / "concord_shm" / "shm.toml"


def passes(shm: Environment, *tests: str, timeout: float) -> None:
    """Run tests with the package's profile: nothing ends badly, and no waiver is stale."""
    done = shm.suites(profile(shm), "-n", "2", *tests, timeout=timeout)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_package_needs_torch_alone_and_brings_its_profile(shm: Environment) -> None:
    """What pip has put into the environment, and nowhere else."""
    assert shm.required("concord_shm") == ["torch>=2.11"]
    assert profile(shm).is_file()
    done = shm.run("-c", "import concord_shm; print(concord_shm._C.__file__)")
    assert done.stdout.strip().startswith(str(shm.packages)), done.stderr


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_smoke(shm: Environment) -> None:
    """Its own tests, and a part of the first two levels."""
    passes(shm, *SMOKE, timeout=600)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_every_test_of_the_first_two_levels(shm: Environment) -> None:
    """Collectives and replicate, whole."""
    passes(shm, "suites/collectives", "suites/replicate", timeout=3500)
