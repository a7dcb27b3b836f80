"""Which devices of which hosts a world takes, and which rank gets which of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from harness.devices import Inventory


def blocks(ranks: int, hosts: int) -> list[int]:
    """Return how many ranks each host of a world has, which differ by at most one; the first hosts have more."""
    least, more = divmod(ranks, hosts)
    return [least + 1] * more + [least] * (hosts - more)


@dataclass(frozen=True)
class Need:
    """What a world needs of an inventory.

    On the host, a world of any size takes one slot: the number of slots is the number of worlds that run side by side.
    """

    ranks: int
    ranks_per_device: int = 1
    hosts: int = 1
    """Over how many hosts the ranks are spread, in blocks of nearly the same size."""
    whole: bool = False
    """Whether it takes all devices, so that nothing else runs on them."""
    shares: int = 1
    """Into how many shares an accelerator is divided, of which it takes one on each of its devices."""

    def count(self, inventory: Inventory) -> int:
        """Return how many devices it takes."""
        if self.whole:
            return len(inventory.devices)
        return 1 if inventory.on_host else sum(self.on_each)

    def fits(self, inventory: Inventory) -> bool:
        """Return whether an inventory has what it needs, if nobody else uses any of it."""
        return self.take(inventory, range(len(inventory.devices))) is not None

    def take(self, inventory: Inventory, free: Sequence[int]) -> list[int] | None:
        """Return what it takes of the free devices, as indices into the inventory; None if they are too few."""
        if inventory.on_host or self.whole:
            count = self.count(inventory)
            enough = len(free) >= max(1, count) and (inventory.on_host or self._nodes(inventory, free) is not None)
            return list(free[:count]) if enough else None
        nodes = self._nodes(inventory, free)
        return (
            None if nodes is None else [i for node, most in zip(nodes, self.on_each, strict=True) for i in node[:most]]
        )

    def deal(self, inventory: Inventory, leased: Sequence[str]) -> tuple[str, ...]:
        """Return the device of each rank, out of those that were leased; empty on the host.

        With ``whole``, ranks are dealt to the devices of their host in turn, as in jobs that have a machine to
        themselves.  Without, ranks that share a device are neighbors, so that as few devices as possible are used.

        Errors: ValueError if those that were leased are too few.
        """
        if inventory.on_host:
            return ()
        nodes = self._nodes(inventory, [inventory.devices.index(device) for device in leased])
        if nodes is None:
            raise ValueError(f"{self.ranks} ranks do not fit on {', '.join(leased)}")
        return tuple(
            inventory.devices[node[place % len(node) if self.whole else place // self.ranks_per_device]]
            for node, ranks in zip(nodes, blocks(self.ranks, self.hosts), strict=True)
            for place in range(ranks)
        )

    @property
    def on_each(self) -> list[int]:
        """How many devices it needs on each of its hosts."""
        return [-(-ranks // self.ranks_per_device) for ranks in blocks(self.ranks, self.hosts)]

    def _nodes(self, inventory: Inventory, free: Sequence[int]) -> list[list[int]] | None:
        """Return the free devices of the host of each of its nodes; None if there is no such choice of hosts.

        The first node needs the most.  Each takes the host with the fewest free devices that are enough, which leaves
        the larger hosts to larger worlds.
        """
        by_host: dict[int, list[int]] = {}
        for i in free:
            by_host.setdefault(inventory.host_of(i), []).append(i)
        nodes = []
        for need in self.on_each:
            enough = [host for host, devices in by_host.items() if len(devices) >= need]
            if not enough:
                return None
            nodes.append(by_host.pop(min(enough, key=lambda host: len(by_host[host]))))
        return nodes


def would_fit(need: Need, counts: Sequence[int]) -> bool:
    """Return whether a world fits on accelerators of hosts that have so many."""
    wanted, have = sorted(need.on_each, reverse=True), sorted(counts, reverse=True)
    return len(wanted) <= len(have) and all(a <= b for a, b in zip(wanted, have, strict=False))


def spread(need: Need, inventory: Inventory, hosts: Sequence[int]) -> Need:
    """Return a need over the first of some numbers of hosts on which it fits, or over the first if there is none."""
    needs = [replace(need, hosts=count) for count in hosts]
    return next((each for each in needs if each.fits(inventory)), needs[0])
