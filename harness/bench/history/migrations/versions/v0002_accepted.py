"""Create the table of accepted alarms, with their reasons."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_table(
        "perf_accepted",
        sa.Column("number", sa.Integer, primary_key=True),
        sa.Column("fingerprint", sa.String(16), nullable=False, index=True),
        sa.Column("subject", sa.Text, nullable=False),
        sa.Column("profile", sa.Text, nullable=False),
        sa.Column("kind", sa.String(40), nullable=False),
        sa.Column("series", sa.String(32), nullable=False),
        sa.Column("night", sa.String(200), nullable=False),
        sa.Column("ratio", sa.Float(53), nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("who", sa.Text, nullable=False),
        sa.Column("at", sa.Float(53), nullable=False),
    )
