"""How many collectives a rank issues while it runs a function.

Python's calls of a process group's methods are counted by name (:mod:`harness.worlds.recorder`).  Groups have sequence
numbers, which also count what C++ issues (DDP's reducer, functional collectives).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping

_ISSUED: list[str] = []
"""The names of the collectives since :func:`begin`."""

count = _ISSUED.append
"""Count a collective that Python issues; its argument: the name as in torch.distributed's public API.

Threads may call it at the same time, as hooks of the autograd engine issue collectives on threads of their own. It has
no frame that Dynamo could trace.
"""


def begin() -> dict[str, int]:
    """Begin to count anew, and return the sequence number of each group by its name."""
    _ISSUED.clear()
    return _sequence_numbers()


def since(before: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Return how often each collective was issued from Python since :func:`begin`, and how many there were on groups.

    ``before``: what it returned.  The second figure has only groups that there are now.
    """
    by_name: dict[str, int] = {}
    for name in _ISSUED:  # a Counter would ask what a mapping is, which costs a fresh process a millisecond
        by_name[name] = by_name.get(name, 0) + 1
    return by_name, sum(max(0, number - before.get(name, 0)) for name, number in _sequence_numbers().items())


def _sequence_numbers() -> dict[str, int]:
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    found: dict[str, int] = {}
    for group in list(c10d._world.pg_map) if c10d is not None else ():
        with contextlib.suppress(Exception):  # a backend without sequence numbers
            found[str(group.group_name)] = int(group._get_sequence_number_for_group())
    return found
