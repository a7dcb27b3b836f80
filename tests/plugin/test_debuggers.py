"""Debuggers on a real terminal: pytest's own in the controller, ``--rank-pdb`` in a rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sessions import Folder

pytestmark = pytest.mark.slow

TESTS = """
    import torch.distributed as dist

    def test_fails(world):
        asked = "how many"
        def body(rank):
            mine = 40 + rank.index
            dist.barrier()
            assert mine < 41
        world.run(body)

    def test_breakpoint(world):
        def body(rank):
            mine = 50 + rank.index
            breakpoint()
            mine += 1
            breakpoint()
            dist.barrier()
            return mine
        assert world.run(body) == [51, 52]

    def test_after_it(world):
        world.run(lambda rank: dist.barrier())
"""


def test_pdb_is_in_the_controller(make_folder: Callable[[dict[str, str]], Folder]) -> None:
    """--pdb stops in the controller, where the test ran something on ranks; its ranks have been shown by then."""
    running = make_folder({"test_it.py": TESTS}).start("--pdb", "-k", "not breakpoint", terminal=True)
    shown = running.until("(Pdb) ")
    assert "rank 1 of 2 failed first: AssertionError: assert 41 < 41" in shown
    assert "entering PDB" in shown
    running.type("p asked, world.size")
    assert "('how many', 2)" in running.until("(Pdb) ")
    running.type("c")
    session = running.end()
    assert session.counts == {"failed": 1, "passed": 1}
    assert session.orphans == ()


def test_rank_pdb(make_folder: Callable[[dict[str, str]], Folder]) -> None:
    """--rank-pdb opens a debugger in this rank alone: where it fails, and at each breakpoint(); q and c leave it."""
    running = make_folder({"test_it.py": TESTS}).start("--rank-pdb", "1", terminal=True)
    shown = running.until("(rank 1) ")
    assert "assert mine < 41" in shown
    running.type("p mine, rank")
    assert "(41, <rank 1 of 2 on cpu, gloo>)" in running.until("(rank 1) ")
    running.type("q")
    running.until("(rank 1) ")
    running.type("p mine")
    assert "51" in running.until("(rank 1) ")
    running.type("c")
    running.until("(rank 1) ")
    running.type("p mine")
    assert "52" in running.until("(rank 1) ")
    running.type("c")
    session = running.end()
    assert session.counts == {"failed": 1, "passed": 2}
    assert "E   rank 1 of 2 failed first: AssertionError: assert 41 < 41" in session.out
    assert session.orphans == ()


def test_quitting_at_a_breakpoint(make_folder: Callable[[dict[str, str]], Folder]) -> None:
    """q at a breakpoint ends the test as failed; the session goes on."""
    running = make_folder({"test_it.py": TESTS}).start("--rank-pdb", "0", "-k", "not fails", terminal=True)
    running.until("(rank 0) ")
    running.type("q")
    session = running.end()
    assert session.counts == {"failed": 1, "passed": 1}
    assert "BdbQuit" in session.out
    assert session.orphans == ()


def test_breakpoint_without_rank_pdb(make_folder: Callable[[dict[str, str]], Folder]) -> None:
    """Without --rank-pdb a breakpoint on a rank is an error that says what to add."""
    session = make_folder({"test_it.py": TESTS}).run("-k", "not fails")
    assert session.counts == {"failed": 1, "passed": 1}
    assert "breakpoint() on rank 0, which has no terminal: run pytest with --rank-pdb 0" in session.out


def test_rank_pdb_of_a_rank_that_is_not_there(make_folder: Callable[[dict[str, str]], Folder]) -> None:
    """A rank that no world of the session has is refused with one line, before anything runs."""
    session = make_folder({"test_it.py": TESTS}).run("--rank-pdb", "7")
    assert session.code == pytest.ExitCode.USAGE_ERROR
    assert "ERROR: --rank-pdb 7: the largest world of these tests has ranks 0 to 1" in session.err
    assert "Traceback" not in session.err + session.out


def test_rank_pdb_without_a_terminal(make_folder: Callable[[dict[str, str]], Folder]) -> None:
    """Where there is no input, the debugger ends at once, and the session as it would have."""
    session = make_folder({"test_it.py": TESTS}).run("--rank-pdb", "1", "-k", "not breakpoint")
    assert session.counts == {"failed": 1, "passed": 1}
