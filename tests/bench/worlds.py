"""Worlds that benchmarks start, and runs that they time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from harness import Pool, Rank, World, WorldSpec


class Fresh:
    """Starts a world of a specification; the next one starts after :meth:`end`."""

    def __init__(self, pool: Pool, spec: WorldSpec) -> None:
        self._pool = pool
        self._spec = spec
        self._world: World | None = None

    def start(self) -> None:
        self._world = self._pool.acquire(self._spec)

    def end(self) -> None:
        if self._world is not None:
            self._pool.release(self._world)
            self._world = None

    def seconds(self) -> float:
        """Return what a start takes."""
        taken = seconds_of(self.start)
        self.end()
        return taken


def seconds_of(run: Callable[[], Any]) -> float:
    """Return what a call takes."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def all_reduce(rank: Rank) -> None:
    """Sum four float32 numbers of each rank."""
    dist.all_reduce(torch.ones(4))
