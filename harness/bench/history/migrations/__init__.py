"""Migrations of the history's schema, which run in order when a history is opened."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection

VERSION_TABLE = "perf_version"


class TooNew(ValueError):
    """A database whose schema this Concord does not know."""


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    return config


def known() -> list[str]:
    """Return the schemas that this Concord knows, newest first."""
    return [script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions()]


def current(connection: Connection) -> str:
    """Return the schema of a database; empty if it has none of ours."""
    context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
    return context.get_current_revision() or ""


def upgrade(connection: Connection, to: str = "head") -> None:
    """Migrate a database to a schema, in the connection's current transaction.

    Errors: TooNew if the database has a schema that this Concord does not know.
    """
    schema, names = current(connection), known()
    if schema and schema not in names:
        raise TooNew(f"its schema is {schema}, and this Concord knows up to {names[0]}: update Concord")
    config = _config()
    config.attributes.update(connection=connection, version_table=VERSION_TABLE)
    command.upgrade(config, to)
