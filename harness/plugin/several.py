"""Worlds of several sizes for one test: the ``worlds`` fixture."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.worlds.pool import Pool
    from harness.worlds.world import World, WorldSpec


class SeveralWorlds:
    """Worlds of several sizes, on the devices of the largest. ``sizes``: the sizes that exist."""

    def __init__(self, pool: Pool, spec: WorldSpec, devices: tuple[str, ...], sizes: tuple[int, ...]) -> None:
        self.sizes = sizes
        self._pool, self._spec, self._devices = pool, spec, devices
        self._live: dict[int, World] = {}

    def __call__(self, size: int) -> World:
        """Return the world of a size. Errors: ValueError for a size that the test's mark does not have."""
        if size not in self.sizes:
            raise ValueError(f"no world of {size} ranks: the sizes in the test's world mark are {self.sizes}")
        if size not in self._live:
            spec = self._spec.sized(size)
            self._live[size] = self._pool.acquire(spec, self._devices[:size])
        return self._live[size]

    @property
    def runs(self) -> int:
        """The number of runs on all of them."""
        return sum(world.runs for world in self._live.values())

    def kill(self) -> None:
        """Kill them all at once."""
        for world in self._live.values():
            world.kill()
        self._live.clear()

    def release(self) -> list[str]:
        """Release them all. Returns what they left behind that another test could notice."""
        left = []
        try:
            for world in self._live.values():
                left += self._pool.release(world, self._devices[: world.size])
        except BaseException:
            self.kill()
            raise
        self._live.clear()
        return left
