"""Folders of tests for the plug-in's own tests to run pytest in."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # import-mode=importlib leaves the tests' own modules out of it

from sessions import Folder  # found through the line above

_HERE = Path(__file__).parent
_LONGEST = (
    1800  # seconds for a test with all the sessions that it is the first to look at, on a machine with much to do
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give these tests the time that several sessions may take, each of which starts torch anew."""
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker(pytest.mark.timeout(_LONGEST))


@pytest.fixture(scope="session")
def make_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, str]], Folder]:
    """Makes a folder of test files: ``make_folder({"test_x.py": "..."})``."""

    def make(files: dict[str, str]) -> Folder:
        folder = Folder(tmp_path_factory.mktemp("session"))
        for name, text in files.items():
            folder.write(name, text)
        return folder

    return make
