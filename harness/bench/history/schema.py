"""The tables of the history in its newest schema.  ``migrations`` has the steps that create them."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
)

PREFIX = "perf_"
"""Prefix of every table, because a team's database may also hold other data."""

metadata = MetaData()

fingerprints = Table(
    "perf_fingerprints",
    metadata,
    Column("key", String(16), primary_key=True),
    Column("machine", Text, nullable=False),
    Column("software", Text, nullable=False),
)

nights = Table(
    "perf_nights",
    metadata,
    Column("number", Integer, primary_key=True),
    Column("id", String(200), nullable=False, unique=True),
    Column("started", Float(53), nullable=False, index=True),
    Column("fingerprint", String(16), ForeignKey("perf_fingerprints.key"), nullable=False, index=True),
    Column("revision", String(200), nullable=False),
    Column("profile", Text, nullable=False),
    Column("profile_hash", String(200), nullable=False),
    Column("subject", Text, nullable=False),
    Column("arguments", Text, nullable=False),
    Column("complete", Boolean, nullable=False),
    Column("digest", String(64), nullable=False),
)

series = Table(
    "perf_series",
    metadata,
    Column("key", String(32), primary_key=True),
    Column("operation", Text, nullable=False),
    Column("metric", String(40), nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("dtype", String(80), nullable=False),
    Column("op", String(80), nullable=False),
    Column("world", Integer, nullable=False),
    Column("backend", String(80), nullable=False),
    Column("device", String(80), nullable=False),
    Column("variant", Text, nullable=False),
)

measurements = Table(
    "perf_measurements",
    metadata,
    Column("night", Integer, ForeignKey("perf_nights.number", ondelete="CASCADE"), primary_key=True),
    Column("series", String(32), ForeignKey("perf_series.key"), primary_key=True),
    Column("value", Float(53)),
    Column("rounds", Text, nullable=False),
    Column("p50", Float(53)),
    Column("p95", Float(53)),
    Column("p99", Float(53)),
    Column("first", Float(53), nullable=False),
    Column("clock", String(40), nullable=False),
    Column("started", Float(53), nullable=False),
    Column("refused", Text, nullable=False),
    Column("samples", LargeBinary, nullable=False),
)

accepted = Table(
    "perf_accepted",
    metadata,
    Column("number", Integer, primary_key=True),
    Column("fingerprint", String(16), nullable=False, index=True),
    Column("subject", Text, nullable=False),
    Column("profile", Text, nullable=False),
    Column("kind", String(40), nullable=False),
    Column("series", String(32), nullable=False),
    Column("night", String(200), nullable=False),
    Column("ratio", Float(53), nullable=False),
    Column("reason", Text, nullable=False),
    Column("who", Text, nullable=False),
    Column("at", Float(53), nullable=False),
)

baselines = Table(
    "perf_baselines",
    metadata,
    Column("number", Integer, primary_key=True),
    Column("machine", String(16), nullable=False, index=True),
    Column("subject", Text, nullable=False),
    Column("profile", Text, nullable=False),
    Column("environment", Text, nullable=False),
    Column("make", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("who", Text, nullable=False),
    Column("at", Float(53), nullable=False),
)

dueted = Table(
    "perf_dueted",
    metadata,
    Column("number", Integer, primary_key=True),
    Column("night", String(200), nullable=False, index=True),
    Column("series", String(32), nullable=False),
    Column("verdict", String(40), nullable=False),
    Column("ratio", Float(53)),
    Column("low", Float(53)),
    Column("high", Float(53)),
    Column("median", Boolean, nullable=False),
    Column("margin", Float(53), nullable=False),
    Column("against", Text, nullable=False),
    Column("why", Text, nullable=False),
    Column("at", Float(53), nullable=False),
)
