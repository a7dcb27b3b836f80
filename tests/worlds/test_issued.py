"""How many collectives a test's ranks issue: by name, on groups, and only in runs that ended well."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from harness import Pool, RanksFailed, World, WorldSpec, executed
from harness.results import Issued


@pytest.fixture
def world(pool: Pool) -> World:
    return pool.acquire(WorldSpec(2))


def test_by_name(world: World) -> None:
    """Calls from Python are counted by name, of all ranks and runs together; groups count them, too."""

    def body(rank: object) -> None:
        dist.all_reduce(torch.ones(2))
        dist.all_reduce(torch.ones(2))
        dist.broadcast(torch.ones(2), 0)

    with executed.recording() as found:
        world.run(body)
        world.run(body)
    assert found.issued == Issued({"all_reduce": 8, "broadcast": 4}, 12)


def test_on_groups(world: World) -> None:
    """What C++ issues (DDP's reducer) is counted by groups alone; what a rank alone issues is counted once."""

    def body(rank: object) -> None:
        model = DistributedDataParallel(torch.nn.Linear(2, 2))
        model(torch.ones(1, 2)).sum().backward()

    def on_a_group(rank: object) -> None:
        group = dist.new_group([0])
        if rank.index == 0:  # type: ignore[attr-defined]
            dist.all_reduce(torch.ones(1), group=group)

    with executed.recording() as found:
        world.run(body)
    assert found.issued is not None
    assert found.issued.by_name == {}
    assert found.issued.on_groups >= 4  # at least one of DDP's construction, and one bucket, on each rank
    with executed.recording() as found:
        world.run(on_a_group)
    assert found.issued == Issued({"all_reduce": 1}, 1)


def test_nothing_issued(world: World) -> None:
    """A run without a collective counts none, which is not the same as nothing counted."""
    with executed.recording() as found:
        world.run(lambda rank: None)
    assert found.issued == Issued({}, 0)
    with executed.recording() as found:
        pass
    assert found.issued is None


def test_failed_runs_do_not_count(world: World) -> None:
    """How far ranks came before one failed, time decides; so a run that is tried again counts once."""

    def body(rank: object, fails: bool) -> None:
        dist.all_reduce(torch.ones(2))
        if fails and rank.index == 1:  # type: ignore[attr-defined]
            raise ValueError("no")
        dist.all_reduce(torch.ones(2))

    with executed.recording() as once:
        world.run(body, False)
    with executed.recording() as again:
        with pytest.raises(RanksFailed):
            world.run(body, True)
        world.run(body, False)
    assert again.issued == once.issued == Issued({"all_reduce": 4}, 4)


def test_warm_worlds_do_not_count(pool: Pool) -> None:
    """What a warm world issues may depend on the tests before, so it is not counted."""
    world = pool.acquire(WorldSpec(2, warm=True))
    with executed.recording() as found:
        world.run(lambda rank: dist.barrier())
    assert found.issued is None
