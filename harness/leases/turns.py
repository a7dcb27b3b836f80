"""The order in which processes take devices: a pure decision from who waits and who holds what."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """A place in the queue."""

    session: str
    """The session that waits; its processes share what they get."""
    count: int
    """How many devices it waits for."""
    since: int
    """When the place was taken, in nanoseconds; the earlier one comes first."""
    name: str = ""
    """Distinguishes it from places that were taken at the same time."""


def in_order(places: Iterable[Place], held: Mapping[str, int]) -> list[Place]:
    """Order the queue: sessions that hold fewer devices come first, then earlier places.

    places: one for each lease that is waited for.  held: how many devices each session holds now.
    """
    return sorted(places, key=lambda place: (held.get(place.session, 0), place.since, place.name))


def may_take(mine: Place, places: Iterable[Place], held: Mapping[str, int], free: int) -> bool:
    """Return whether it is this process's turn: there are enough devices after everyone ahead has been served.

    mine: its own place.  places: those of others.  held: how many devices each session holds.  free: how many devices
    nobody holds.  A lease that does not fit holds up those behind it, so a large world is not overtaken forever.
    """
    for place in in_order([*places, mine], held):
        if place.count > free:
            return False
        if place == mine:
            return True
        free -= place.count
    return False
