"""Records of the benchmarks: series, measurements, nights and fingerprints.

A *series* is one figure that is measured every night, for example an ``all_reduce`` of 1 MiB of float32 on 4 ranks.  A
*measurement* holds the raw samples of a series in one night: rounds of iterations, with every rank's time of each.  A
*night* is one run of the benchmarks and its environment.  All of this is plain data; nothing here needs torch.
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
"""The quantile of iterations that is a night's figure.  It is low because disturbances only add time, now and then."""

STEP = "step."
"""What the operation of a training step begins with."""
LINK = "link"
"""The metric of a link's bandwidth in GB/s (10^9), as the profile says it."""
COUNTS = ("collectives", "bytes", LINK)
"""Metrics that are counts and not times, or constants: any change of one is reported."""


class Series(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The identity of a figure from night to night.  Equal series are the same figure."""

    operation: str
    """A collective (``all_reduce``), a training step (``step.replicate``), or a name that a package chose."""
    metric: str = "time"
    """``time``: seconds of one iteration; ``compute`` and ``communication``: seconds of these parts of a step alone;
    ``exposed``: seconds of communication that no compute hides; ``collectives`` and ``bytes``: their number in one
    iteration.  Lower is better for all of them.  ``link``: a constant of the profile."""
    bytes: int = 0
    """Message size as nccl-tests counts it; 0 if there is no message."""
    dtype: str = ""
    op: str = ""
    """The reduction: ``sum``, ``max``; empty if there is none."""
    world: int = 0
    """Number of participating ranks."""
    backend: str = ""
    device: str = ""
    variant: tuple[tuple[str, str], ...] = ()
    """Other distinguishing properties, sorted by name: ``(("mode", "async"), ("place", "out"))``."""

    @property
    def name(self) -> str:
        """A name for people; only equal series have the same name."""
        size = size_of(self.bytes) if self.bytes else ""
        words = (self.operation, self.op, self.dtype, size, f"{self.world} ranks" if self.world else "")
        where = f"{self.backend} on {self.device}" if self.backend else ""
        rest = ", ".join(f"{name} {value}" for name, value in self.variant)
        metric = self.metric if self.metric != "time" else ""
        return " · ".join(filter(None, (" ".join(filter(None, words)), where, rest, metric)))

    @property
    def is_step(self) -> bool:
        """Whether it is of a training step, and not of one collective."""
        return self.operation.startswith(STEP)

    @property
    def how(self) -> str:
        """The variant, for people."""
        return ", ".join(value if name == "group" else f"{name} {value}" for name, value in self.variant)

    @property
    def key(self) -> str:
        """A short name for storage: the first 32 hexadecimal digits of the SHA-256 of its fields.

        Fields with their default values are left out, by equality: msgspec compares by identity, so a series that was
        read from a database would have another name.
        """
        plain = {field.name: field.default for field in msgspec.structs.fields(Series)}
        kept = {name: value for name, value in msgspec.structs.asdict(self).items() if value != plain[name]}
        return hashlib.sha256(msgspec.json.encode(kept)).hexdigest()[:32]


class Measurement(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The raw result of a series in one night.

    ``samples[round][iteration][rank]``: for ``time``, seconds from the rank's start of the iteration to its end.
    """

    series: Series
    samples: list[list[list[float]]]
    first: float = 0.0
    """Seconds of the very first call, which also opens connections; 0: unknown."""
    clock: str = "monotonic"
    """``monotonic``: the ranks' clock; ``events``: device events; ``synchronized``: the ranks' clock, with a device
    synchronization in every iteration."""
    started: float = 0.0
    """Seconds since the epoch."""
    refused: str = ""
    """Why the figure is rejected (an artifact, such as a bandwidth above the physical limit); empty: it is accepted."""

    def iterations(self) -> list[float]:
        """Return the slowest rank's figure of each iteration, of all rounds."""
        return [figure for figures in self._slowest() for figure in figures]

    def rounds(self) -> list[float]:
        """Return the :data:`SHARE` quantile of each round's iterations on the slowest rank."""
        return [percentile(figures, 100 * SHARE) for figures in self._slowest()]

    @property
    def value(self) -> float:
        """The night's figure: the :data:`SHARE` quantile of iterations, with equal weight for every round.

        Errors: ValueError if there are no samples.
        """
        slowest = self._slowest()
        weighted = sorted((figure, 1 / len(figures)) for figures in slowest for figure in figures)
        passed = itertools.accumulate(weight for _, weight in weighted)
        for (figure, _), share in zip(weighted, passed, strict=True):
            if share >= SHARE * len(slowest) - 1e-9:
                return figure
        raise ValueError(f"{self.series.name}: no samples")

    def _slowest(self) -> list[list[float]]:
        return [[max(ranks) for ranks in iterations] for iterations in self.samples if iterations]


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The environment that a figure depends on.  Figures with different fingerprints are never compared."""

    machine: tuple[tuple[str, str], ...] = ()
    """Sorted pairs: processor, cores, memory, accelerators and their number."""
    software: tuple[tuple[str, str], ...] = ()
    """Sorted pairs: torch, Python, kernel, the backend's libraries, and variables that change how ranks run."""

    @property
    def key(self) -> str:
        """A short name: the first 16 hexadecimal digits of its SHA-256."""
        return hashlib.sha256(msgspec.json.encode(self, order="deterministic")).hexdigest()[:16]


class Night(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One run of the benchmarks."""

    schema: str = SCHEMA
    version: int = VERSION
    id: str
    """A unique name, created when the run starts."""
    started: float
    fingerprint: Fingerprint
    commit: str = ""
    """Commit of the code under test, as the caller gives it; by default PyTorch's (``torch.version.git_version``)."""
    profile: str = ""
    profile_hash: str = ""
    subject: str = "torch"
    arguments: list[str] = []
    complete: bool = True
    """Whether the run finished."""
    measurements: list[Measurement] = []


def pairs(named: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the values that are not empty with their names, sorted by name."""
    return tuple((name, value) for name, value in sorted(named.items()) if value)


def day_of(seconds: float) -> str:
    """Format seconds since the epoch for people, in UTC: ``2026-11-22 03:00``."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")


def size_of(count: int) -> str:
    """Format a number of bytes for people, powers of two exactly: ``8 B``, ``64 KiB``, ``1 MiB``, ``1.5 MiB``."""
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.4g} {units[0]}"


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile of values, interpolated linearly.  ``percent``: 0 to 100.  Errors: ValueError if empty."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
