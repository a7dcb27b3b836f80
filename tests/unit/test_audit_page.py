"""The page of an audit, and its tables: hostile text stays text, counts are right, nothing is lost in comparison."""

from __future__ import annotations

import io
import json
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from harness.audit.records import (
    AuditError,
    Begun,
    Defect,
    Healthy,
    Journal,
    Result,
    Summary,
    digest,
    equivalents,
    load,
)
from harness.audit.table import COLUMNS, lost, markdown, misnamed, mistaken, rows, score, show, unnoticed
from reports.audit import page

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)> [bold]{{ 7 * 7 }}\x1b[31m"


def result(name: str, state: str, **fields: object) -> Result:
    component = str(fields.pop("component", "replicate"))
    sort = str(fields.pop("sort", "fault"))
    defect = Defect(name=name, sort=sort, component=component, says=f"says {name}", about="SW a/b#1")
    return Result(defect=defect, state=state, seconds=1.0, **fields)  # type: ignore[arg-type]


def summary(*results: Result) -> Summary:
    return Summary(
        started=1.7e9,
        seconds=9.0,
        arguments=["audit", "replicate"],
        environment={"torch": "2.13.0", "python": "3.11", "cores": "2"},
        digest="0",
        red=[],
        healthy={},
        results=list(results),
    )


FOUND = summary(
    result("a", "killed", test="suites/replicate/test_a.py::test"),
    result("b", "survived"),
    result("c", "not reached", sort="mutant"),
    result("d", "timed out", equivalent="it says nothing", sort="mutant"),
    result("e", "not injected", sort="mutant"),
    result("f", "killed", equivalent="so they said", sort="mutant", test="suites/dynamo/test_a.py::test"),
    result("g", "killed", component="dynamo", test="suites/dynamo/test_a.py::test"),
)


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.events: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.events += [name for name, _ in attrs if name.startswith("on")]


def test_hostile_text() -> None:
    """Whatever a defect, a test or an error is called is shown as it is, and nothing of it is executed."""
    found = summary(
        result(HOSTILE, "killed", test=HOSTILE, headline=HOSTILE, verdict=HOSTILE, requirements=[HOSTILE]),
        result("b", "survived", equivalent=HOSTILE),
    )
    found.red = [HOSTILE]
    found.arguments = ["audit", HOSTILE]
    text = page(msgspec.to_builtins(found), rows(found), COLUMNS)
    tags = Tags()
    tags.feed(text)
    assert tags.tags.count("script") == 1
    assert "img" not in tags.tags
    assert tags.events == ["onsubmit"]
    assert "{{ 7 * 7 }}" in text
    console = Console(file=io.StringIO(), width=200, force_terminal=True)
    show(found, console)
    assert "[bold]{{ 7 * 7 }}" in console.file.getvalue()  # type: ignore[attr-defined]


def test_rows() -> None:
    """What is counted where: equivalent ones and those that could not be put in are no part of the score."""
    assert rows(FOUND) == [
        ["replicate", "faults", "2", "1", "1", "0", "0", "50 %"],
        ["dynamo", "faults", "1", "1", "0", "0", "0", "100 %"],
        ["all", "faults", "3", "2", "1", "0", "0", "67 %"],
        ["replicate", "mutants", "3", "1", "0", "1", "1", "50 %"],
    ]
    assert markdown(FOUND).count("\n") == 6
    assert score([]) is None


def test_lists() -> None:
    """Survivors, equivalent ones that were noticed, and what a test of another component noticed."""
    assert [r.defect.name for r in unnoticed(FOUND)] == ["b", "c", "e"]
    assert [r.defect.name for r in mistaken(FOUND)] == ["f"]
    assert [r.defect.name for r in misnamed(FOUND)] == ["f"]


def test_lost() -> None:
    """Only what was noticed before and is in both can be lost."""
    before = summary(result("a", "killed"), result("b", "survived"), result("z", "killed"))
    now = summary(result("a", "timed out"), result("b", "survived"), result("n", "survived"))
    assert [(old.defect.name, new.state) for old, new in lost(before, now)] == [("a", "timed out")]
    assert lost(before, before) == []


def test_saved_and_read(tmp_path: Path) -> None:
    """What is saved is read back; anything else is said to be something else."""
    path = tmp_path / "audit.json"
    path.write_bytes(msgspec.json.encode(FOUND))
    assert load(path) == FOUND
    newer = {**json.loads(path.read_text()), "version": 99}
    path.write_text(json.dumps(newer))
    with pytest.raises(AuditError, match="version 99"):
        load(path)
    path.write_bytes(b"\xff\x00")
    with pytest.raises(AuditError, match="not a file of"):
        load(path)


def test_journal(tmp_path: Path) -> None:
    """Lines are read back; one that was cut off is taken away; one that is damaged is named."""
    journal = Journal(tmp_path / "folder" / "j.jsonl")
    records = [
        Begun(started=1.0, digest="0", environment={}),
        Healthy(test="t", verdict="passed", seconds=0.1, steps={"f.py": [(0, 3)]}),
        result("a", "killed"),
    ]
    for record in records:
        journal.write(record)
    with journal.path.open("ab") as file:
        file.write(b'{"record":"resu')
    assert journal.read() == records
    journal.write(records[2])
    assert len(journal.read()) == 4
    with journal.path.open("ab") as file:
        file.write(b"garbage\n")
    with pytest.raises(AuditError, match=r"j\.jsonl, line 5: .*move the file away"):
        journal.read()
    journal.close()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[[equivalent]]\nmutants = ['a']\nwhy = ''\n", "entry 1"),
        ("[[equivalent]]\nmutant = 'a'\nwhy = 'it is'\n", "entry 1"),
        ("[[equivalent", "equivalent.toml:1: not TOML: Expected"),
    ],
)
def test_bad_equivalents(tmp_path: Path, text: str, says: str) -> None:
    """A mutant is only equivalent with a reason."""
    path = tmp_path / "equivalent.toml"
    path.write_text(text)
    with pytest.raises(AuditError, match=says):
        equivalents(path)


def test_equivalents(tmp_path: Path) -> None:
    """A reason may be that of several; without a file there are none."""
    path = tmp_path / "equivalent.toml"
    assert equivalents(path) == {}
    path.write_text("[[equivalent]]\nmutants = ['a', 'b']\nwhy = 'it is'\n")
    assert equivalents(path) == {"a": "it is", "b": "it is"}


def test_digest(tmp_path: Path) -> None:
    """It changes with what an outcome depends on, and with nothing else."""
    (tmp_path / "suites").mkdir()
    (tmp_path / "suites" / "test_a.py").write_text("1")
    before = digest(tmp_path)
    (tmp_path / "suites" / "notes.md").write_text("1")
    assert digest(tmp_path) == before
    (tmp_path / "suites" / "test_a.py").write_text("2")
    assert digest(tmp_path) != before
