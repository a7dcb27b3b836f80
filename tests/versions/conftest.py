"""What is made once: fake environments, and the catalog of this checkout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from harness.versions.catalog import Catalog, catalog
from tests.versions.fakes import fake_environment


@pytest.fixture(scope="session")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns the environment whose torch has a version: ``fake("2.14.0")``."""
    made: dict[str, Path] = {}

    def environment(torch: str) -> Path:
        if torch not in made:
            made[torch] = fake_environment(tmp_path_factory.mktemp("environment") / f"with-{torch}", torch)
        return made[torch]

    return environment


@pytest.fixture(scope="session")
def shipped() -> Catalog:
    """The catalog of this checkout."""
    return catalog(Path(__file__).parents[2])


@pytest.fixture(autouse=True)
def _as_from_a_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions inside a test do not get the variables of the session that runs the tests."""
    for name in ("PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST", "PYTHONPATH", "CONCORD_EXAMPLES"):
        monkeypatch.delenv(name, raising=False)
