"""Recompute the nights' figures from their samples, as the 25th percentile of iterations instead of the median."""

from __future__ import annotations

import zlib

import msgspec
import sqlalchemy as sa
from alembic import op

from harness.bench.records import Measurement, Series

revision = "0003"
down_revision = "0002"

_measurements = sa.table(
    "perf_measurements",
    *(sa.column(name) for name in ("night", "series", "value", "rounds", "samples")),
)
_NONE = Series(operation="")


def upgrade() -> None:
    c, connection = _measurements.c, op.get_bind()
    keys = connection.execute(sa.select(c.night, c.series).where(c.value.is_not(None))).all()
    for night, series in keys:  # one at a time: the samples of a long history do not fit into memory
        mine = (c.night == night, c.series == series)
        blob = connection.execute(sa.select(c.samples).where(*mine)).scalar_one()
        try:
            samples = msgspec.msgpack.decode(zlib.decompress(blob), type=list[list[list[float]]])
        except (zlib.error, msgspec.MsgspecError):
            continue  # keep the old figure; reading the samples reports the damage
        made = Measurement(series=_NONE, samples=samples)
        rounds = msgspec.json.encode(made.rounds()).decode()
        connection.execute(sa.update(_measurements).where(*mine).values(value=made.value, rounds=rounds))
