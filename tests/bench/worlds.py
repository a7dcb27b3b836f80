"""Worlds that benchmarks start, and runs that they time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from harness import Pool, Rank, World, WorldSpec
from harness.worlds.local import RANK_ENVIRONMENT
from harness.worlds.preloading import PRELOAD

HERE = Path(__file__).parent


class Bare:
    """The program that shows the floor."""

    def __init__(self, *options: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "bare.py"), ",".join(PRELOAD), *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            cwd=HERE.parents[1],
            env={**RANK_ENVIRONMENT, **os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1])},
        )
        assert self._process.stdout is not None
        self._process.stdout.readline()

    def __call__(self, command: str) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


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
