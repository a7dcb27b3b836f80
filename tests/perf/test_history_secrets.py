"""The password of a history's database is in no error, no traceback, and nothing that a command prints."""

from __future__ import annotations

import subprocess
import sys
import traceback
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.bench.history.store import VARIABLE, History, HistoryError
from harness.commands.main import app

ROOT = Path(__file__).parents[2]

PLACES = [
    "postgresql://bob:hunter2@127.0.0.1:1/perf",
    "postgresql://127.0.0.1:1/perf?user=bob&password=hunter2",
    "postgresql://bob:hunter2@127.0.0.1:1/perf?nonsense=1",
    "postgresql://bob:hunter2@127.0.0.1:port/perf",
    "postgresql://bob:x/hunter2@127.0.0.1:1/perf",
    "postgresql://bob:hunter2@[::1/perf",
    "nodatabase://bob:hunter2@db/perf",
    "postgresql+nodriver://bob:hunter2@db/perf",
    "a b://bob:hunter2@db/perf",
    "postgresql://bob:hunter2@127.0.0.1:1/\udc80",
]


NEITHER = [
    "postgresql:/bob:hunter2@localhost/db",
    "postgresql:bob:hunter2@localhost/db",
    "bob:hunter2@localhost/db",
    "bob:hun/ter2hunter2@localhost/db",
    "localhost/db?password=hunter2",
    "postgresql:localhost/db?password=hunter2",
]


@pytest.mark.parametrize("by", ["option", "variable"])
@pytest.mark.parametrize("place", NEITHER)
def test_addresses_that_lack_slashes(place: str, by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no URL and looks like one is an error in one line, shows no password, and makes no folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(VARIABLE, place if by == "variable" else "sqlite://")
    result = CliRunner().invoke(app, ["perf", "gate", *(["--history", place] if by == "option" else [])])
    assert (result.exit_code, result.output.count("\n")) == (2, 1)
    assert "hunter2" not in result.output
    told = "concord: history: neither" if by == "option" else f"concord: ${VARIABLE}: neither"
    assert result.output.startswith(f"{told} a URL nor the name of a file: ")
    assert "give a URL with ://" in result.output
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("place", ["./odd@home:1.sqlite", "plain/perf.sqlite", "v1.2/x:y.sqlite", Path("odd@home")])
def test_files_with_odd_names(place: str | Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is plainly a file's is taken for one."""
    monkeypatch.chdir(tmp_path)
    with History(place):
        assert Path(place).is_file()


@pytest.mark.parametrize("place", PLACES, ids=ascii)
def test_errors_of_a_history(place: str) -> None:
    """An error that a history raises has no credentials in it, nor has what caused it."""
    with pytest.raises(HistoryError) as raised:
        History(place)
    text = "".join(traceback.format_exception(raised.value))
    assert "hunter2" not in text


@pytest.mark.parametrize("place", PLACES, ids=ascii)
@pytest.mark.parametrize("command", ["gate", "history"])
def test_commands(place: str, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command says in one line what is wrong with a history, and not its password."""
    monkeypatch.setenv(VARIABLE, place) if "\udc80" not in place else None
    result = CliRunner().invoke(app, ["perf", command, "--history", place])
    assert (result.exit_code, result.output.count("\n")) == (2, 1)
    assert "hunter2" not in result.output


def test_what_nobody_has_foreseen() -> None:
    """A traceback of a command shows neither locals nor the credentials that were given."""
    code = (
        "import sys\n"
        "from harness.commands import perf\n"
        "from harness.bench.history import store\n"
        "def broken(place):\n"
        "    raise RuntimeError(f'no {place} for bob with hunter2')\n"
        "store.History = broken\n"
        "from harness.commands import main\n"
        "main.main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "perf", "gate", "--history", PLACES[0]],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "RuntimeError: no postgresql://***@127.0.0.1:1/perf for bob with ***" in done.stderr
    assert "hunter2" not in done.stdout + done.stderr
