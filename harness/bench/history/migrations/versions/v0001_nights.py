"""Create the tables of fingerprints, nights, series and measurements."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "perf_fingerprints",
        sa.Column("key", sa.String(16), primary_key=True),
        sa.Column("machine", sa.Text, nullable=False),
        sa.Column("software", sa.Text, nullable=False),
    )
    op.create_table(
        "perf_nights",
        sa.Column("number", sa.Integer, primary_key=True),
        sa.Column("id", sa.String(200), nullable=False, unique=True),
        sa.Column("started", sa.Float(53), nullable=False, index=True),
        sa.Column("fingerprint", sa.String(16), sa.ForeignKey("perf_fingerprints.key"), nullable=False, index=True),
        sa.Column("revision", sa.String(200), nullable=False),
        sa.Column("profile", sa.Text, nullable=False),
        sa.Column("profile_hash", sa.String(200), nullable=False),
        sa.Column("subject", sa.Text, nullable=False),
        sa.Column("arguments", sa.Text, nullable=False),
        sa.Column("complete", sa.Boolean, nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
    )
    op.create_table(
        "perf_series",
        sa.Column("key", sa.String(32), primary_key=True),
        sa.Column("operation", sa.Text, nullable=False),
        sa.Column("metric", sa.String(40), nullable=False),
        sa.Column("bytes", sa.BigInteger, nullable=False),
        sa.Column("dtype", sa.String(80), nullable=False),
        sa.Column("op", sa.String(80), nullable=False),
        sa.Column("world", sa.Integer, nullable=False),
        sa.Column("backend", sa.String(80), nullable=False),
        sa.Column("device", sa.String(80), nullable=False),
        sa.Column("variant", sa.Text, nullable=False),
    )
    op.create_table(
        "perf_measurements",
        sa.Column("night", sa.Integer, sa.ForeignKey("perf_nights.number", ondelete="CASCADE"), primary_key=True),
        sa.Column("series", sa.String(32), sa.ForeignKey("perf_series.key"), primary_key=True),
        sa.Column("value", sa.Float(53)),
        sa.Column("rounds", sa.Text, nullable=False),
        sa.Column("p50", sa.Float(53)),
        sa.Column("p95", sa.Float(53)),
        sa.Column("p99", sa.Float(53)),
        sa.Column("first", sa.Float(53), nullable=False),
        sa.Column("clock", sa.String(40), nullable=False),
        sa.Column("started", sa.Float(53), nullable=False),
        sa.Column("refused", sa.Text, nullable=False),
        sa.Column("samples", sa.LargeBinary, nullable=False),
    )
