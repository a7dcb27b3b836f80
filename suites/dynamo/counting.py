"""A module that counts in a variable of its own, for code of other modules."""

from __future__ import annotations

total = 0
"""How often something was counted."""


def count() -> int:
    """Count once, and return the count."""
    global total
    total += 1
    return total


def counted() -> int:
    """Count by another function of this module."""
    return count()


class Counter:
    """An object that counts by functions of this module."""

    def counted(self) -> int:
        """Count by a function that calls another one."""
        return counted()
