"""How many collectives a rank issues while it runs a function.

Python's calls of a process group's methods are counted by name (:mod:`harness.worlds.recorder`).  Groups have sequence
numbers, which also count what C++ issues (DDP's reducer, functional collectives).
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import Counter
from typing import NamedTuple

_LOCK = threading.Lock()
_NEW: list[str] = []
"""The names of collectives that have not been added up yet."""
_BY_NAME: Counter[str] = Counter()

count = _NEW.append
"""Count a collective that Python issues; its argument: the name as in torch.distributed's public API.

Threads may call it at the same time, as hooks of the autograd engine issue collectives on threads of their own. It has
no frame that Dynamo could trace.
"""


class Mark(NamedTuple):
    """The counts at some time."""

    by_name: dict[str, int]
    on_groups: dict[str, int]
    """The sequence number of each group by its name."""


def now() -> Mark:
    """Return the counts so far."""
    with _LOCK:
        many = len(_NEW)  # other threads may append meanwhile
        _BY_NAME.update(_NEW[:many])
        del _NEW[:many]
        return Mark(dict(_BY_NAME), _sequence_numbers())


def since(before: Mark) -> tuple[dict[str, int], int]:
    """Return how often each collective was issued from Python since a time, and how many there were on groups.

    The second figure has only groups that there are now.
    """
    after = now()
    by_name = {name: total - before.by_name.get(name, 0) for name, total in after.by_name.items()}
    on_groups = sum(max(0, number - before.on_groups.get(name, 0)) for name, number in after.on_groups.items())
    return {name: times for name, times in by_name.items() if times}, on_groups


def _sequence_numbers() -> dict[str, int]:
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    found: dict[str, int] = {}
    for group in list(c10d._world.pg_map) if c10d is not None else ():
        with contextlib.suppress(Exception):  # a backend without sequence numbers
            found[str(group.group_name)] = int(group._get_sequence_number_for_group())
    return found
