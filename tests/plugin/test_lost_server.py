"""A session whose server is killed: what is said of the test that was hit, and of the next."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sessions import Folder

pytestmark = pytest.mark.slow

TESTS = """
    import os, signal, time

    def test_hit(world):
        def body(rank):
            if rank.index == 0:
                os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(1000)
        world.run(body)

    def test_after_it(world):
        assert world.run(lambda rank: rank.index) == [0, 1]
"""


def test_lost_server(make_folder: Callable[[dict[str, str]], Folder]) -> None:
    """The test that was hit is crashed by the server's doing, the next one passes, and the results say the network."""
    session = make_folder({"test_it.py": TESTS}).run("--concord-results", "out")
    assert session.counts == {"failed": 1, "passed": 1}
    hit = session.results.tests["test_it.py::test_hit[2ranks]"]
    assert hit.verdict == "crashed"
    assert hit.headline.startswith("no rank is to blame: the server that ranks are forked from was killed by SIGKILL")
    assert [rank.first for rank in hit.ranks] == [False, False]
    assert "ServerWarning: the server that ranks are forked from was killed by SIGKILL" in session.out
    assert session.results.header.environment["rank network"].split(":")[0] in ("private", "host")
