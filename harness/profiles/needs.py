"""The needs of a test, and whether the claims of a backend cover them."""

from __future__ import annotations

from dataclasses import dataclass

from harness.profiles.model import Claims
from harness.profiles.vocabulary import FEATURES
from harness.results import NotClaimed


@dataclass(frozen=True)
class Needs:
    """The things that a backend must support for a test."""

    stack: str = ""
    collective: str = ""
    dtype: str = ""
    op: str = ""
    features: tuple[str, ...] = ()
    torch: str = ""
    """A name of PyTorch's that not every version has, with its module, or a parameter of one in parentheses:
    ``torch.distributed.gather_single``, ``torch.distributed.all_gather_object(weights_only)``."""
    further: tuple[str, ...] = ()
    """Collectives beside :attr:`collective`, in no dtype in particular."""

    def unclaimed(self, claims: Claims, profile: str = "") -> NotClaimed | None:
        """Return the first need that is not claimed; None if all are.  ``profile``: the name of the claims' profile."""
        if what := claims.lacks_features(self.stack, ()):
            return NotClaimed(what=what, profile=profile, stack=self.stack)
        for name in self.features:
            if what := claims.lacks_features(self.stack, [name]):
                return NotClaimed(what=what, profile=profile, stack=self.stack, feature=name)
        for name in self.further:
            if what := claims.lacks(name, "", ""):
                return NotClaimed(what=what, profile=profile, collective=name)
        if not (self.collective or self.dtype or self.op):
            return None
        what = claims.lacks(self.collective, self.dtype, self.op)
        dtypes = (self.dtype,) if self.dtype else ()
        needed = NotClaimed(what=what, profile=profile, collective=self.collective, dtypes=dtypes, op=self.op)
        return needed if what else None

    @property
    def of_accelerators(self) -> str:
        """A needed feature that the host can't have, in words; empty if there is none."""
        known = FEATURES.get(self.stack, {})
        names = (name for name in self.features if name in known and known[name].of_accelerators)
        return next((known[name].meaning for name in names), "")
