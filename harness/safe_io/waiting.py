"""Waiting for a descriptor, whatever its number: ``select`` rejects those above 1023, which large worlds have."""

from __future__ import annotations

import select
from typing import Protocol


class _HasDescriptor(Protocol):
    def fileno(self) -> int: ...


def readable(file: _HasDescriptor, seconds: float) -> bool:
    """Wait until a read would not block, for at most some seconds; returns whether it would not."""
    poll = select.poll()
    poll.register(file, select.POLLIN)
    return bool(poll.poll(max(0.0, seconds) * 1000))
