"""The pool of worlds: starts them, keeps warm ones, checks them after use, and retires those that are not clean."""

from __future__ import annotations

import functools
import os
import sys
from collections import Counter
from collections.abc import Callable, Collection, Sequence

from harness.profiles.vocabulary import FORK
from harness.worlds import network
from harness.worlds.handle import Launcher
from harness.worlds.launch import LaunchError, working_directory
from harness.worlds.local import LocalLauncher
from harness.worlds.terminal import Terminal
from harness.worlds.world import World, WorldSpec

MOST_ON_A_DEVICE = 4
"""How many ranks of worlds that wait a device holds by default."""


class Pool:
    """The worlds of one controller.

    A fresh world is started by :meth:`acquire` and closed by :meth:`release`.  A warm world is checked by
    :meth:`release`.  If the check finds nothing that the next user could notice, the world is kept, and a later
    :meth:`acquire` with an equal spec and the same devices returns it.
    """

    def __init__(
        self,
        *,
        launcher: Callable[..., Launcher] = LocalLauncher,
        terminal: Terminal | None = None,
        most_warm: int = 4,
        most_on_a_device: int = MOST_ON_A_DEVICE,
    ) -> None:
        self._make_launcher = launcher
        self._terminal = terminal
        self._most_warm = most_warm
        self._most_on_a_device = most_on_a_device
        self._launchers: dict[tuple[bool, str], Launcher] = {}
        self._warm: dict[tuple[WorldSpec, tuple[str, ...]], World] = {}
        self._begun: dict[tuple[WorldSpec, tuple[str, ...]], tuple[World, object]] = {}
        self.retired: list[tuple[WorldSpec, tuple[str, ...]]] = []
        """Warm worlds that were not kept, with the reasons."""
        self.replaced: list[str] = []
        """What became of each server that was lost and replaced."""

    def prepare(self, asked: str = network.AUTO, start: str = FORK) -> None:
        """Start the server of ranks on the host, without waiting for it.

        ``asked``: the network that they ask for, one of :data:`~harness.worlds.network.NETWORKS`; ``start``: one of
        :data:`~harness.worlds.launch.STARTS`.
        """
        self.launcher(private=not network.needs_host(asked, "cpu", os.environ), start=start)

    def launcher(self, *, private: bool = True, start: str = FORK) -> Launcher:
        """Return the launcher of ranks on a private network, or on the host's.  Replaces a launcher that was lost."""
        kind = private, start
        launcher = self._launchers.get(kind)
        if launcher is not None and not launcher.alive:
            self.replaced.append(launcher.lost)
            del self._launchers[kind]
            launcher.close()
            launcher = None
        if launcher is None:
            launcher = self._launchers[kind] = self._make_launcher(private=private, start=start)
        return launcher

    def _launcher_of(self, spec: WorldSpec) -> Launcher:
        """Return the launcher of a world's ranks.

        Errors: LaunchError if a private network was asked for and is not available.
        """
        variables = {**os.environ, **dict(spec.env)}
        private = spec.hosts == 1 and not network.needs_host(spec.network, spec.device, variables)
        launcher = self.launcher(private=private, start=spec.start)
        if spec.network == network.PRIVATE and (refusal := launcher.refusal):
            raise LaunchError(f"ranks can't have a network of their own: {refusal.why}; {refusal.remedy}")
        return launcher

    @property
    def networks(self) -> list[str]:
        """The networks that ranks are on, in words, with the reason if it is the host's."""
        return [text for launcher in self._launchers.values() if (text := launcher.network)]

    @property
    def interfaces(self) -> list[str]:
        """The network interface by which ranks of each host reached others, in words; none on one host."""
        return sorted({text for launcher in self._launchers.values() for text in launcher.interfaces})

    def _world(self, spec: WorldSpec, devices: Sequence[str]) -> World:
        relieve = functools.partial(self._retire_on, devices)
        return World(spec, lambda: self._launcher_of(spec), devices=devices, terminal=self._terminal, relieve=relieve)

    def acquire(self, spec: WorldSpec, devices: Sequence[str] = ()) -> World:
        """Return a world of this kind whose ranks are up: a warm one if there is one, else a fresh one.

        Errors: :class:`~harness.worlds.postmortem.RanksFailed` if its ranks do not come up.
        """
        key = spec, tuple(devices)
        for launcher in self._launchers.values():
            launcher.poll()  # ranks that have ended since the last test are no test's fault
        world = self._warm.pop(key, None) or self._take_begun(key)
        if world is not None and not world.live:
            world.kill()
            world = None
        if world is None:
            world = self._world(spec, devices)
        world.runs = 0
        try:
            world.start()
        except BaseException:
            world.kill()
            raise
        return world

    def begin(self, spec: WorldSpec, devices: Sequence[str] = ()) -> None:
        """Start a fresh world ahead of its use: the next :meth:`acquire` of an equal one takes it.

        This is a no-op for a warm spec, or if an equal world was begun already.
        """
        key = spec, tuple(devices)
        if not spec.warm and key not in self._begun:
            world = self._world(spec, devices)
            world.begin()
            self._begun[key] = world, _surroundings()

    def _take_begun(self, key: tuple[WorldSpec, tuple[str, ...]]) -> World | None:
        """Return the world that was begun for this key, and kill all others that were begun.

        Returns None if there is none, or if what its ranks inherit has changed since.
        """
        world, surroundings = self._begun.pop(key, (None, None))
        self.forget_begun()
        if world is not None and surroundings != _surroundings():
            world.kill()
            return None
        return world

    def release(self, world: World, devices: Sequence[str] = ()) -> list[str]:
        """Take a world back.  Returns the residue in a warm world that another test could have noticed.

        Errors: :class:`~harness.worlds.postmortem.RanksFailed` if the ranks of a fresh world do not end as they should.
        """
        if not world.spec.warm:
            world.close()
            return []
        left = world.check()
        if left or not world.live:
            self.retired.append((world.spec, tuple(left)))
            world.kill()
            return left
        self._warm[world.spec, tuple(devices)] = world
        while len(self._warm) > 1 and (old := self._superfluous()) is not None:
            self._warm.pop(old).close()
        return []

    def _superfluous(self) -> tuple[WorldSpec, tuple[str, ...]] | None:
        """Return the oldest warm world of too many, in all or on a device; None if there are not too many.

        Each rank takes memory of its device while it waits.
        """
        if len(self._warm) > self._most_warm:
            return next(iter(self._warm))
        ranks = Counter(device for _, devices in self._warm for device in devices)
        crowded = {device for device, count in ranks.items() if count > self._most_on_a_device}
        return next((key for key in self._warm if crowded & set(key[1])), None)

    def devices_of(self, spec: WorldSpec) -> tuple[str, ...]:
        """Return the devices of the warm world with this spec that was used last; empty if none waits."""
        return next((devices for waiting, devices in reversed(self._warm) if waiting == spec), ())

    def _retire_on(self, devices: Collection[str]) -> None:
        """End the warm worlds that wait on any of these devices, because a world there lacks memory."""
        for key in [key for key in self._warm if not set(devices).isdisjoint(key[1])]:
            self._warm.pop(key).kill()
            self.retired.append((key[0], ("a world on its devices lacked memory",)))

    def forget_begun(self) -> None:
        """Kill worlds that were begun and not acquired."""
        while self._begun:
            self._begun.popitem()[1][0].kill()

    def close(self) -> None:
        """Kill every world and close the launchers."""
        self.forget_begun()
        for world in self._warm.values():
            world.kill()
        self._warm.clear()
        while self._launchers:
            self._launchers.popitem()[1].close()


def _surroundings() -> object:
    """Return what ranks inherit from the controller when they start."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
    return environment, working_directory(), list(sys.path)
