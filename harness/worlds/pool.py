"""The pool: starts worlds, keeps warm ones, checks them after use, and retires what is not clean."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

from harness.worlds.launch import Launcher, LocalLauncher, working_directory
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
        launcher: Callable[[], Launcher] = LocalLauncher,
        terminal: Terminal | None = None,
        most_warm: int = 4,
    ) -> None:
        self._make_launcher = launcher
        self._terminal = terminal
        self._most_warm = most_warm
        self._launcher: Launcher | None = None
        self._warm: dict[tuple[WorldSpec, tuple[str, ...]], World] = {}
        self._begun: dict[tuple[WorldSpec, tuple[str, ...]], tuple[World, object]] = {}
        self.retired: list[tuple[WorldSpec, tuple[str, ...]]] = []
        """Warm worlds that were not kept, and why."""

    def prepare(self) -> None:
        """Start what ranks are forked from, without waiting for it."""
        self.launcher()

    def launcher(self) -> Launcher:
        """The launcher; made anew if the one there was has died."""
        if self._launcher is not None and not getattr(self._launcher, "alive", True):
            self._launcher.close()
            self._launcher = None
        if self._launcher is None:
            self._launcher = self._make_launcher()
        return self._launcher

    def acquire(self, spec: WorldSpec, devices: Sequence[str] = ()) -> World:
        """A world of this kind whose ranks are there: a warm one if there is one, else a fresh one.

        Errors: :class:`~harness.worlds.postmortem.RanksFailed` if its ranks do not come up.
        """
        key = spec, tuple(devices)
        world = self._warm.pop(key, None) or self._take_begun(key)
        if world is None:
            world = World(spec, self.launcher, devices=devices, terminal=self._terminal)
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
            world = World(spec, self.launcher, devices=devices, terminal=self._terminal)
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
        if self._launcher is not None:
            self._launcher.close()
            self._launcher = None


def _surroundings() -> object:
    """What ranks take over from the controller when they start."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
    return environment, working_directory(), list(sys.path)
