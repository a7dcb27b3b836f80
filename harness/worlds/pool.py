"""The pool: starts worlds, keeps warm ones, checks them after use, and retires what is not clean."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

from harness.worlds import network
from harness.worlds.handle import Launcher
from harness.worlds.launch import LaunchError, working_directory
from harness.worlds.local import LocalLauncher
from harness.worlds.terminal import Terminal
from harness.worlds.world import World, WorldSpec


class Pool:
    """Worlds for one controller.

    A fresh world is started for whoever asks and closed when it is given back.  A warm one is kept, if a look at it
    after use finds nothing that the next user could notice, and handed out again to whoever asks for an equal one.
    """

    def __init__(
        self,
        *,
        launcher: Callable[..., Launcher] = LocalLauncher,
        terminal: Terminal | None = None,
        most_warm: int = 4,
    ) -> None:
        self._make_launcher = launcher
        self._terminal = terminal
        self._most_warm = most_warm
        self._launchers: dict[bool, Launcher] = {}
        self._warm: dict[tuple[WorldSpec, tuple[str, ...]], World] = {}
        self._begun: dict[tuple[WorldSpec, tuple[str, ...]], tuple[World, object]] = {}
        self.retired: list[tuple[WorldSpec, tuple[str, ...]]] = []
        """Warm worlds that were not kept, and why."""
        self.replaced: list[str] = []
        """What became of servers in whose place there is another one now."""

    def prepare(self, asked: str = network.AUTO) -> None:
        """Start what ranks on the host are forked from, without waiting for it.  ``asked``: their network."""
        self.launcher(private=not network.needs_host(asked, "cpu", os.environ))

    def launcher(self, *, private: bool = True) -> Launcher:
        """The launcher of ranks on a network of their own, or on the host's; made anew if there was one and is lost."""
        found = self._launchers.get(private)
        if found is not None and not found.alive:
            self.replaced.append(found.lost)
            del self._launchers[private]
            found.close()
            found = None
        if found is None:
            found = self._launchers[private] = self._make_launcher(private=private)
        return found

    def _launcher_of(self, spec: WorldSpec) -> Launcher:
        """The launcher of a world's ranks.  Errors: LaunchError where there is no network as it was asked for."""
        variables = {**os.environ, **dict(spec.env)}
        found = self.launcher(private=not network.needs_host(spec.network, spec.device, variables))
        if spec.network == network.PRIVATE and (refusal := found.refusal):
            raise LaunchError(f"ranks can't have a network of their own: {refusal.why}; {refusal.remedy}")
        return found

    @property
    def networks(self) -> list[str]:
        """Which networks ranks are on, in words, and why on the host's."""
        return [text for one in self._launchers.values() if (text := one.network)]

    def _world(self, spec: WorldSpec, devices: Sequence[str]) -> World:
        return World(spec, lambda: self._launcher_of(spec), devices=devices, terminal=self._terminal)

    def acquire(self, spec: WorldSpec, devices: Sequence[str] = ()) -> World:
        """A world of this kind whose ranks are there: a warm one if there is one, else a fresh one.

        Errors: :class:`~harness.worlds.postmortem.RanksFailed` if its ranks do not come up.
        """
        key = spec, tuple(devices)
        for launcher in self._launchers.values():
            launcher.poll()  # what has ended since the last test is no test's doing
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
        """Start a fresh world ahead of its use: the next :meth:`acquire` of an equal one takes it."""
        key = spec, tuple(devices)
        if not spec.warm and key not in self._begun:
            world = self._world(spec, devices)
            world.begin()
            self._begun[key] = world, _surroundings()

    def _take_begun(self, key: tuple[WorldSpec, tuple[str, ...]]) -> World | None:
        """The world that was started ahead for this, unless what its ranks inherit has changed since."""
        world, surroundings = self._begun.pop(key, (None, None))
        self.forget_begun()
        if world is not None and surroundings != _surroundings():
            world.kill()
            return None
        return world

    def release(self, world: World, devices: Sequence[str] = ()) -> list[str]:
        """Take a world back.  Returns what was found in it that another test could have noticed.

        Errors: :class:`~harness.worlds.postmortem.RanksFailed` if its ranks do not end as they should.
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
        while len(self._warm) > self._most_warm:
            oldest = next(iter(self._warm))
            self._warm.pop(oldest).close()
        return []

    def forget_begun(self) -> None:
        """Drop worlds that were started ahead and that nobody came for."""
        while self._begun:
            self._begun.popitem()[1][0].kill()

    def close(self) -> None:
        """End every world and stop what they were started from."""
        self.forget_begun()
        for world in self._warm.values():
            world.kill()
        self._warm.clear()
        while self._launchers:
            self._launchers.popitem()[1].close()


def _surroundings() -> object:
    """What ranks take over from the controller when they start."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
    return environment, working_directory(), list(sys.path)
