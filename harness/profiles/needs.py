"""What a test needs of a backend, as data, and whether claims cover it."""

from __future__ import annotations

from dataclasses import dataclass

from harness.profiles.model import Claims
from harness.profiles.vocabulary import FEATURES


@dataclass(frozen=True)
class Needs:
    """What a test needs of a backend."""

    stack: str = ""
    collective: str = ""
    dtype: str = ""
    op: str = ""
    features: tuple[str, ...] = ()

    def unclaimed(self, claims: Claims) -> str:
        """What of it is not claimed, in words; empty if all is."""
        of_collective = ""
        if self.collective or self.dtype or self.op:
            of_collective = claims.lacks(self.collective, self.dtype, self.op)
        return claims.lacks_features(self.stack, self.features) or of_collective

    @property
    def of_accelerators(self) -> str:
        """What of it the host can't have, in words; empty if nothing."""
        known = FEATURES.get(self.stack, {})
        names = (name for name in self.features if name in known and known[name].of_accelerators)
        return next((known[name].meaning for name in names), "")
