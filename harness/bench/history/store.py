"""The history of benchmarks: nights in a database, SQLite by default, and the alarms that were accepted.

A night is stored in one transaction, so a writer that is killed leaves nothing of that night and changes nothing else.
Several processes may write at once: SQLite takes its write lock when a transaction begins and waits for it, and
PostgreSQL handles concurrent writers itself.
"""

from __future__ import annotations

import hashlib
import os
import re
import sqlite3
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import sqlalchemy as sa
from filelock import FileLock, Timeout
from sqlalchemy import event
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, SQLAlchemyError

from harness.bench.history import duets as of_duets
from harness.bench.history import migrations, schema
from harness.bench.history.lines import Accepted, Baseline, Dueted, Figure, Line, Past
from harness.bench.history.nights import check
from harness.bench.records import Fingerprint, Measurement, Night, Series, percentile
from harness.redaction import Redactor, Url

VARIABLE = "CONCORD_HISTORY"
PATIENCE = 60.0
"""Seconds to wait for other writers."""

_IN_FILES_NAMES = ("/", "./", "../", "~")
"""Prefixes that mark a place as the name of a file."""
_MIGRATING = 0x636F6E63
"""Key of the PostgreSQL advisory lock that a process holds while it changes the schema."""


class HistoryError(ValueError):
    """A history that cannot be used.  The message says which, what is wrong and what to do, and shows no credentials.

    Drivers' errors are never its cause: they quote the URL, and a traceback shows causes.
    """


def default_place() -> str:
    """Return the default place of the history: ``$CONCORD_HISTORY``, or a file in the user's state folder."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return os.environ.get(VARIABLE) or str(Path(state).expanduser() / "concord" / "perf.sqlite")


class History:
    """An open history; a context manager.  Every method raises HistoryError if the history cannot be used."""

    def __init__(self, place: str | Path | None = None) -> None:
        """Open a history; create it if it is missing, and migrate it if its schema is older.

        ``place``: a file, or a URL that SQLAlchemy knows; by default :func:`default_place`.
        """
        given = str(place or default_place())
        self._redacted = Redactor({}, [given])
        if not isinstance(place, Path):
            _check_address(given, by_variable=not place and bool(os.environ.get(VARIABLE)))
        self.place = str(Url(given)) if "://" in given else given
        try:
            self._url = _url_of(given)
        except (ArgumentError, ValueError) as e:
            raise HistoryError(f"{self.place}: no URL of a database: {self._redacted(str(e))}") from None
        self._file = Path(self._url.database) if self._sqlite and self._url.database else None
        if self._file:
            self.place = str(self._file)
        with self._errors():
            self._engine = self._connected()
            try:
                self._migrate()
            except BaseException:
                self._engine.dispose()
                raise

    def __enter__(self) -> History:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections to the database."""
        self._engine.dispose()

    @property
    def _sqlite(self) -> bool:
        return self._url.get_backend_name() == "sqlite"

    def _connected(self) -> sa.Engine:
        if not self._sqlite:
            return sa.create_engine(self._url, pool_pre_ping=True)
        if self._file:
            self._file.parent.mkdir(parents=True, exist_ok=True)
        engine = sa.create_engine(self._url, connect_args={"timeout": PATIENCE})
        event.listen(engine, "connect", _prepare_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
        return engine

    def _migrate(self) -> None:
        """Migrate the schema to the newest, one process at a time."""
        if self._file:
            with FileLock(f"{self._file}.lock", timeout=PATIENCE), self._engine.connect() as connection:
                journal = connection.connection.driver_connection
                assert journal is not None
                if journal.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
                    _refuse_foreign(connection)
                    connection.rollback()
                    journal.execute("PRAGMA journal_mode=WAL")
        with self._writing() as connection:
            if connection.dialect.name == "postgresql":
                connection.execute(sa.text("SELECT pg_advisory_xact_lock(:key)"), {"key": _MIGRATING})
            if not migrations.current(connection) and self._sqlite:
                _refuse_foreign(connection)
            migrations.upgrade(connection)

    @contextmanager
    def _writing(self) -> Iterator[sa.Connection]:
        with self._errors(), self._engine.connect() as connection:
            connection = connection.execution_options(writes=True)
            with connection.begin():
                yield connection

    @contextmanager
    def _reading(self) -> Iterator[sa.Connection]:
        with self._errors(), self._engine.connect() as connection:
            yield connection

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except migrations.TooNew as e:
            raise HistoryError(f"{self.place}: written by a newer Concord: {e}") from e
        except (NoSuchModuleError, ModuleNotFoundError) as e:
            raise HistoryError(f"{self.place}: no driver for such a database: {e}: install it") from e
        except (DBAPIError, sqlite3.Error) as e:  # sqlite3.Error comes from calls that bypass SQLAlchemy
            raise HistoryError(f"{self.place}: {self._redacted(_reason(e))}") from None
        except (msgspec.MsgspecError, KeyError) as e:
            raise HistoryError(f"{self.place}: {_damaged(self._redacted(str(e)))}") from None
        except Timeout as e:
            raise HistoryError(f"{self.place}: another process has kept it locked for {PATIENCE:.0f} s") from e
        except (SQLAlchemyError, OSError, UnicodeError) as e:
            raise HistoryError(f"{self.place}: {self._redacted(str(e))}") from None

    def add(self, night: Night) -> bool:
        """Store a night.  Returns False if it was already stored.

        A later state of the same night replaces an incomplete night.  Errors: HistoryError if a complete night with
        this id and different contents is stored; BadNight if the night is inconsistent.
        """
        check(night)
        rows = [_row(one) for one in night.measurements]
        contents = msgspec.json.encode(night, order="deterministic")
        digest = hashlib.sha256(contents).hexdigest()
        with self._writing() as connection:
            if connection.dialect.name == "postgresql":  # of two writers of one night, the second finds it stored
                key = int.from_bytes(hashlib.sha256(night.id.encode()).digest()[:8], signed=True)
                connection.execute(sa.text("SELECT pg_advisory_xact_lock(:key)"), {"key": key})
            stored = connection.execute(sa.select(schema.nights).where(schema.nights.c.id == night.id)).first()
            if stored and stored.digest == digest:
                return False
            if stored and stored.complete:
                raise HistoryError(f"{self.place}: night {night.id} is there already, with other contents")
            if stored:
                connection.execute(sa.delete(schema.measurements).where(schema.measurements.c.night == stored.number))
                connection.execute(sa.delete(schema.nights).where(schema.nights.c.number == stored.number))
            one = night.fingerprint
            texts = {"machine": msgspec.json.encode(one.machine).decode()}
            texts["software"] = msgspec.json.encode(one.software).decode()
            self._insert_missing(connection, schema.fingerprints, [{"key": one.key, **texts}])
            named = [_series_row(measured.series) for measured in night.measurements]
            self._insert_missing(connection, schema.series, sorted(named, key=lambda row: str(row["key"])))
            (number,) = connection.execute(
                sa.insert(schema.nights).values(
                    id=night.id,
                    started=night.started,
                    fingerprint=one.key,
                    revision=night.commit,
                    profile=night.profile,
                    profile_hash=night.profile_hash,
                    subject=night.subject,
                    arguments=msgspec.json.encode(night.arguments).decode(),
                    complete=night.complete,
                    digest=digest,
                )
            ).inserted_primary_key or (None,)
            if rows:
                connection.execute(sa.insert(schema.measurements), [{"night": number, **row} for row in rows])
        return True

    def _insert_missing(self, connection: sa.Connection, table: sa.Table, rows: list[dict[str, Any]]) -> None:
        """Insert the rows whose key is missing.  Another writer may insert the same rows at the same time."""
        if not rows:
            return
        if connection.dialect.name in ("sqlite", "postgresql"):
            from sqlalchemy.dialects import postgresql, sqlite

            dialect = sqlite if connection.dialect.name == "sqlite" else postgresql
            connection.execute(dialect.insert(table).on_conflict_do_nothing(), rows)
            return
        known = set(connection.scalars(sa.select(table.c.key).where(table.c.key.in_([row["key"] for row in rows]))))
        missing = [row for row in rows if row["key"] not in known]
        if missing:
            connection.execute(sa.insert(table), missing)

    def nights(self) -> list[Past]:
        """Return all nights, oldest first."""
        n, m = schema.nights.c, schema.measurements.c
        counted = sa.select(m.night, sa.func.count().label("measured")).group_by(m.night).subquery()
        query = (
            sa.select(schema.nights, sa.func.coalesce(counted.c.measured, 0).label("measured"))
            .outerjoin(counted, counted.c.night == n.number)
            .order_by(n.started, n.number)
        )
        with self._reading() as connection:
            return [
                Past(
                    id=row.id,
                    started=row.started,
                    fingerprint=row.fingerprint,
                    commit=row.revision,
                    profile=row.profile,
                    profile_hash=row.profile_hash,
                    subject=row.subject,
                    complete=bool(row.complete),
                    measured=row.measured,
                )
                for row in connection.execute(query)
            ]

    def figures(self, nights: list[str]) -> dict[str, dict[Series, Figure]]:
        """Return the figures of nights, by the night's id and by series."""
        n, m, s = schema.nights.c, schema.measurements.c, schema.series.c
        columns = (n.id, m.series, m.value, m.rounds, m.p50, m.p95, m.p99, m.refused)
        by_night: dict[str, dict[Series, Figure]] = {night: {} for night in nights}
        with self._reading() as connection:
            known = {row.key: _series(row) for row in connection.execute(sa.select(*s))}
            for i in range(0, len(nights), 500):  # databases limit the number of parameters
                joined = sa.select(*columns).join_from(schema.measurements, schema.nights, m.night == n.number)
                for row in connection.execute(joined.where(n.id.in_(nights[i : i + 500]))):
                    by_night[row.id][known[row.series]] = Figure(
                        value=row.value,
                        rounds=msgspec.json.decode(row.rounds, type=list[float]),
                        p50=row.p50,
                        p95=row.p95,
                        p99=row.p99,
                        refused=row.refused,
                    )
        return by_night

    def samples(self, night: str, series: Series) -> list[list[list[float]]]:
        """Return the raw samples ``[round][iteration][rank]``.  Errors: HistoryError if there are none."""
        n, m = schema.nights.c, schema.measurements.c
        joined = sa.select(m.samples).join_from(schema.measurements, schema.nights, m.night == n.number)
        with self._reading() as connection:
            blob = connection.scalar(joined.where(n.id == night, m.series == series.key))
        if blob is None:
            raise HistoryError(f"{self.place}: no {series.name} in night {night}")
        try:
            return msgspec.msgpack.decode(zlib.decompress(blob), type=list[list[list[float]]])
        except (zlib.error, msgspec.MsgspecError) as e:
            raise HistoryError(f"{self.place}: samples of {series.name} in night {night} are damaged: {e}") from e

    def line(self, night: str = "") -> Line:
        """Return a night, by default the newest, and the earlier nights that it can be compared with.

        ``night``: its id, or a beginning of its id that no other one has.  Errors: HistoryError if there is no night,
        none with this id, or several.
        """
        nights = self.nights()
        if not nights:
            raise HistoryError(f"{self.place}: no nights yet: measure one with `concord perf run`")
        begin = [one for one in nights if one.id.startswith(night)] if night else nights[-1:]
        chosen = [one for one in begin if one.id == night] or begin
        if len(chosen) != 1:
            how = f"{len(chosen)} nights whose ids begin with" if chosen else "no night"
            raise HistoryError(f"{self.place}: {how} {night}")
        (newest,) = chosen
        nights = [one for one in nights[: nights.index(newest) + 1] if _same(one, newest, "subject", "profile")]
        mine = [one for one in nights if one.fingerprint == newest.fingerprint]
        before = next((one for one in reversed(nights) if one.fingerprint != newest.fingerprint), None)
        fingerprint = self.fingerprint(newest.fingerprint)
        baseline = self.baseline(newest, fingerprint)
        return Line(
            nights=mine,
            figures=self.figures([one.id for one in mine]),
            accepted=self.accepted(newest),
            dueted=self._dueted([one.id for one in mine], baseline.at if baseline else 0.0),
            baseline=baseline,
            fingerprint=fingerprint,
            before=before,
            other=self.fingerprint(before.fingerprint) if before else Fingerprint(),
        )

    def newest(self, subject: str) -> Line | None:
        """Return the line of the newest night of a subject; None if there is none."""
        found = [night.id for night in self.nights() if night.subject == subject]
        return self.line(found[-1]) if found else None

    def fingerprint(self, key: str) -> Fingerprint:
        """Return the fingerprint with this key."""
        with self._reading() as connection:
            row = connection.execute(sa.select(schema.fingerprints).where(schema.fingerprints.c.key == key)).one()
            machine, software = (
                msgspec.json.decode(text, type=tuple[tuple[str, str], ...]) for text in (row.machine, row.software)
            )
        return Fingerprint(machine=machine, software=software)

    def accept(self, night: Past, accepted: list[Accepted]) -> None:
        """Record that alarms of a night were accepted: all of them, or none."""
        line = {"fingerprint": night.fingerprint, "subject": night.subject, "profile": night.profile}
        with self._writing() as connection:
            for one in accepted:
                connection.execute(sa.insert(schema.accepted).values(**line, **msgspec.structs.asdict(one)))

    def accepted(self, night: Past) -> list[Accepted]:
        """Return the accepted alarms of this night's line (same fingerprint, subject and profile), in order."""
        a = schema.accepted.c
        mine = (a.fingerprint == night.fingerprint, a.subject == night.subject, a.profile == night.profile)
        query = sa.select(*[a[name] for name in Accepted.__struct_fields__]).where(*mine).order_by(a.number)
        with self._reading() as connection:
            return [Accepted(**row._mapping) for row in connection.execute(query)]

    def baseline(self, night: Past, fingerprint: Fingerprint) -> Baseline | None:
        """Return the accepted environment of a night's machine, subject and profile; None if there is none."""
        with self._reading() as connection:
            return of_duets.baseline(connection, night, fingerprint)

    def set_baseline(self, night: Past, fingerprint: Fingerprint, given: Baseline) -> None:
        """Record the accepted environment of a night's machine, subject and profile."""
        with self._writing() as connection:
            of_duets.set_baseline(connection, night, fingerprint, given)

    def add_dueted(self, found: list[Dueted]) -> None:
        """Record what a duet said: all of it, or nothing."""
        with self._writing() as connection:
            of_duets.add(connection, found)

    def _dueted(self, nights: list[str], since: float) -> list[Dueted]:
        with self._reading() as connection:
            s = schema.series.c
            known = {row.key: _series(row) for row in connection.execute(sa.select(*s))}
            return of_duets.dueted(connection, nights, since, known)


def _same(one: Past, other: Past, *fields: str) -> bool:
    return all(getattr(one, field) == getattr(other, field) for field in fields)


def _check_address(place: str, *, by_variable: bool) -> None:
    """Reject a place that is neither a URL nor clearly the name of a file.  Errors: HistoryError.

    ``postgresql:/user:password@host/perf`` is a URL that lacks a slash.  Taken as a file, it would create a folder with
    the password in its name.
    """
    is_file = place.startswith(_IN_FILES_NAMES) or not re.match(r"[A-Za-z][\w+.-]*:|[^@]*@", place)
    if "://" in place or (is_file and ("?" not in place or Path(place).expanduser().exists())):
        return
    shown = str(Url(f"file://{place}")).removeprefix("file://")
    raise HistoryError(
        f"{f'${VARIABLE}' if by_variable else 'history'}: neither a URL nor the name of a file: {shown}: give a URL "
        "with ://, as postgresql://user@host/perf or sqlite:////folder/file, or for a file with such a name ./NAME"
    )


def _url_of(place: str) -> sa.URL:
    if "://" not in place:
        return sa.URL.create("sqlite", database=str(Path(place).expanduser()))
    url = sa.make_url(place)
    if url.drivername in ("postgresql", "postgres"):
        return url.set(drivername="postgresql+psycopg")
    return url


def _prepare_sqlite(connection: Any, _: Any) -> None:
    connection.isolation_level = None  # we begin transactions ourselves, and those that write take the lock at once
    connection.execute("PRAGMA foreign_keys=ON")
    connection.execute("PRAGMA synchronous=FULL")


def _begin_sqlite(connection: sa.Connection) -> None:
    writes = connection.get_execution_options().get("writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _refuse_foreign(connection: sa.Connection) -> None:
    """Reject another program's database.  Errors: HistoryError; DBAPIError if the file is not an SQLite file."""
    others = sorted(sa.inspect(connection).get_table_names())
    if others and not any(name.startswith(schema.PREFIX) for name in others):
        where = connection.engine.url.database
        raise HistoryError(f"{where}: not a history: it has tables of another program ({', '.join(others[:3])})")


def _damaged(why: str) -> str:
    return f"damaged ({why}): restore it from a copy, or move it away and store the nights' files again"


def _reason(error: DBAPIError | sqlite3.Error) -> str:
    text = " ".join(str(error.orig if isinstance(error, DBAPIError) else error).split())
    if "not a database" in text:
        return "not a history: no SQLite file; give another file, or move this one away"
    if "malformed" in text:
        return _damaged(text)
    if "is full" in text or "No space left" in text or "disk I/O error" in text:
        return f"cannot be written ({text}): make room on its disk, and do this again; what was stored before is there"
    if "readonly" in text:
        return f"cannot be written ({text}): give yourself the right to write to it, or copy it and give the copy"
    if "unable to open" in text:
        return f"cannot be opened ({text}): is it a folder, or not yours to write?"
    if "locked" in text:
        return f"another process has kept it locked for {PATIENCE:.0f} s ({text})"
    return text


def _row(one: Measurement) -> dict[str, Any]:
    """Return the row of a measurement; its figures are None if there are no samples."""
    iterations, rounds = one.iterations(), one.rounds()
    percentiles = {f"p{p}": percentile(iterations, p) if iterations else None for p in (50, 95, 99)}
    return {
        "series": one.series.key,
        "value": one.value if rounds else None,
        "rounds": msgspec.json.encode(rounds).decode(),
        **percentiles,
        "first": one.first,
        "clock": one.clock,
        "started": one.started,
        "refused": one.refused,
        "samples": zlib.compress(msgspec.msgpack.encode(one.samples)),
    }


def _series_row(series: Series) -> dict[str, Any]:
    fields = msgspec.structs.asdict(series)
    return {"key": series.key, **fields, "variant": msgspec.json.encode(series.variant).decode()}


def _series(row: Any) -> Series:
    fields = {name: getattr(row, name) for name in Series.__struct_fields__ if name != "variant"}
    return Series(**fields, variant=msgspec.json.decode(row.variant, type=tuple[tuple[str, str], ...]))
