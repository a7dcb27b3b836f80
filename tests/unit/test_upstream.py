"""The tables of PyTorch's own tests: they name requirements that there are, and the page says what they say."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.commands.main import app
from harness.commands.outputs import INDEX, out_of_date
from harness.commands.standard import FOLDER as STANDARD
from harness.commands.tables import TableError
from harness.commands.upstream import (
    FOLDER,
    KINDS,
    PAGES,
    Table,
    pages,
    parse,
    read,
    unknown_requirements,
)
from harness.requirements import LEVELS

ROOT = Path(__file__).parents[2]
SMALL = """
["test/distributed/test_store.py"]
version = "0123456789abcdef"
"StoreTest.test_get" = ["COLL-STORE-01", "COLL-STORE-02"]
"StoreTest.test_set" = ["COLL-STORE-01", "gap: an <empty|key>"]
"StoreTest.test_log" = ["internal: a log"]
"OtherTest.*" = ["outside: RPC"]
"test_alone" = ["gap: nobody asks it"]
"""


@pytest.fixture(scope="module")
def tables() -> Mapping[str, Table]:
    """Read the tables here."""
    return read(ROOT)


def test_every_stack_has_a_table(tables: Mapping[str, Table]) -> None:
    """The files are those of the stacks that have requirements."""
    assert set(tables) == set(LEVELS.values()) - {"perf"}


def test_tables_name_requirements(tables: Mapping[str, Table]) -> None:
    """Every requirement in a table is in the standard."""
    standard = "".join(file.read_text() for file in (ROOT / STANDARD).glob("*.md"))
    known = frozenset(re.findall(r"^\| `([A-Z0-9-]+)` \|", standard, re.MULTILINE))
    assert len(known) > 1000
    assert [problem for table in tables.values() for problem in unknown_requirements(table, known)] == []


def test_the_pages_are_up_to_date(tables: Mapping[str, Table]) -> None:
    """docs/upstream is what the tables say."""
    assert out_of_date(pages(tables), ROOT / PAGES) == [], f"run: concord upstream {PAGES}"


def test_unknown_requirements() -> None:
    """A requirement that is not known is named with its test."""
    found = unknown_requirements(small(), frozenset({"COLL-STORE-01"}))
    where = "test/distributed/test_store.py: StoreTest.test_get"
    assert found == [f"{where}: there is no requirement COLL-STORE-02"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("\0", "not TOML"),
        ("[" * 100, "t.toml: "),
        ("x = 1", "x: must be a table of tests"),
        ("[x]\nversion = '1'\ny = ['gap: z']", "x: must be a file of PyTorch such as"),
        ("['a|b.py']\nversion = '1'\ny = ['gap: z']", "must be a file of PyTorch such as"),
        ("['x.py']\ny = ['gap: z']", "x.py: version: must be a text"),
        ("['x.py']\nversion = '1'", "x.py: needs a test"),
        ("['x.py']\nversion = '1'\n'y|z' = ['gap: z']", "must be a test such as"),
        ("['x.py']\nversion = '1'\n'`' = ['gap: z']", "must be a test such as"),
        ("['x.py']\nversion = '1'\ny = 'gap: z'", "x.py: y: must be a list"),
        ("['x.py']\nversion = '1'\ny = []", "x.py: y: must be a list"),
        ("['x.py']\nversion = '1'\ny = [1]", "x.py: y: must be a text"),
        ("['x.py']\nversion = '1'\ny = ['gap:']", "x.py: y: 'gap:' must be the id of a requirement"),
        ("['x.py']\nversion = '1'\ny = ['hole: z']", "must be the id of a requirement, or a reason after one of"),
        ("['x.py']\nversion = '1'\ny = ['coll-store-01']", "must be the id of a requirement"),
        ("['x.py']\nversion = '1'\ny = [\"gap: \\u001b[31m\"]", "x.py: y: must be a text"),
    ],
)
def test_refused(text: str, problem: str) -> None:
    """A text that is no table has one error, with the file and the key."""
    with pytest.raises(TableError) as caught:
        parse(text, "t.toml")
    assert str(caught.value).startswith("t.toml: ")
    assert problem in str(caught.value)
    assert "\x1b" not in str(caught.value)


def test_pages() -> None:
    """The first page counts and explains; that of a stack links requirements, and escapes markup."""
    made = pages({"x": small()})
    shown = made["x.md"]
    assert "| [`x`](x.md) | 5 | 1 | 1 | 1 | 1 | 0 | 1 | 0 |" in made[INDEX]
    assert "Read at 0123456789ab." in shown
    first = "[COLL-STORE-01](../requirements/collectives.md#coll-store)"
    assert f"| `StoreTest.test_get` | {first}, [COLL-STORE-02](../requirements/collectives.md#coll-store) |  |" in shown
    assert rf"| `StoreTest.test_set` | {first} | **gap**: an &lt;empty\|key&gt; |" in shown
    assert "| `StoreTest.test_log` |  | internal: a log |" in shown
    assert all(f"**{kind}**: " in made[INDEX] for kind in KINDS)


class TestCommand:
    """``concord upstream``."""

    @pytest.fixture(autouse=True)
    def checkout(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """One small table instead of those here."""
        (tmp_path / FOLDER).mkdir(parents=True)
        (tmp_path / FOLDER / "x.toml").write_text(SMALL)
        monkeypatch.chdir(tmp_path)
        return tmp_path

    def test_writes(self, checkout: Path) -> None:
        """It writes the pages, which are out of date once a table changes; without a folder, it prints them."""
        assert CliRunner().invoke(app, ["upstream"]).output == "\n".join(pages({"x": small()}).values())
        assert CliRunner().invoke(app, ["upstream", "out"]).exit_code == 0
        assert out_of_date(pages({"x": small()}), checkout / "out") == []
        (checkout / FOLDER / "x.toml").write_text(SMALL.replace("nobody", "somebody"))
        done = CliRunner().invoke(app, ["upstream", "out", "--check"])
        assert (done.exit_code, done.output) == (1, "in out, x.md out of date; run: concord upstream out\n")

    def test_bad_input(self, checkout: Path) -> None:
        """Bad input is one line and exit code 2."""
        (checkout / FOLDER / "x.toml").write_text("x = 1")
        done = CliRunner().invoke(app, ["upstream"])
        assert (done.exit_code, "Traceback" in done.output) == (2, False)
        assert "x.toml: x: must be a table of tests" in done.output


def small() -> Table:
    return parse(SMALL, "small.toml")
