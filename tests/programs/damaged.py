"""Worlds whose ranks are damaged, for tests of what finds out."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from harness import Pool, Rank, World, WorldSpec
from harness.stacks import replicate as composable_ddp


class Damaged:
    """Worlds whose ranks do something to themselves before they run a program."""

    def __init__(self, damage: Callable[[Rank], None]) -> None:
        self._damage = damage
        self._pool = Pool()
        self._live: dict[int, World] = {}

    def __call__(self, size: int) -> World:
        if size not in self._live:
            self._live[size] = self._pool.acquire(WorldSpec(size, timeout=30))
        world = self._live[size]
        damage = self._damage

        def damaged(fn: Callable[..., Any], args: tuple[Any, ...]) -> Callable[[Rank], Any]:
            def both(rank: Rank) -> Any:
                damage(rank)
                return fn(rank, *args)

            return both

        def run(fn: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
            return world.run(damaged(fn, args), **options)

        def run_beside(beside: Callable[[], object], fn: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
            return world.run_beside(beside, damaged(fn, args), **options)

        return SimpleNamespace(run=run, run_beside=run_beside, spec=world.spec, kill=world.kill)  # type: ignore[return-value]

    def close(self) -> None:
        self._pool.close()

    def __enter__(self) -> Damaged:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def unreduced(rank: Rank) -> None:
    def replicate(model: torch.nn.Module, **options: Any) -> torch.nn.Module:
        model.register_comm_hook = lambda *args: None  # type: ignore[assignment]
        return model

    composable_ddp.replicate = replicate  # type: ignore[assignment]
