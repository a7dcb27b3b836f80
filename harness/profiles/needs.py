"""The needs of a test, and whether the claims of a backend cover them."""

from __future__ import annotations

from dataclasses import dataclass

from harness.profiles.model import Claims
from harness.profiles.vocabulary import FEATURES


@dataclass(frozen=True)
class Needs:
    """The things that a backend must support for a test."""

    stack: str = ""
    collective: str = ""
    dtype: str = ""
    op: str = ""
    features: tuple[str, ...] = ()

    def unclaimed(self, claims: Claims) -> str:
        """Describe a need that is not claimed; empty if all are."""
        of_collective = ""
        if self.collective or self.dtype or self.op:
            of_collective = claims.lacks(self.collective, self.dtype, self.op)
        return claims.lacks_features(self.stack, self.features) or of_collective

    @property
    def of_accelerators(self) -> str:
        """A needed feature that the host can't have, in words; empty if there is none."""
        known = FEATURES.get(self.stack, {})
        names = (name for name in self.features if name in known and known[name].of_accelerators)
        return next((known[name].meaning for name in names), "")
