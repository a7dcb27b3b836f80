"""A PostgreSQL server of the tests' own, histories in both databases, and worlds."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import Pool, World, WorldSpec


def _folder_of_postgres() -> Path | None:
    """Where initdb and postgres are."""
    folders = [Path(p) for p in os.environ.get("PATH", "").split(os.pathsep) if p]
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((f for f in folders if (f / "initdb").exists() and (f / "postgres").exists()), None)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """The URL of a server that lives as long as the tests; the database's name is still missing."""
    folder = _folder_of_postgres()
    if folder is None:
        pytest.skip("no PostgreSQL server is installed (initdb and postgres on PATH or in /usr/lib/postgresql)")
    # The server refuses to run as root, and its socket's path must be short.
    user = {"user": "nobody", "group": "nogroup", "extra_groups": []} if os.geteuid() == 0 else {}
    data = Path(tempfile.mkdtemp(prefix="pg", dir="/tmp"))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    try:
        if user:
            shutil.chown(data, "nobody", "nogroup")
        run = {"check": True, "cwd": data, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, **user}
        tools = {"initdb": [str(folder / "initdb"), "-D", str(data / "d"), "-U", "concord", "-A", "trust", "--no-sync"]}
        options = f"-c listen_addresses=127.0.0.1 -c port={port} -c unix_socket_directories={data} -c fsync=off"
        control = [str(folder / "pg_ctl"), "-D", str(data / "d"), "-w", "-t", "60"]
        try:
            subprocess.run(tools["initdb"], **run)
            subprocess.run([*control, "-l", str(data / "log"), "-o", options, "start"], **run)
        except subprocess.CalledProcessError as e:
            log = (data / "log").read_text() if (data / "log").exists() else ""
            pytest.fail(f"PostgreSQL did not start: {e.stdout.decode()}{log}")
        try:
            yield f"postgresql://concord@127.0.0.1:{port}/"
        finally:
            subprocess.run([*control, "-m", "immediate", "stop"], **{**run, "check": False})
    finally:
        shutil.rmtree(data, ignore_errors=True)


@pytest.fixture
def postgres(postgres_server: str) -> Iterator[str]:
    """The URL of an empty database."""
    import psycopg

    name = f"h{uuid.uuid4().hex}"
    with contextlib.closing(psycopg.connect(f"{postgres_server}postgres", autocommit=True)) as connection:
        connection.execute(f"CREATE DATABASE {name}")
        yield f"{postgres_server}{name}"
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where a history can be: a file that is not there yet, or an empty database of PostgreSQL."""
    if request.param == "sqlite":
        return str(tmp_path / "deep" / "perf.sqlite")
    return request.getfixturevalue("postgres")


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """The worlds of a module's tests."""
    found = Pool()
    yield found
    found.close()


@pytest.fixture
def two(pool: Pool) -> Iterator[World]:
    """A new world of two ranks, without a record of collectives."""
    found = pool.acquire(WorldSpec(2, record=False))
    yield found
    found.kill()
