"""The plug-in in a session that has nothing to do with it, and in one that loads it in two ways."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sessions import Folder

pytestmark = pytest.mark.slow

CONFTEST = """
    import sys

    {plugins}

    def pytest_unconfigure(config):
        ours = [name for name, _ in config.pluginmanager.list_name_plugin() if name.startswith(("harness", "concord"))]
        print("plug-ins:", *sorted(ours))
        heavy = {{"torch", "harness.worlds.world", "cloudpickle"}}
        print("imported:", *sorted(heavy & set(sys.modules)))
"""


def test_costs_nothing_without_worlds(make_folder: Callable[[dict[str, str]], Folder]) -> None:
    """In a session without worlds nothing heavy is imported, and nothing is said."""
    files = {"test_it.py": "def test_nothing(): pass\n", "conftest.py": CONFTEST.format(plugins="")}
    session = make_folder(files).run(fresh=True)
    assert session.counts == {"passed": 1}
    assert "imported:\n" in session.out + "\n"
    assert "verdicts by stack" not in session.out


def test_is_loaded_once(make_folder: Callable[[dict[str, str]], Folder]) -> None:
    """A conftest that names the plug-in and an installed Concord give one plug-in, and worlds work."""
    tests = """
        def test_world(world):
            assert world.run(lambda rank: rank.index) == [0, 1]
    """
    conftest = CONFTEST.format(plugins='pytest_plugins = ["harness.plugin"]')
    session = make_folder({"test_it.py": tests, "conftest.py": conftest}).run()
    assert session.counts == {"passed": 1}
    (line,) = (line for line in session.out.split("\n") if line.startswith("plug-ins: "))
    names = line.split()[1:]
    assert {"harness.plugin", "concord-worlds", "concord-summary"} <= set(names)
    assert len(names) == len(set(names))
