"""Rows of the history about duets: the accepted environments, and what duets with them said about a night's series."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import msgspec
import sqlalchemy as sa

from harness.bench.history import schema
from harness.bench.history.lines import Baseline, Dueted, Past
from harness.bench.records import Fingerprint, Series

_AT_ONCE = 500
"""Databases limit the number of parameters."""


def machine_of(fingerprint: Fingerprint) -> str:
    """Return a short name of the machine alone: its software may change from night to night."""
    return hashlib.sha256(msgspec.json.encode(fingerprint.machine, order="deterministic")).hexdigest()[:16]


def baseline(connection: sa.Connection, night: Past, fingerprint: Fingerprint) -> Baseline | None:
    """Return the newest accepted environment of a night's machine, subject and profile."""
    b = schema.baselines.c
    mine = (b.machine == machine_of(fingerprint), b.subject == night.subject, b.profile == night.profile)
    columns = [b[name] for name in Baseline.__struct_fields__]
    row = connection.execute(sa.select(*columns).where(*mine).order_by(b.number.desc()).limit(1)).first()
    return Baseline(**row._mapping) if row is not None else None


def set_baseline(connection: sa.Connection, night: Past, fingerprint: Fingerprint, given: Baseline) -> None:
    """Insert an accepted environment."""
    line = {"machine": machine_of(fingerprint), "subject": night.subject, "profile": night.profile}
    connection.execute(sa.insert(schema.baselines).values(**line, **msgspec.structs.asdict(given)))


def add(connection: sa.Connection, found: Sequence[Dueted]) -> None:
    """Insert what a duet said."""
    rows = [
        {**msgspec.structs.asdict(one), "series": one.series.key if one.series is not None else ""} for one in found
    ]
    if rows:
        connection.execute(sa.insert(schema.dueted), rows)


def dueted(connection: sa.Connection, nights: Sequence[str], since: float, known: Mapping[str, Series]) -> list[Dueted]:
    """Return what duets of some nights said since a time, in the order in which they said it."""
    d = schema.dueted.c
    columns = [d[name] for name in Dueted.__struct_fields__]
    found = []
    for i in range(0, len(nights), _AT_ONCE):
        query = sa.select(*columns).where(d.night.in_(nights[i : i + _AT_ONCE]), d.at >= since)
        for row in connection.execute(query):
            fields = dict(row._mapping)
            found.append(Dueted(**fields | {"series": known[row.series] if row.series else None}))
    return sorted(found, key=lambda one: one.at)
