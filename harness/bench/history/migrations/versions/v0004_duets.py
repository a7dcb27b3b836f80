"""Create the tables of accepted environments, and of what duets with them said.

Also rename series in accepted alarms: their names were computed with a field that belongs left out if it is ``time``.
"""

from __future__ import annotations

import hashlib

import msgspec
import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.create_table(
        "perf_baselines",
        sa.Column("number", sa.Integer, primary_key=True),
        sa.Column("machine", sa.String(16), nullable=False, index=True),
        sa.Column("subject", sa.Text, nullable=False),
        sa.Column("profile", sa.Text, nullable=False),
        sa.Column("environment", sa.Text, nullable=False),
        sa.Column("make", sa.Text, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("who", sa.Text, nullable=False),
        sa.Column("at", sa.Float(53), nullable=False),
    )
    op.create_table(
        "perf_dueted",
        sa.Column("number", sa.Integer, primary_key=True),
        sa.Column("night", sa.String(200), nullable=False, index=True),
        sa.Column("series", sa.String(32), nullable=False),
        sa.Column("verdict", sa.String(40), nullable=False),
        sa.Column("ratio", sa.Float(53)),
        sa.Column("low", sa.Float(53)),
        sa.Column("high", sa.Float(53)),
        sa.Column("median", sa.Boolean, nullable=False),
        sa.Column("margin", sa.Float(53), nullable=False),
        sa.Column("against", sa.Text, nullable=False),
        sa.Column("why", sa.Text, nullable=False),
        sa.Column("at", sa.Float(53), nullable=False),
    )
    s, accepted = _series.c, _accepted.c
    connection = op.get_bind()
    for row in connection.execute(sa.select(*s).where(s.metric == "time")).all():
        connection.execute(sa.update(_accepted).where(accepted.series == _misnamed(row)).values(series=row.key))


_series = sa.table(
    "perf_series",
    *(
        sa.column(name)
        for name in ("key", "operation", "metric", "bytes", "dtype", "op", "world", "backend", "device", "variant")
    ),
)
_accepted = sa.table("perf_accepted", sa.column("series"))


def _misnamed(row: sa.Row[tuple[object, ...]]) -> str:
    """Return the name that accepting an alarm gave to a series."""
    fields = {name: value for name, value in row._mapping.items() if value and name not in ("key", "variant")}
    variant = msgspec.json.decode(row.variant)
    kept = fields | ({"variant": variant} if variant else {})
    return hashlib.sha256(msgspec.json.encode(kept)).hexdigest()[:32]
