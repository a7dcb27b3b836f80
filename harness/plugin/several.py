"""Worlds of several sizes for one test: the ``worlds`` fixture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.devices import Inventory
    from harness.plugin.marks import WorldRequest
    from harness.plugin.specs import Specs
    from harness.worlds.pool import Pool
    from harness.worlds.world import World, WorldSpec


class Dealing:
    """The leased devices of a test, for its worlds. ``leased``: their names in the inventory."""

    def __init__(self, specs: Specs, asked: WorldRequest, inventory: Inventory, leased: Sequence[str]) -> None:
        self._specs, self._asked, self._inventory, self._leased = specs, asked, inventory, leased

    def sized(self, spec: WorldSpec, size: int) -> WorldSpec:
        """Return the specification of a world of another size on these devices."""
        return self._specs.sized(self._asked, spec, size, self._inventory)

    def devices(self, spec: WorldSpec) -> tuple[str, ...]:
        """Return the device of each rank of a world; empty on the host."""
        return self._specs.need(spec).deal(self._inventory, self._leased)


class SeveralWorlds:
    """Worlds of several sizes, on the devices of the largest. ``sizes``: the sizes that exist."""

    def __init__(self, pool: Pool, spec: WorldSpec, dealing: Dealing, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes
        self._pool, self._spec, self._dealing = pool, spec, dealing
        self._live: dict[int, World] = {}

    def __call__(self, size: int) -> World:
        """Return the world of a size. Errors: ValueError for a size that the test's mark does not have."""
        if size not in self.sizes:
            raise ValueError(f"no world of {size} ranks: the sizes in the test's world mark are {self.sizes}")
        if size not in self._live:
            spec = self._dealing.sized(self._spec, size)
            self._live[size] = self._pool.acquire(spec, self._dealing.devices(spec))
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
                left += self._pool.release(world, self._dealing.devices(world.spec))
        except BaseException:
            self.kill()
            raise
        self._live.clear()
        return left
