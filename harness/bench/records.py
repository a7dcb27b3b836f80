"""What is measured: series, the samples of one night, and what it was measured on.

A *series* is one figure that is taken again every night, say an ``all_reduce`` of 1 MiB of float32 on 4 ranks.  A
*measurement* is what one night said of it, raw: rounds of iterations, every rank's time of each.  A *night* is one run
of the benchmarks with what it ran on.  Plain data; nothing here needs torch.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

import msgspec

SCHEMA = "concord.perf"
VERSION = 1

SHARE = 0.25
"""Of iterations that a night's figure is not below: what disturbs only adds time, and comes and goes."""

COUNTS = ("collectives", "bytes")
"""Metrics that are no times: any change of them is one."""


class Series(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What names a figure from night to night.  Equal series are the same figure."""

    operation: str
    """A collective (``all_reduce``), or a step of training (``step.replicate``), or what a package calls its own."""
    metric: str = "time"
    """``time``: seconds of one iteration; ``exposed``: seconds of communication that no compute hides; ``collectives``,
    ``bytes``: how many in one iteration.  Less is better for all of them."""
    bytes: int = 0
    """Size of the message as nccl-tests counts it; 0 for what has none."""
    dtype: str = ""
    op: str = ""
    """Of a reduction: ``sum``, ``max``."""
    world: int = 0
    """Number of ranks that take part."""
    backend: str = ""
    device: str = ""
    variant: tuple[tuple[str, str], ...] = ()
    """What else tells it from others, sorted by name: ``(("mode", "async"), ("place", "out"))``."""

    @property
    def name(self) -> str:
        """For people, and the same for equal series only."""
        size = size_of(self.bytes) if self.bytes else ""
        words = (self.operation, self.op, self.dtype, size, f"{self.world} ranks" if self.world else "")
        where = f"{self.backend} on {self.device}" if self.backend else ""
        rest = ", ".join(f"{name} {value}" for name, value in self.variant)
        metric = self.metric if self.metric != "time" else ""
        return " · ".join(filter(None, (" ".join(filter(None, words)), where, rest, metric)))

    @property
    def how(self) -> str:
        """What else tells it from others, for people."""
        return ", ".join(value if name == "group" else f"{name} {value}" for name, value in self.variant)

    @property
    def key(self) -> str:
        """A short name for storage: SHA-256 of what it says, 32 hexadecimal digits of it."""
        return hashlib.sha256(msgspec.json.encode(self, order="deterministic")).hexdigest()[:32]


class Measurement(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What one night said of a series.

    ``samples[round][iteration][rank]``: for ``time`` seconds from the rank's start of the iteration to its end.
    """

    series: Series
    samples: list[list[list[float]]]
    first: float = 0.0
    """Seconds that the very first call took, connections and all; 0: not known."""
    clock: str = "monotonic"
    """``monotonic``: the ranks' clock; ``events``: of the device."""
    started: float = 0.0
    """Seconds since the epoch."""
    refused: str = ""
    """Why the figure is none (an artefact, as one above the physical limit); empty: it is one."""

    def iterations(self) -> list[float]:
        """The slowest rank's figure, iteration by iteration, of all rounds."""
        return [figure for one in self._slowest() for figure in one]

    def rounds(self) -> list[float]:
        """What :data:`SHARE` of a round's iterations do not exceed on the slowest rank, round by round."""
        return [percentile(one, 100 * SHARE) for one in self._slowest()]

    @property
    def value(self) -> float:
        """The night's figure: what :data:`SHARE` of iterations do not exceed, every round weighing the same.

        Errors: ValueError if there are no samples.
        """
        slowest = self._slowest()
        weighted = sorted((figure, 1 / len(one)) for one in slowest for figure in one)
        passed = itertools.accumulate(weight for _, weight in weighted)
        for (figure, _), share in zip(weighted, passed, strict=True):
            if share >= SHARE * len(slowest) - 1e-9:
                return figure
        raise ValueError(f"{self.series.name}: no samples")

    def _slowest(self) -> list[list[float]]:
        return [[max(ranks) for ranks in one] for one in self.samples if one]


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a figure depends on besides the code under test.  Figures of different fingerprints are never compared."""

    machine: tuple[tuple[str, str], ...] = ()
    """Sorted: processor, cores, memory, accelerators and how many."""
    software: tuple[tuple[str, str], ...] = ()
    """Sorted: torch, python, kernel, libraries of the backend, and variables that change how ranks run."""

    @property
    def key(self) -> str:
        """A short name: 16 hexadecimal digits of its SHA-256."""
        return hashlib.sha256(msgspec.json.encode(self, order="deterministic")).hexdigest()[:16]


class Night(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One run of the benchmarks."""

    schema: str = SCHEMA
    version: int = VERSION
    id: str
    """Unique, made when the run starts."""
    started: float
    fingerprint: Fingerprint
    commit: str = ""
    """Of what is under test, as the caller says it; by default that of PyTorch (``torch.version.git_version``)."""
    profile: str = ""
    profile_hash: str = ""
    subject: str = "torch"
    arguments: list[str] = []
    complete: bool = True
    """Whether the run came to its end."""
    measurements: list[Measurement] = []


def pairs(named: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """What is not empty, sorted by name."""
    return tuple((name, value) for name, value in sorted(named.items()) if value)


def day_of(seconds: float) -> str:
    """A time since the epoch, for people, in UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")


def size_of(count: int) -> str:
    """Bytes for people, exact where they are a power of two: ``8 B``, ``64 KiB``, ``1 MiB``, ``1.5 MiB``."""
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.4g} {units[0]}"


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that ``percent`` of them do not exceed, interpolated.  Errors: ValueError if empty."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
