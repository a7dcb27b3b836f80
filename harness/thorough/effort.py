"""How much a run does: ``CONCORD_EXAMPLES`` and ``CONCORD_BUDGET``."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

EXAMPLES = "CONCORD_EXAMPLES"
"""Environment variable: ``smoke``, ``default``, ``thorough``, or a factor."""
BUDGET = "CONCORD_BUDGET"
"""Environment variable: the time for all properties of a thorough run together, as in ``8h`` or ``1h30m``."""
STATE = "CONCORD_STATE"
"""Environment variable: the folder of a thorough run's state; ``reports/out/thorough`` by default."""

LARGEST = 10_000.0
"""The largest factor; with it, a run of all suites would take years."""
SHARES = {"smoke": 0.1, "default": 1.0, "thorough": 50.0}
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class EffortError(ValueError):
    """A variable has an invalid value; the message names it and says what it takes."""


@dataclass(frozen=True)
class Effort:
    """The requested effort."""

    share: float = 1.0
    """The factor by which numbers of examples are multiplied."""
    thorough: bool = False
    budget: float = 0.0
    """Seconds for all properties of a thorough run together; 0 if numbers of examples end it instead."""

    def examples(self, count: int) -> int:
        """Return the number of examples of a property that has ``count`` of them by default."""
        return max(1, round(count * self.share))


def effort(environment: Mapping[str, str] = os.environ) -> Effort:
    """Return the effort that the environment requests. Errors: EffortError for an invalid value."""
    asked, budget = environment.get(EXAMPLES, ""), environment.get(BUDGET, "")
    if asked in SHARES or not asked:
        share = SHARES[asked or "default"]
    else:
        try:
            share = float(asked)
        except ValueError:
            share = math.nan
        if not 0 < share <= LARGEST:
            known = f"one of {', '.join(SHARES)}, or a factor above 0 such as 2.5, up to {LARGEST:g}"
            raise EffortError(f"{EXAMPLES}={asked!r}: {known}")
    if not budget:
        return Effort(share, asked == "thorough")
    seconds = duration(budget, BUDGET)
    if asked != "thorough":
        raise EffortError(f"{BUDGET}={budget!r} is for thorough runs: set {EXAMPLES}=thorough as well, or unset it")
    return Effort(share, True, seconds)


def duration(text: str, name: str) -> float:
    """Return a time with its units in seconds.  ``name``: of what has it.  Errors: EffortError."""
    parts = re.findall(r"(\d+(?:\.\d+)?)([smhd])", text)
    seconds = sum(float(number) * _SECONDS[unit] for number, unit in parts)
    if "".join(number + unit for number, unit in parts) != text or not 0 < seconds < math.inf:
        raise EffortError(f"{name}={text!r}: a time above 0 with its units, as in 90s, 30m, 8h or 1h30m")
    return seconds


def shown(seconds: float) -> str:
    """Format a time for people, as in ``45s``, ``12m30s`` or ``8h05m``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02}m"
