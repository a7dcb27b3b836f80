"""--fault: a defect in every rank of every world."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sessions import Folder, Session

pytestmark = pytest.mark.slow

TESTS = """
    import os

    import pytest
    import torch
    import torch.distributed as dist

    from harness import RanksFailed, spmd

    def total(rank):
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        return tensor.item()

    @pytest.mark.world(2, 3)
    def test_every_rank(world):
        assert world.run(total) == [world.size] * world.size

    @pytest.mark.world(2)
    def test_ranks_that_die(world):
        with pytest.raises(RanksFailed):
            world.run(lambda rank: os._exit(3))

    @pytest.mark.world(2)
    def test_fresh_ranks(world):
        assert world.run(total) == [2, 2]

    @spmd(2)
    def test_on_ranks(rank):
        assert total(rank) == 2

    def test_not_in_the_controller():
        assert dist.all_reduce is dist.distributed_c10d.all_reduce
"""


@pytest.fixture(scope="module")
def folder(make_folder: Callable[[dict[str, str]], Folder]) -> Folder:
    return make_folder({"test_it.py": TESTS})


@pytest.fixture(scope="module")
def damaged(folder: Folder) -> Session:
    return folder.run("--fault", "nothing-done", "-rA")


def test_without(folder: Folder) -> None:
    """Nothing is wrong where no fault is asked for."""
    assert folder.run().counts == {"passed": 6}


@pytest.mark.parametrize(
    "test", ["test_every_rank[2ranks]", "test_every_rank[3ranks]", "test_fresh_ranks[2ranks]", "test_on_ranks[2ranks]"]
)
def test_on_every_rank(damaged: Session, test: str) -> None:
    """Worlds of any size, and those that come after one that died."""
    damaged.lines.fnmatch_lines([f"FAILED *::{test.replace('[', '[[]')}*"])


def test_values_are_of_the_fault(damaged: Session) -> None:
    """Each rank found what the fault leaves there."""
    assert "assert [1.0, 1.0, 1.0] == [3, 3, 3]" in damaged.out.replace("[3] * 3", "[3, 3, 3]")


def test_only_on_ranks(damaged: Session) -> None:
    """The process of pytest itself stays as it was."""
    assert damaged.counts == {"passed": 2, "failed": 4}


def test_unknown(folder: Folder) -> None:
    """A name that there is not ends the session before it begins, and the nearest is named."""
    session = folder.run("--fault", "nothing-don")
    assert session.code == pytest.ExitCode.USAGE_ERROR
    assert "--fault nothing-don: no such fault in the catalog; did you mean nothing-done?" in session.err


@pytest.mark.nightly
def test_unlike_any(folder: Folder) -> None:
    """Where nothing is near, it is said how to list them."""
    session = folder.run("--fault", "x")
    assert session.code == pytest.ExitCode.USAGE_ERROR
    assert "--fault x: no such fault in the catalog; `concord faults` lists them" in session.err


@pytest.mark.nightly
def test_two(folder: Folder) -> None:
    """Several faults may be given."""
    session = folder.run("--fault", "nothing-done", "--fault", "barrier-does-not-block", "-k", "fresh")
    assert session.counts == {"failed": 1}
