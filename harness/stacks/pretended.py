"""Pretended worlds of any size in one process.

Their collectives do nothing, so they only answer questions about layouts that need none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import distributed_c10d as c10d

__all__ = ["FakeTensorMode", "mark_of", "options", "pretended"]

FIRST_NAME = 1_000_000
"""Groups are named by numbers from here on, so that no name is one of the process's own."""

GROUPS = ("_pg_map", "_pg_names", "_pg_group_ranks", "_pg_backend_config", "_tags_to_pg", "_pg_to_tag")
"""The registries of a process's groups."""


@contextmanager
def pretended(rank: int, size: int) -> Iterator[None]:
    """Make this process a rank of a world of that size, and restore it afterwards.

    The process's own world must have one rank, because DTensor remembers meshes by their ranks.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers a backend, which others don't need

    registry: Any = vars(c10d)
    own = registry["_world"].default_pg
    assert own is None or own.size() == 1 < size
    empty: dict[str, Any] = {name: {} for name in GROUPS}
    fresh = {**empty, "_world": registry["_world"].__class__(), "_group_count": FIRST_NAME}
    kept = {name: registry[name] for name in fresh}
    registry.update(fresh)
    try:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        yield
    finally:
        for name in registry["_pg_names"].values():
            registry["_unregister_process_group"](name)
        registry.update(kept)
        registry["_update_default_pg"](own)


def options(mark: int = 0, *, refuses: bool = False, seconds: int | None = None) -> Any:
    """Return options for a group of a pretended world.

    ``refuses``: its collectives raise an error. ``seconds``: the timeout, which other backends can be given as well.
    """
    from torch._C._distributed_c10d import FakeProcessGroup

    backend: Any = FakeProcessGroup  # torch's stubs know it only as a backend
    made = backend.Options()
    made.fake_option, made.error_on_collective = mark, refuses
    if seconds is not None:
        made._timeout = timedelta(seconds=seconds)
    return made


def mark_of(group: Any) -> int | None:
    """Return the mark of the options that a group of a pretended world was made with, None if it has none."""
    found = group._get_backend(torch.device("cpu")).options
    return None if found is None else int(found.fake_option)
