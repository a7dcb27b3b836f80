"""Stores, over which ranks meet before they have collectives."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from harness import Rank, World, requirement
from harness.stacks.collectives import default_store


@requirement(
    "COLL-STORE-01",
    "Of several ranks that set a key with compare_set, one wins, and every rank is told its value.",
    source="torch.distributed.Store: compare_set",
)
@pytest.mark.parametrize("kind", ["default", "file"])
@pytest.mark.world(2, 4)
def test_compare_set(world: World, tmp_path: Path, kind: str) -> None:
    """Each rank writes its number where nothing is yet, in the default group's store and in one of a file."""
    file = str(tmp_path / "store")

    def body(rank: Rank) -> tuple[list[str], str]:
        store: dist.Store = default_store()
        if kind == "file":
            store = dist.FileStore(file, rank.size)
        store.set_timeout(timedelta(seconds=20))
        told = [store.compare_set(f"compare_set {turn}", "", str(rank.index)).decode() for turn in range(5)]
        dist.barrier()
        kept = [store.get(f"compare_set {turn}").decode() for turn in range(5)]
        assert told == kept
        return told, store.compare_set("compare_set 0", "none of them", "late").decode()

    found = world.run(body)
    assert len({tuple(told) for told, _ in found}) == 1
    assert [late for _, late in found] == [found[0][0][0]] * world.size
