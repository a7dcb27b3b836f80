"""What the gate suspects and may not say yet, as data: a duet with the accepted environment can tell it at once.

A suspicion is no alarm: among many series, some look like this in any night.  It only chooses what a duet measures, and
the duet uses none of the night's figures, so a wrong suspicion costs time and raises nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec
import numpy as np

from harness.bench.detection.changes import CONFIRM, Array, Noise, off_level
from harness.bench.figures import usual
from harness.bench.history.lines import Line
from harness.bench.records import Series

SUSPECT = 0.2
"""A series is suspected if noise alone makes it look as slow with at most this probability."""

STEP, LEARNING, DUETED, ALL = "step", "learning", "duet", "all"


class Suspicion(msgspec.Struct, frozen=True, kw_only=True):
    """A series that may have become slower."""

    series: Series
    kind: str
    """``step``: its newest nights are slow; ``learning``: history is too short to judge it; ``duet``: the last duet
    found it slower, and nobody accepted that; ``all``: nothing, but everything is to be measured."""
    ratio: float = 1.0
    """The size of the suspected step: the new level over the old."""
    chance: float = 1.0
    """The probability that noise alone makes this series look as slow, in any of the windows of nights."""
    nights: int = 1
    """The number of nights that show it best."""


def suspected(
    series: Sequence[Series], noise: Noise, told: Collection[Series], added: Array | None = None
) -> list[Suspicion]:
    """Return the series that look slower than they should, the least likely by chance first.

    ``series``: those of ``noise``, in order.  ``told``: series that the gate reports already.  ``added[window,
    series]``: a step to add to the newest nights, to see whether it is suspected.
    """
    off = off_level(noise, added)
    chances = np.nan_to_num(noise.slower.chances(off.standard), nan=1.0)[:, :-1]
    found = []
    for j, one in enumerate(series):
        nights = int(np.argmin(chances[:, j])) + 1
        chance = float(min(1.0, CONFIRM * chances[nights - 1, j]))
        size = float(np.nanmean(off.sized[-nights:, j])) if np.isfinite(off.sized[-nights:, j]).any() else 0.0
        if one not in told and size > 0 and chance <= SUSPECT:
            found.append(Suspicion(series=one, kind=STEP, ratio=float(np.exp(size)), chance=chance, nights=nights))
    return sorted(found, key=lambda one: (one.chance, -one.ratio, one.series.name))


def unknown(line: Line) -> list[Suspicion]:
    """Return the usual series of the newest night, if history can't judge any series of it yet."""
    return [Suspicion(series=one, kind=LEARNING) for one in line.figures[line.nights[-1].id] if usual(one)]
