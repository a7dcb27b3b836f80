"""Schemas of the history, one after the other; run when a history is opened."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection

VERSION_TABLE = "perf_version"


class TooNew(ValueError):
    """The schema is none that this Concord knows."""


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    return config


def known() -> list[str]:
    """The schemas that this Concord knows, the newest first."""
    return [script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions()]


def current(connection: Connection) -> str:
    """The schema that a database has; empty: none of ours."""
    context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
    return context.get_current_revision() or ""


def upgrade(connection: Connection, to: str = "head") -> None:
    """Bring a database to a schema, in the transaction that the connection is in.

    Errors: TooNew if the database has a schema that this Concord does not know.
    """
    found, names = current(connection), known()
    if found and found not in names:
        raise TooNew(f"its schema is {found}, and this Concord knows up to {names[0]}: update Concord")
    config = _config()
    config.attributes.update(connection=connection, version_table=VERSION_TABLE)
    command.upgrade(config, to)
