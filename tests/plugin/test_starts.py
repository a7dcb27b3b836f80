"""``--rank-start`` and a profile's ``start``: each rank is a new Python, and worlds stay warm."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sessions import Folder

pytestmark = pytest.mark.slow

TESTS = """
import os, sys
import pytest

PIDS = []

@pytest.mark.world(1)
@pytest.mark.parametrize("turn", range(2))
def test_rank(world, turn):
    ((pid, preloaded),) = world.run(lambda rank: (os.getpid(), "wave" in sys.modules))
    PIDS.append(pid)
    assert not preloaded
    assert len(set(PIDS)) == 1
"""
SERVER = {"CONCORD_PRELOAD": "torch,wave"}
"""What the server imports: a module that nothing else imports shows that ranks are its forks."""
PROFILE = """
name = "spawning"
backend = "gloo"
device = "cpu"
start = "spawn"
"""


@pytest.mark.parametrize(
    "arguments", [("--rank-start", "spawn"), ("--profile", "./spawning.toml")], ids=["option", "key"]
)
def test_new_pythons(make_folder: Callable[[dict[str, str]], Folder], arguments: tuple[str, ...]) -> None:
    folder = make_folder({"test_starts.py": TESTS, "spawning.toml": PROFILE})
    session = folder.run(*arguments, env=SERVER)
    assert session.counts == {"passed": 2}, session.out


def test_key_is_overridden(make_folder: Callable[[dict[str, str]], Folder]) -> None:
    """The command line has the last word."""
    folder = make_folder({"test_starts.py": TESTS, "spawning.toml": PROFILE})
    session = folder.run("--profile", "./spawning.toml", "--rank-start", "fork", "-k", "0", env=SERVER)
    assert session.counts == {"failed": 1}, session.out
    assert "assert not True" in session.out
