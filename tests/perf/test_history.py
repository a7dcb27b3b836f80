"""The history keeps what it was given: twice, at once, across kills, schemas and databases."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import sqlalchemy as sa

from harness.bench.history import migrations, schema
from harness.bench.history.lines import Accepted
from harness.bench.history.nights import BadNight
from harness.bench.history.store import VARIABLE, History, HistoryError, default_place
from harness.bench.records import Measurement
from tests.perf.nights import MACHINE, night, series

FULL = "cannot be written (database or disk is full): make room on its disk"
WRITER = [sys.executable, "-m", "tests.perf.writer"]
ROOT = Path(__file__).parents[2]


def test_gives_back_what_was_stored(place: str) -> None:
    """A night comes back with its figures, its raw samples and what it ran on, from another connection."""
    (one,) = series(1, variant=(("mode", "async"),))
    samples = [[[1.0, 2.0], [3.0, 1.0]], [[5.0, 5.0]]]
    given = night("a", values=(), arguments=["--quick"])
    given.measurements.append(Measurement(series=one, samples=samples, first=9.0))
    with History(place) as history:
        assert history.add(given)
    with History(place) as history:
        (listed,) = history.nights()
        figure = history.figures(["a"])["a"][one]
        assert (listed.id, listed.commit, listed.measured, listed.complete) == ("a", "commit-a", 1, True)
        assert (figure.value, figure.rounds, figure.p50) == (2.0, [2.25, 5.0], 3.0)
        assert history.samples("a", one) == samples
        assert history.fingerprint(listed.fingerprint) == MACHINE


def test_a_night_is_stored_once(place: str) -> None:
    """The same night again changes nothing; another one with its id is refused."""
    with History(place) as history:
        assert [history.add(night("a")), history.add(night("a"))] == [True, False]
        with pytest.raises(HistoryError, match="night a is there already, with other contents"):
            history.add(night("a", values=(5e-3,)))
        assert [listed.measured for listed in history.nights()] == [3]


def test_an_incomplete_night_is_completed(place: str) -> None:
    """What was stored of a run that had not ended gives way to the whole."""
    with History(place) as history:
        history.add(night("a", values=(1e-3,), complete=False))
        assert history.add(night("a", values=(1e-3, 2e-3)))
        assert [(listed.measured, listed.complete) for listed in history.nights()] == [(2, True)]


def test_several_writers_at_once(place: str) -> None:
    """Processes that make a history and write to it at the same time all have their nights in it, shared ones once."""
    writers = [
        subprocess.Popen([*WRITER, place, "store", f"w{i}", "4"], cwd=ROOT, stderr=subprocess.PIPE, text=True)
        for i in range(3)
    ]
    errors = [writer.communicate(timeout=60)[1] for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0, 0], errors
    with History(place) as history:
        assert {listed.id for listed in history.nights()} == {
            "shared",
            *(f"w{i}-{j}" for i in range(3) for j in range(4)),
        }
        assert {listed.measured for listed in history.nights()} == {3}


def test_a_killed_writer_leaves_no_half_night(place: str) -> None:
    """A writer that is killed between two statements leaves what was there, none of its night, and no lock."""
    with History(place) as history:
        history.add(night("before"))
    writer = subprocess.Popen(
        [*WRITER, place, "stop", "half"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == "in the midst\n"
    writer.kill()
    writer.communicate()
    with History(place) as history:
        assert [listed.id for listed in history.nights()] == ["before"]
        assert history.add(night("half"))
        assert [listed.measured for listed in history.nights()] == [3, 3]


def test_accepted_steps_are_kept_by_line(place: str) -> None:
    """An accepted step is found by nights of its own fingerprint, subject and profile, and by no others."""
    step = Accepted(kind="step", series="k", night="a", reason="new kernel", who="someone", at=1.5, ratio=1.25)
    with History(place) as history:
        history.add(night("a"))
        history.add(night("b", profile="other"))
        mine, other = history.nights()
        history.accept(mine, [step])
        assert (history.accepted(mine), history.accepted(other)) == ([step], [])


AFTER_THIRD = ("perf_baselines", "perf_dueted")
"""Tables that the third schema does not have."""


def older(place: str) -> sa.Engine:
    """A database with the first schema, and a night in it."""
    with History(place) as history:
        history.add(night("old"))
        engine = sa.create_engine(history._url)
    with engine.begin() as connection:
        for table in ("perf_accepted", *AFTER_THIRD):
            connection.execute(sa.text(f"DROP TABLE {table}"))
        connection.execute(sa.text(f"UPDATE {migrations.VERSION_TABLE} SET version_num = '0001'"))
    return engine


def test_an_older_schema_is_migrated(place: str) -> None:
    """What was written under the first schema is there under the newest, which takes what the first could not."""
    older(place).dispose()
    with History(place) as history:
        (listed,) = history.nights()
        history.accept(listed, [Accepted(kind="step", series="", night="old", reason="r", who="w", at=1.0)])
        assert [one.reason for one in history.accepted(listed)] == ["r"]


def test_older_figures_are_made_anew(place: str) -> None:
    """Medians, as the second schema had them, become 25th percentiles."""
    (one,) = series(1)
    given = night("a", values=())
    given.measurements.append(Measurement(series=one, samples=[[[1.0], [2.0], [3.0], [4.0], [9.0]]]))
    with History(place) as history:
        history.add(given)
        engine = sa.create_engine(history._url)
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE perf_measurements SET value = 3.0, rounds = '[3.0]'"))
        for table in AFTER_THIRD:
            connection.execute(sa.text(f"DROP TABLE {table}"))
        connection.execute(sa.text(f"UPDATE {migrations.VERSION_TABLE} SET version_num = '0002'"))
    engine.dispose()
    with History(place) as history:
        figure = history.figures(["a"])["a"][one]
        assert (figure.value, figure.rounds) == (2.0, [2.0])


def test_names_of_accepted_series_are_mended(place: str) -> None:
    """What was accepted under the third schema is about the same series under the newest."""
    of = series(2, variant=(("mode", "async"),))
    with History(place) as history:
        history.add(night("a", of=of, values=(1.0, 2.0)))
        engine = sa.create_engine(history._url)
    fields = {"operation": "all_reduce", "metric": "time", "bytes": 1024, "dtype": "float32", "op": "sum", "world": 4}
    misnamed = hashlib.sha256(msgspec.json.encode({**fields, "variant": of[0].variant})).hexdigest()[:32]
    with engine.begin() as connection:
        line = {"fingerprint": night("a").fingerprint.key, "subject": "torch", "profile": "cpu-gloo"}
        row = {"kind": "step", "night": "a", "ratio": 1.0, "reason": "r", "who": "w", "at": 1.0}
        connection.execute(sa.insert(schema.accepted).values(series=misnamed, **line, **row))
        for table in AFTER_THIRD:
            connection.execute(sa.text(f"DROP TABLE {table}"))
        connection.execute(sa.text(f"UPDATE {migrations.VERSION_TABLE} SET version_num = '0003'"))
    engine.dispose()
    with History(place) as history:
        found = history.line()
        assert [one.series for one in found.accepted] == [of[0].key]
        assert of[0].key in [one.key for one in found.figures["a"]]
        assert history.samples("a", next(iter(found.figures["a"])))


def test_migrations_make_what_the_tables_say(place: str) -> None:
    """All migrations in turn give the tables and columns that the code uses."""
    with History(place) as history:
        inspected = sa.inspect(history._engine)
        for table in schema.metadata.sorted_tables:
            made = {column["name"]: bool(column["nullable"]) for column in inspected.get_columns(table.name)}
            assert made == {column.name: bool(column.nullable) for column in table.columns}


def test_a_newer_schema_is_refused(place: str) -> None:
    """A schema of a later Concord is left alone, and the error says what to do."""
    engine = older(place)
    with engine.begin() as connection:
        connection.execute(sa.text(f"UPDATE {migrations.VERSION_TABLE} SET version_num = '0999'"))
    with pytest.raises(HistoryError, match=r"schema is 0999, and this Concord knows up to 0004: update Concord"):
        History(place)
    engine.dispose()


def test_another_programs_file_is_left_alone(tmp_path: Path) -> None:
    """A SQLite file of another program is refused, and not a byte of it is changed."""
    file = tmp_path / "bookmarks.sqlite"
    engine = sa.create_engine(f"sqlite:///{file}")
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE bookmarks (id INTEGER)"))
    engine.dispose()
    before = file.read_bytes()
    with pytest.raises(HistoryError, match=r"bookmarks.sqlite: not a history: it has tables of another program"):
        History(file)
    assert file.read_bytes() == before


def test_what_is_no_database_is_refused(tmp_path: Path) -> None:
    """A text, a folder, and a file that lost its end each get an error that names them."""
    text = tmp_path / "notes.txt"
    text.write_text("nights are long\n" * 100)
    with pytest.raises(HistoryError, match=r"notes.txt: not a history: no SQLite file"):
        History(text)
    with pytest.raises(HistoryError, match="cannot be opened"):
        History(tmp_path)
    damaged = tmp_path / "perf.sqlite"
    with History(damaged) as history:
        for i in range(30):
            history.add(night(f"n{i}"))
    data = bytearray(damaged.read_bytes())
    data[4096 : len(data) - 4096] = b"\xff" * (len(data) - 8192)
    damaged.write_bytes(data)
    with pytest.raises(HistoryError, match="perf.sqlite: damaged"), History(damaged) as history:
        history.nights()


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("nodatabase://x/y", "no driver for such a database"),
        ("postgresql://someone:secret@127.0.0.1:1/x", "refused"),
        ("a b://someone:secret@x", "no URL of a database"),
    ],
)
def test_places_that_are_none(place: str, says: str) -> None:
    """An URL that leads nowhere gets an error, without the password."""
    with pytest.raises(HistoryError, match=says) as raised:
        History(place)
    assert "secret" not in str(raised.value)


def test_damaged_samples_are_named(tmp_path: Path) -> None:
    """Samples that cannot be unpacked are an error that names series and night."""
    with History(tmp_path / "h.sqlite") as history:
        history.add(night("a"))
        with history._writing() as connection:
            connection.execute(sa.text("UPDATE perf_measurements SET samples = x'00'"))
        with pytest.raises(HistoryError, match="samples of all_reduce .* in night a are damaged"):
            history.samples("a", series(1)[0])
        with pytest.raises(HistoryError, match="no all_reduce .* in night b"):
            history.samples("b", series(1)[0])


def test_a_night_that_contradicts_itself_is_not_stored(tmp_path: Path) -> None:
    """Nothing of a bad night gets into the history."""
    bad = night("a", values=(1e-3, float("nan"), 1e-3))
    with History(tmp_path / "h.sqlite") as history:
        with pytest.raises(BadNight, match="not finite"):
            history.add(bad)
        assert history.nights() == []


def test_default_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The variable says where; without it, it is a file in the user's state."""
    monkeypatch.setenv(VARIABLE, "postgresql://x/y")
    assert default_place() == "postgresql://x/y"
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_place() == str(tmp_path / "concord" / "perf.sqlite")


def test_refused_measurement_without_samples(tmp_path: Path) -> None:
    """A figure that was refused is kept with its reason, and has no value."""
    given = night("a", values=())
    given.measurements.append(Measurement(series=series(1)[0], samples=[], refused="above the physical limit"))
    with History(tmp_path / "h.sqlite") as history:
        history.add(msgspec.json.decode(msgspec.json.encode(given), type=type(given)))
        (figure,) = history.figures(["a"])["a"].values()
        assert (figure.value, figure.refused) == (None, "above the physical limit")


@pytest.mark.parametrize("command", ["gate", "accept x --reason y", "store"])
def test_full_disk(command: str, tmp_path: Path) -> None:
    """On a full disk every command says in one line what is wrong and what to do, and exits with 2."""
    if subprocess.run(["unshare", "-Urm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("the kernel lets this user make no namespace, and so no file system")
    file = tmp_path / "perf.jsonl"
    (tmp_path / "full").mkdir()
    script = """
        mount -t tmpfs -o size=64k none full || exit 99
        touch full/history.sqlite.lock full/history.sqlite
        dd if=/dev/zero of=full/filler bs=1k 2>/dev/null
        exec "$@" 2>&1
    """
    if command == "store":
        file.write_text("")
        command = f"store {file}"
    concord = [
        sys.executable,
        "-m",
        "harness.commands.main",
        "perf",
        *command.split(),
        "--history",
        "full/history.sqlite",
    ]
    done = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", script, "sh", *concord],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stdout
    assert done.stdout.count("\n") == 1, done.stdout
    assert done.stdout.startswith(f"concord: full/history.sqlite: {FULL}")


def test_a_disk_that_fills_up(tmp_path: Path) -> None:
    """A night that does not fit is left out whole, with one error; what was stored before can still be read."""
    with History(tmp_path / "perf.sqlite") as history:
        assert history.add(night("a"))
    with History(tmp_path / "perf.sqlite") as history:

        def bounded(connection: Any, _: Any) -> None:
            pages = connection.execute("PRAGMA page_count").fetchone()[0]
            connection.execute(f"PRAGMA max_page_count={pages}")

        history._engine.dispose()
        sa.event.listen(history._engine, "connect", bounded)
        samples = np.random.default_rng(1).random((100, 100, 10)).tolist()
        big = night("b", values=())
        big.measurements.append(Measurement(series=series(1)[0], samples=samples, first=9.0))
        with pytest.raises(HistoryError) as raised:
            history.add(big)
        assert f"perf.sqlite: {FULL}" in str(raised.value)
        assert [one.id for one in history.nights()] == ["a"]


def test_rows_that_are_damaged(tmp_path: Path) -> None:
    """What can't be read of a row is an error that says what to do, and no traceback."""
    with History(tmp_path / "perf.sqlite") as history:
        history.add(night("a"))
        with history._writing() as connection:
            connection.execute(sa.update(schema.measurements).values(rounds="["))
            connection.execute(sa.update(schema.fingerprints).values(machine="?"))
        for read in (lambda: history.figures(["a"]), lambda: history.fingerprint(MACHINE.key)):
            with pytest.raises(HistoryError, match="perf.sqlite: damaged"):
                read()
