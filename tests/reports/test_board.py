"""``concord board``: a static site of many bundles, each verified, in which hostile ones stay text."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
from board_of import FAILED, bundled, entry, with_
from invented import PROFILE, Change, change
from typer.testing import CliRunner

from harness.commands import board as command
from harness.commands.main import app
from harness.results import ProfileText, RunHeader
from reports import bundle
from reports.board import (
    MOST,
    NOT_CHECKED,
    Entry,
    Refused,
    backends,
    refused,
    site,
    versions,
)
from reports.model import CONFORMANT, NOT_CONFORMANT, NOT_SHOWN

ONE = "dynamo/test_a.py::test_one[2"


@pytest.fixture(autouse=True)
def no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "page", lambda report: "no page")  # the bundle's own, which nobody looks at


def taken_in(path: Path, *changes: Change, **how: Any) -> Entry:
    found = entry(path, *changes, **how)
    assert isinstance(found, Entry), found
    return found


@pytest.fixture
def history(tmp_path: Path) -> list[Entry]:
    """Three bundles of a backend, on two versions of PyTorch: right, with a failure, and right again."""
    return [
        taken_in(tmp_path / "one.zip"),
        taken_in(tmp_path / "two.zip", FAILED, days=1),
        taken_in(tmp_path / "three.zip", with_(torch="2.14.1"), days=2),
    ]


def pages(entries: list[Entry], *others: Refused) -> dict[str, str]:
    return dict(site(entries, others))


class Text(HTMLParser):
    """The text of a page, its tags, and its attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.attributes: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    @property
    def words(self) -> str:
        """The text on one line."""
        return " ".join(" ".join(self.text).split())


def test_states(history: list[Entry], tmp_path: Path) -> None:
    """A level is conformant, is not, is not shown to be, or could not be checked."""
    right, wrong, _ = history
    assert set(right.states.values()) == {CONFORMANT}
    assert [wrong.states[level] for level in ("L1", "L2", "L3", "L4", "P")] == [
        *(CONFORMANT, CONFORMANT, NOT_CONFORMANT, NOT_CONFORMANT, CONFORMANT)
    ]
    few = msgspec.structs.replace(right.report.levels[0], answer=NOT_SHOWN, missing=["No run of it."])
    shown = dataclasses.replace(right, report=msgspec.structs.replace(right.report, levels=[few]))
    assert shown.states["L1"] == NOT_SHOWN
    assert "L1 collectives not shown" in Text(pages([shown])[shown.page]).words
    assert "No run of it." in Text(pages([shown])[shown.page]).words
    unchecked = taken_in(tmp_path / "x.zip", suite=False)
    assert set(unchecked.states.values()) == {NOT_CHECKED}


def test_history(history: list[Entry]) -> None:
    """Bundles of a backend follow each other in time, whatever their order, each with its differences."""
    (backend,) = backends(reversed(history))
    assert [step.entry.name for step in backend.steps] == ["three.zip", "two.zip", "one.zip"]
    assert [step.counts for step in backend.steps] == [{"fixed": 1}, {"newly failing": 1}, {}]
    assert backend.steps[0].surroundings == [("torch", "2.13.0", "2.14.1")]
    assert backend.steps[2].before is None
    newest = backend.newest("2.13.0")
    assert newest is not None
    assert newest.name == "two.zip"
    assert versions(history) == ["2.14.1", "2.13.0"]


def test_versions_are_numbers(tmp_path: Path) -> None:
    """2.9 is older than 2.13, and what is no version comes last."""
    texts = ["2.9.1", "2.13.0", "2.13.0+cpu", "mine", "2.15.0.dev1"]
    entries = [taken_in(tmp_path / f"{i}.zip", with_(torch=text)) for i, text in enumerate(texts)]
    assert versions(entries) == ["2.15.0.dev1", "2.13.0+cpu", "2.13.0", "2.9.1", "mine"]


def test_other_backends(tmp_path: Path, history: list[Entry]) -> None:
    """Another subject is another row, and is compared with nothing of the first."""

    other = taken_in(tmp_path / "other.zip")
    other = dataclasses.replace(other, report=msgspec.structs.replace(other.report, subject="reference"))
    rows = backends([*history, other])
    assert [(row.subject, len(row.steps)) for row in rows] == [("reference", 1), ("", 3)]


def test_index(history: list[Entry]) -> None:
    """The table has each backend, each version, and a link to the page of the newest bundle."""
    made = pages(history, refused("bad.zip", ("its checksum differs",)))
    index = Text(made["index.html"])
    assert list(made)[-1] == "index.html"
    for part in ("3 bundles of 1 backend", "1 refused", "PyTorch 2.14.1", "made-up", "gloo on cpu", "1 newly failing"):
        assert part in index.words
    assert "bad.zip" in index.words
    assert {link for link in index.links if link.startswith("bundles/") and "#" not in link} == {
        each.page for each in history
    }
    assert f"{history[1].page}#changes" in index.links
    assert 'title="L3 replicate_fsdp: not conformant"' in made["index.html"]


def test_pages(history: list[Entry]) -> None:
    """The page of a bundle has levels with reasons, and what changed since the one before."""
    made = pages(history)
    second = Text(made[history[1].page]).words
    for part in (
        *("1 test newly failing", "passed → failed", "rank 1 of 2 failed first: no"),
        "L3 replicate_fsdp not conformant",
        *("REPLICATEFSDP-ONE-01: 1 failed of 2 tests", "Compared with the bundle of 2027-01-15", history[1].sha256),
    ):
        assert part in second, part
    assert "It is the first of this backend." in Text(made[history[0].page]).words
    links = Text(made[history[1].page]).links
    assert {"../index.html", f"../{history[1].whole}", f"../{history[0].page}"} <= set(links)


def test_offline(history: list[Entry]) -> None:
    """No page has a script, asks for anything, or links anywhere but to its own site."""
    for page in pages(history, refused("https://example.com/x.zip", ("https://example.com",))).values():
        found = Text(page)
        assert not {"script", "img", "iframe", "object", "form"} & set(found.tags)
        assert not any(name.startswith("on") for name in found.attributes)
        assert not [link for link in found.links if "//" in link or (":" in link and link != "data:,")]
        assert "default-src 'none'" in page


HOSTILE = [
    "<script>window.hacked = 1</script>",
    "</style></pre></title><img src=x onerror='window.hacked = 3'>",
    "{{ 7 * 7 }}{% raw %}${7 * 7}",
    '" onmouseover="window.hacked = 4" x=\'',
    "javascript:alert(1)",
    "\x1b[31m\x07\u202egnp.exe\u2066\u200b\ufeff",
    "".join(map(str, range(20_000))),
]


def hostile(text: str) -> Change:
    """Puts a text wherever a bundle has one that a board shows."""

    def apply(made: list[Any]) -> None:
        change(ONE, verdict="failed", headline=text)(made)
        for record in made:
            if isinstance(record, ProfileText):
                record.about = text
        made[0].environment = {**made[0].environment, "torch": text, "cpu": text, text[:50]: text}

    return apply


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile(tmp_path: Path, text: str) -> None:
    """What a bundle says stays text, is bounded, and drives no terminal."""
    found = taken_in_anyway(tmp_path / "x.zip", hostile(text), text)
    made = pages([found, taken_in(tmp_path / "y.zip", days=-1)], refused(text, (text,) * 20))
    if "{{" in text:
        assert all("{{ 7 * 7 }}" in Text(made[name]).words for name in ("index.html", found.page))
    for page in made.values():
        parsed = Text(page)
        assert not {"script", "img"} & set(parsed.tags)
        assert not any(name.startswith("on") for name in parsed.attributes)
        assert not [link for link in parsed.links if ":" in link and link != "data:,"]
        assert not re.search("[\x00-\x08\x0e-\x1f\u200b\u202e\u2066\ufeff]", page)
        assert len(page) < 200_000


def taken_in_anyway(path: Path, forge: Change, name: str) -> Entry:
    """A bundle on a board although something is wrong with it, to see what would be shown of it."""
    import hashlib

    from board_of import NOW
    from invented import checkout

    from reports.board import taken
    from reports.verify import verify

    checked = verify(bundled(path, forge), "0.1.0", checkout(), NOW)
    assert checked.report is not None
    report = msgspec.structs.replace(checked.report, profile=name, backend=name, about=name)
    lines = (name, *checked.problems)
    forced = type(checked)(report, (), lines, lines, checked.manifest, checked.runs)
    found = taken(name, hashlib.sha256(path.read_bytes()).hexdigest(), forced, name)
    assert isinstance(found, Entry)
    return found


def test_what_is_wrong_is_only_named(tmp_path: Path) -> None:
    """Of a bundle with something wrong, nothing is shown but its name and the reasons, of which there are few."""

    def forge(made: list[Any]) -> None:
        for record in made:
            if isinstance(record, ProfileText):
                record.about = "the best of all"
            elif isinstance(record, RunHeader):
                record.seed_drawn = not record.seed_drawn

    found = entry(tmp_path / "x.zip", forge)
    assert isinstance(found, Refused)
    assert len(found.reasons) <= 5
    assert any("the profile's about is" in reason for reason in found.reasons)
    (index,) = pages([], found).values()
    assert "No bundle." in Text(index).words


# The command


def invoked(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["board", *arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


@pytest.fixture
def made_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The invented suite is the one here, and the invented day is today."""
    from board_of import NOW
    from invented import CONCORD, SUITE, checkout

    monkeypatch.setattr(command, "suite_hash", lambda root: SUITE)
    monkeypatch.setattr(command, "checkout_of", lambda root: checkout())
    monkeypatch.setattr("harness.__version__", CONCORD)
    monkeypatch.setattr(command.time, "time", lambda: NOW)


@pytest.mark.usefixtures("made_here")
def test_command(tmp_path: Path) -> None:
    """A folder of bundles, in folders, becomes a site; what is no bundle is refused with its reason."""
    bundles, out = tmp_path / "in", tmp_path / "site"
    bundled(bundles / "gloo" / "one.zip")
    bundled(bundles / "gloo" / "two.zip", FAILED, days=1)
    shutil.copy(bundles / "gloo" / "one.zip", bundles / "again.zip")
    (bundles / "garbage.zip").write_bytes(b"PK\3\4garbage")
    bundled(bundles / "forged.zip", change(ONE, size=3))
    code, said = invoked(str(bundles), "-o", str(out))
    assert code == 1
    assert f"{out / 'index.html'}: 2 bundles, 3 refused" in said
    lines = said.splitlines()
    assert {"taken in  gloo/two.zip", "refused   gloo/one.zip", "refused   garbage.zip"} <= set(lines)
    index = Text((out / "index.html").read_text()).words
    for part in ("the same file as again.zip", "not a zip file", "its size is 3, but its name says 2 ranks"):
        assert part in index
    found = sorted(path.relative_to(out).parts[0] for path in out.rglob("*.html"))
    assert found == ["bundles", "bundles", "index.html", "reports", "reports"]
    first = {path: path.read_bytes() for path in out.rglob("*.html")}
    invoked(str(bundles), "-o", str(out))
    assert {path: path.read_bytes() for path in out.rglob("*.html")} == first


@pytest.mark.usefixtures("made_here")
def test_what_is_gone(tmp_path: Path) -> None:
    """Pages of bundles that are no longer there go, and nobody else's files do."""
    bundles, out = tmp_path / "in", tmp_path / "site"
    bundled(bundles / "one.zip")
    bundled(bundles / "two.zip", FAILED, days=1)
    assert invoked(str(bundles), "-o", str(out))[0] == 0
    (out / "bundles" / "mine.html").write_text("mine")
    (bundles / "two.zip").unlink()
    assert invoked(str(bundles), "-o", str(out))[0] == 0
    assert len(list(out.rglob("*.html"))) == 4
    assert (out / "bundles" / "mine.html").exists()


def test_unchecked(tmp_path: Path) -> None:
    """Without the suite nothing is conformant: exit code 3."""
    bundled(tmp_path / "in" / "one.zip")
    code, said = invoked(str(tmp_path / "in"), "-o", str(tmp_path / "site"), "--no-suite")
    assert (code, "unchecked one.zip" in said) in ((3, True), (1, False)), said


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda at: at / "none", "no such folder"),
        (lambda at: at, "no bundle (*.zip) in it"),
    ],
    ids=["none", "empty"],
)
def test_no_bundles(tmp_path: Path, make: Callable[[Path], Path], says: str) -> None:
    """A folder that is not there, or has nothing, is one line."""
    code, said = invoked(str(make(tmp_path)), "-o", str(tmp_path / "site"))
    assert (code, says in said, len(said.strip().splitlines())) == (2, True, 1)
    assert not (tmp_path / "site").exists()


def test_too_many(tmp_path: Path) -> None:
    """Nobody fills a disk with the files of one folder."""
    for number in range(MOST + 1):
        (tmp_path / f"{number}.zip").touch()
    code, said = invoked(str(tmp_path), "-o", str(tmp_path / "site"))
    assert (code, f"more than {MOST} bundles" in said) == (2, True)


@pytest.mark.usefixtures("made_here")
def test_files_that_are_none(tmp_path: Path) -> None:
    """A pipe is not opened, a dangling link is no bundle, and a name may have anything in it."""
    bundles = tmp_path / "in"
    bundles.mkdir()
    os.mkfifo(bundles / "pipe.zip")
    (bundles / "link.zip").symlink_to(tmp_path / "nowhere")
    (bundles / "folder.zip").mkdir()
    (bundles / "\x1b[31m<b>\n.zip").write_bytes(b"")
    code, said = invoked(str(bundles), "-o", str(tmp_path / "site"))
    assert (code, "0 bundles, 4 refused" in said, "\x1b" in said) == (1, True, False)
    index = (tmp_path / "site" / "index.html").read_text()
    assert "a pipe, not a file" in index
    assert "<b>" not in index


def test_no_room(tmp_path: Path) -> None:
    """A site that can't be written is one line."""
    bundled(tmp_path / "in" / "one.zip")
    (tmp_path / "site").write_text("a file")
    code, said = invoked(str(tmp_path / "in"), "-o", str(tmp_path / "site"), "--no-suite")
    assert code in (1, 2)
    assert "Traceback" not in said


@pytest.mark.usefixtures("made_here")
@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="no ssh-keygen here")
def test_signers(tmp_path: Path) -> None:
    """Who signed is shown; a signature of somebody else, or of another file, is a reason to refuse."""
    from reports.signing import sign

    bundles, out, signers = tmp_path / "in", tmp_path / "site", tmp_path / "signers"
    for name in ("mine", "other"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)], check=True)
    signers.write_text(f"vendor@example.com {(tmp_path / 'mine.pub').read_text()}")
    for number, key in enumerate(("mine", "other", "")):
        file = bundled(bundles / f"{number}.zip", days=number)
        if key:
            Path(f"{file}.sig").write_bytes(sign(file.read_bytes(), tmp_path / key).signature)
    file = bundled(bundles / "3.zip", days=3)
    Path(f"{file}.sig").write_bytes((bundles / "0.zip.sig").read_bytes())
    code, said = invoked(str(bundles), "-o", str(out), "--signers", str(signers))
    assert (code, "2 bundles, 2 refused" in said) == (1, True), said
    index = Text((out / "index.html").read_text()).words
    assert index.count("signed by vendor@example.com") == 1
    assert index.count("not a signature of this file by anyone in signers") == 2
    assert invoked(str(bundles), "-o", str(out), "--signers", str(tmp_path / "none"))[0] == 2


def test_the_profile_is_the_one_of_these_tests() -> None:
    """The text of the invented profile names it as the table does."""
    assert 'name = "made-up"' in PROFILE
