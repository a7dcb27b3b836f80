"""torch.distributed.elastic.timer: limits for blocks, after which a server ends the process that is in one."""

from __future__ import annotations

import time

import pytest
from torch.distributed.elastic import timer

from harness import Rank, World, assert_on_ranks, requirement

SCOPES = {
    "named": ("outer", "inner"),
    "outer named": ("outer", None),
    "inner named": (None, "inner"),
    "unnamed": (None, None),
}
"""Names of a block and of one within it."""


class Recorder(timer.TimerClient):
    """A client that keeps what limits hold, in seconds, as servers do: by the name of their block."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[str, int] = {}

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        self.held[scope_id] = round(expiration_time - time.time())

    def release(self, scope_id: str) -> None:
        self.held.pop(scope_id, None)


@requirement(
    "COLL-TIMER-3611",
    "The limit of a block holds until that block ends, whatever other limits begin within it, or end.",
    source="torch.distributed.elastic.timer.expires: 'unless the code-block that it wraps is finished within'",
)
@pytest.mark.parametrize("scopes", SCOPES)
@pytest.mark.world(1)
def test_blocks_within_blocks(world: World, scopes: str) -> None:
    """A block of 60 s has one of 600 s within, twice; ask before, within and after each."""

    def body(_: Rank) -> list[list[int]]:
        client, (outer, inner) = Recorder(), SCOPES[scopes]
        found = []
        with timer.expires(60, outer, client):
            found.append(sorted(client.held.values()))
            for _ in range(2):
                with timer.expires(600, inner, client):
                    found.append(sorted(client.held.values()))
                found.append(sorted(client.held.values()))
        return [*found, sorted(client.held.values())]

    assert_on_ranks([[[60], [60, 600], [60], [60, 600], [60], []]], world.run(body))
