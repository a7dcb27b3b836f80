"""Whose turn it is to take devices: pure decision over who waits and who holds what."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """A place in the queue."""

    session: str
    """Whose: processes of one session share what they get."""
    count: int
    """How many devices are waited for."""
    since: int
    """When it was taken, in nanoseconds: earlier comes first."""
    name: str = ""
    """What tells it from others taken at the same time."""


def in_order(places: Iterable[Place], held: Mapping[str, int]) -> list[Place]:
    """Order the queue: who holds fewest devices comes first, then who came first.

    places: one for each lease that is waited for.  held: how many devices each session holds now.
    """
    return sorted(places, key=lambda place: (held.get(place.session, 0), place.since, place.name))


def may_take(mine: Place, places: Iterable[Place], held: Mapping[str, int], free: int) -> bool:
    """Whether it is one's turn: there are enough devices once everyone who comes first has been given theirs.

    mine: one's own place.  places: those of others.  held: how many devices each session holds.  free: how many
    devices nobody holds.  A lease that does not fit holds up those behind it, so a large world is not overtaken for
    ever.
    """
    for place in in_order([*places, mine], held):
        if place.count > free:
            return False
        if place == mine:
            return True
        free -= place.count
    return False
