"""Files that commands are to write: what can't be written is refused before anything else is done."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.commands.main import app
from harness.commands.outputs import writable

COMMANDS = [
    ["audit", "--save"],
    ["audit", "--html"],
    ["bisect", "a test", "--json"],
    ["perf", "counts", "--json"],
    ["perf", "duet", "a", "b", "--html"],
    ["perf", "duet", "a", "b", "--json"],
    ["probe", "--json"],
    ["probe", "--output"],
    ["versions", "--json"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_refused_at_once(tmp_path: Path, command: list[str]) -> None:
    """A folder, and a path below a file, are refused with their names; nothing is made."""
    (tmp_path / "file").touch()
    for given, said in ((tmp_path, "a folder, not a file"), (tmp_path / "file/deeper/x", "file is not a folder")):
        result = CliRunner().invoke(app, [*command, str(given)])
        assert (result.exit_code, result.stdout) == (2, ""), result.output
        assert str(given) in result.stderr
        assert said in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_allowed(tmp_path: Path) -> None:
    """A file that exists, one in a new folder, a device, a link to nothing, and no file at all."""
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nothing")
    for path in (tmp_path / "file", tmp_path / "new/folder/x", Path("/dev/stdout"), tmp_path / "link", None):
        assert writable(path) == path
    assert not (tmp_path / "new").exists()
