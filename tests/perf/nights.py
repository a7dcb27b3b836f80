"""Nights, made up."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from harness.bench.history.lines import Accepted, Figure, Line, Past
from harness.bench.records import Fingerprint, Measurement, Night, Series

MACHINE = Fingerprint(machine=(("cores", "2"), ("cpu", "one")), software=(("torch", "2.13"),))


def series(count: int = 3, **fields: object) -> list[Series]:
    """all_reduce of so many sizes, from 1 KiB on, each twice the last."""
    given = {"operation": "all_reduce", "dtype": "float32", "op": "sum", "world": 4, **fields}
    return [Series(bytes=1024 << i, **given) for i in range(count)]  # type: ignore[arg-type]


def night(
    name: str,
    *,
    started: float = 1.0,
    values: Sequence[float] = (1e-3, 2e-3, 4e-3),
    of: list[Series] | None = None,
    rounds: int = 3,
    **fields: object,
) -> Night:
    """A night whose series have these values, in seconds, with the same in all rounds."""
    of = series(len(values)) if of is None else of
    measurements = [
        Measurement(series=one, samples=[[[value * 0.9, value]] * 2] * rounds)
        for one, value in zip(of, values, strict=True)
    ]
    given = {"fingerprint": MACHINE, "commit": f"commit-{name}", "profile": "cpu-gloo", **fields}
    return Night(id=name, started=started, measurements=measurements, **given)  # type: ignore[arg-type]


def noisy(
    generator: np.random.Generator,
    nights: int,
    count: int,
    *,
    common: float = 0.03,
    own: float = 0.01,
    outliers: float = 0.01,
    bimodal: int = 0,
    drift: float = 0.0,
) -> np.ndarray:
    """Logarithms of values, ``[night, series]``: a factor that all share, noise of each, outliers, modes, drift.

    ``outliers``: share of figures that are off by about ten times the noise; ``bimodal``: so many of the series are
    10 % slower in one night of five.
    """
    level = generator.uniform(-9, -3, count)
    shared = common * generator.standard_normal((nights, 1)) * generator.uniform(0.5, 1.5, count)
    single = own * generator.uniform(0.5, 1.5, count) * generator.standard_normal((nights, count))
    off = (generator.random((nights, count)) < outliers) * generator.exponential(10 * own, (nights, count))
    modes = 0.1 * (generator.random((nights, count)) < 0.2) * (np.arange(count) < bimodal)
    return level + shared + single + off + modes + drift * np.arange(nights)[:, None]


def line(logs: np.ndarray, of: list[Series], accepted: Sequence[Accepted] = (), **fields: object) -> Line:
    """A line of nights with these logarithms of values, NaN where a series is missing; a day apart."""
    nights, figures = [], {}
    for i, row in enumerate(logs):
        here = {s: float(np.exp(x)) for s, x in zip(of, row, strict=True) if np.isfinite(x)}
        past = Past(
            id=f"n{i}",
            started=86400.0 * (i + 1),
            fingerprint=MACHINE.key,
            commit=f"c{i:02d}",
            profile="cpu-gloo",
            profile_hash="",
            subject="torch",
            complete=True,
            measured=len(here),
        )
        nights.append(past)
        figures[past.id] = {s: Figure(value=x, rounds=[x * 0.999, x, x * 1.001]) for s, x in here.items()}
    return Line(nights=nights, figures=figures, accepted=list(accepted), **fields)  # type: ignore[arg-type]
