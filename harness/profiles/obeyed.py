"""The claims that apply to the running test: they limit what it draws, and which of its cases it runs.

The plug-in sets them around a test, and code in the same process asks for them.  Ranks do not have them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from harness.profiles.model import EVERYTHING, Claims, Platform, Profile
from harness.profiles.vocabulary import REDUCING
from harness.results import NotClaimed


@dataclass(frozen=True)
class Obeyed:
    """The claims and tolerances of a profile on the platform of this process."""

    profile: str = ""
    """The profile's name; empty if there is none."""
    claims: Claims = EVERYTHING
    factors: Mapping[str, float] = field(default_factory=dict)
    """By dtype, the factor that multiplies the allowed rounding bound."""

    sizes: tuple[int, ...] | None = None
    """The world sizes that the test can have here, if it draws its own; None: any."""

    def fits(self, size: int) -> bool:
        """Return whether the test can have a world of this size here."""
        return self.sizes is None or size in self.sizes

    def factor(self, dtypes: Iterable[str]) -> float:
        """Return the largest factor of some dtypes."""
        return max((self.factors.get(dtype, 1.0) for dtype in dtypes), default=1.0)

    def not_claimed(self, what: str, dtypes: Iterable[str], collective: str = "", op: str = "") -> NotClaimed:
        """Return the cause for which a test that needs one of these dtypes does not run.

        ``what``: its need in words; ``collective``, ``op``: empty for any.
        """
        op = op if collective in ("", *REDUCING) else ""
        return NotClaimed(what=what, profile=self.profile, collective=collective, dtypes=tuple(dtypes), op=op)


_NOTHING = Obeyed()
_in_force: list[Obeyed] = []


def of(profile: Profile | None, platform: Platform) -> Obeyed:
    """Return the claims of a profile on a platform; without a profile, claims that allow everything."""
    if profile is None:
        return _NOTHING
    factors = {t.dtype: t.factor for t in profile.tolerances if t.when.holds(platform)}
    return Obeyed(profile.name, profile.claims.on(platform), factors)


@contextlib.contextmanager
def obeying(obeyed: Obeyed) -> Iterator[None]:
    """Apply these claims inside the context."""
    _in_force.append(obeyed)
    try:
        yield
    finally:
        _in_force.remove(obeyed)


def in_force() -> Obeyed:
    """Return the claims that apply now; if none were set, claims that allow everything."""
    return _in_force[-1] if _in_force else _NOTHING
