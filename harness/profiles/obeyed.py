"""The claims that the test which runs now has to obey: what it draws, and which of its cases it leaves out.

Set by the plug-in around a test, asked for in the same process: ranks never know of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from harness.profiles.model import EVERYTHING, Claims, Platform, Profile


@dataclass(frozen=True)
class Obeyed:
    """What a profile claims and allows on the platform of this process."""

    profile: str = ""
    """Its name; empty if nothing is to be obeyed."""
    claims: Claims = EVERYTHING
    factors: Mapping[str, float] = field(default_factory=dict)
    """By dtype, how many times the bound from rounding is allowed."""

    def factor(self, dtypes: Iterable[str]) -> float:
        """The largest factor of some dtypes."""
        return max((self.factors.get(dtype, 1.0) for dtype in dtypes), default=1.0)

    def why_not(self, what: str) -> str:
        """Why a test does not run that needs what is not claimed."""
        return f"not claimed: {what} (profile {self.profile})"


_NOTHING = Obeyed()
_in_force: list[Obeyed] = []


def of(profile: Profile | None, platform: Platform) -> Obeyed:
    """What is to be obeyed under a profile on a platform; without one, nothing."""
    if profile is None:
        return _NOTHING
    factors = {t.dtype: t.factor for t in profile.tolerances if t.when.holds(platform)}
    return Obeyed(profile.name, profile.claims.on(platform), factors)


@contextlib.contextmanager
def obeying(obeyed: Obeyed) -> Iterator[None]:
    """Have these claims in force."""
    _in_force.append(obeyed)
    try:
        yield
    finally:
        _in_force.remove(obeyed)


def in_force() -> Obeyed:
    """The claims that are in force; those that allow everything where none were set."""
    return _in_force[-1] if _in_force else _NOTHING
