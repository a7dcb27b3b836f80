"""What is made of a report: Markdown, JUnit XML, a badge, the relay's payload, a comparison; and the commands."""

from __future__ import annotations

import dataclasses
import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from invented import FILE, STARTED, change, checkout, evidence, records, runs, tried, written
from typer.testing import CliRunner

from harness.commands.main import app
from harness.profiles import NEVER_RUN
from harness.results import GivenWorld, ProfileText, TestResult, TooFewDevices
from reports import badge, relay
from reports.build import build
from reports.compare import compare, lines
from reports.junit import junit, names
from reports.markdown import escaped, markdown
from reports.model import Report, decode, encode
from reports.page import page
from reports.text import duration, moment, shortened, visible

BAD = "replicate_fsdp/test_a.py::test_one[2"


def failing(count: int, text: str = "no") -> Report:
    """A report with so many failed tests, each with a long text."""
    made = records()
    (pattern,) = (r for r in made if isinstance(r, TestResult) and BAD in r.nodeid)
    more = []
    for number in range(count):
        values: dict[str, Any] = {f: getattr(pattern, f) for f in pattern.__struct_fields__}
        name = f"{pattern.nodeid}-{number}"
        more.append(
            TestResult(**{**values, "nodeid": name, "verdict": "failed", "headline": text, "ranks": evidence(text)})
        )
    made[1].tests += [test.nodeid for test in more]
    return build([("a", written([*made[:-1], *more, made[-1]]))])


# notes


def alone(found: list[Any]) -> None:
    """The properties of a stack had one rank only, and its profile was never run by its author."""
    change("replicate/test_a.py::test_two[3", world=GivenWorld(1, "gloo", "cpu", (1,)))(found)
    (profile,) = (record for record in found if isinstance(record, ProfileText))
    profile.never_run = True


def test_notes(tmp_path: Path) -> None:
    """The page, Markdown and the terminal say that properties had fewer ranks, and of a profile that nobody ran."""
    for name, data in runs(alone):
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.jsonl").write_bytes(data)
    report = build(runs(alone))
    assert report.conformant == "L5"
    (note,) = next(level.notes for level in report.levels if level.id == "L2")
    code, terminal = run("report", str(tmp_path / "first"), str(tmp_path / "second"))
    assert code == 0
    for text in (markdown(report), page(report), terminal):
        assert note in text
        assert NEVER_RUN in text
    assert "Drawn worlds: 1 test of 1 rank." in page(report)


def test_no_notes() -> None:
    """Without these, neither is said."""
    for text in (markdown(build(runs())), page(build(runs()))):
        assert (NEVER_RUN in text, "draw their worlds" in text, "Drawn worlds" in text) == (False, False, False)


# Markdown


def test_markdown() -> None:
    """The answer, a table of levels, why not, and what failed."""
    text = markdown(build(runs(change(BAD, verdict="failed", headline="1 is *not* <2>"))))
    assert text.startswith("## Conformant at L2 (replicate)\n")
    assert "| L3 | replicate_fsdp | not conformant | 1 | | 3 | |" in text.replace("|  |", "| |")
    assert "- wrong: REPLICATEFSDP-ONE-01: 1 failed of 2 tests; first suites/" in text
    assert "1 is &#42;not&#42; &#60;2&#62;" in text


def test_markdown_fits() -> None:
    """However many tests fail, the summary fits, and says how many did not."""
    report = failing(4000, "x" * 1000)
    text = markdown(report)
    assert (1 << 20) - 1000 < len(text.encode()) <= 1 << 20
    assert "more, which did not fit here" in text.splitlines()[-1]
    assert len(markdown(report, largest=2000).encode()) <= 2000


@given(st.text(st.characters(exclude_categories=[])))
def test_markdown_is_text(text: str) -> None:
    """Whatever a text is, it is one line with no mark-up, tag, mention or link in it, and can be encoded."""
    line = escaped(text)
    assert not set("<>`*[]|@~\n\r") & set(line)
    assert "://" not in line
    assert line.encode().decode() == line


# JUnit


def test_junit() -> None:
    """Counts are pytest's: what is waived, unsupported or undeclared is skipped."""
    tree = ElementTree.fromstring(junit(build(runs(change(BAD, verdict="crashed", headline="no", ranks=evidence())))))
    (suite,) = tree
    assert {k: suite.get(k) for k in ("tests", "failures", "errors", "skipped")} == {
        "tests": "24",
        "failures": "1",
        "errors": "0",
        "skipped": "2",
    }
    (failure,) = tree.iter("failure")
    assert failure.get("message") == "no"
    assert "all_reduce(float32[4])" in (failure.text or "")
    assert {skip.get("type") for skip in tree.iter("skipped")} == {"pytest.skip", "pytest.xfail"}


def test_flaky() -> None:
    """A flaky test is a failure wherever reports go, with all of its attempts."""
    report = build(runs(tried(BAD, "failed", "hung", "passed")))
    assert "### 1 test ended badly" in markdown(report)
    assert "- flaky suites/replicate&#95;fsdp" in markdown(report)
    sent = relay.payload(report)
    assert (sent["conclusion"], sent["test-results"]["failed"]) == ("failure", 1)
    (failure,) = ElementTree.fromstring(junit(report)).iter("failure")
    assert failure.get("message") == "wrong in attempt 2"
    assert (failure.text or "").splitlines()[:3] == [
        "attempt 1 failed: wrong in attempt 1",
        "attempt 2 hung: wrong in attempt 2",
        "attempt 3 passed",
    ]
    assert "L2" in badge.svg(report).decode()
    html = page(report)
    assert html.index("It was run 3 times") < html.index("wrong in attempt 1")


@pytest.mark.parametrize("text", ["\x00\x1b]]>\ufffe", "\ud800", "<&\"'", "\u202e"], ids=ascii)
def test_junit_is_xml(text: str) -> None:
    """Characters that XML can't have are written out."""
    report = build(runs())
    report.tests[0].verdict, report.tests[0].headline, report.tests[0].nodeid = "failed", text, f"a.py::b[{text}]"
    report.tests[0].ranks = evidence(text)
    assert len(list(ElementTree.fromstring(junit(report)).iter("testcase"))) == 24


def test_junit_as_pytest_has_it(tmp_path: Path) -> None:
    """Names, classes and outcomes are those of pytest's own JUnit XML of the same tests."""
    (tmp_path / "suites" / "perf").mkdir(parents=True)
    (tmp_path / "suites" / "perf" / "test_b.py").write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('x', ['a::b', 'c[d]', '<&'])\n"
        "def test_a(x): pass\n"
        "class TestC:\n"
        "    def test_d(self): assert 0, 'no'\n"
        "    def test_e(self): pytest.skip('unsupported: none')\n"
        "    @pytest.mark.xfail(reason='known')\n"
        "    def test_f(self): assert 0\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml=j.xml", "--rootdir=."]
    command += ["--concord-results=out", "suites"]
    subprocess.run(command, cwd=tmp_path, check=False, capture_output=True)
    (results,) = tmp_path.glob("out/*/results.jsonl")
    theirs, ours = ElementTree.parse(tmp_path / "j.xml"), junit(build([("a", results.read_bytes())]))

    def said(tree: Any) -> set[tuple[Any, ...]]:
        cases = tree.iter("testcase")
        return {(c.get("classname"), c.get("name"), *sorted({e.tag for e in c} - {"properties"})) for c in cases}

    assert said(ElementTree.fromstring(ours)) == said(theirs)
    assert len(said(theirs)) == 6


def test_names() -> None:
    """Brackets end the search for a class."""
    assert names("a/test_b.py::TestC::test_d[x::y/z]") == ("a.test_b.TestC", "test_d[x::y/z]")
    assert names("test_b.py::test_d") == ("test_b", "test_d")


# Badge


def on_two_ranks(made: list[Any]) -> None:
    """Makes the machine one of two devices."""
    few = TooFewDevices(3, 3, "gpu", 2)
    left = {"headline": "", "ranks": [], "waiver": "", "bare": "", "reproducer": None}
    change("[3ranks", verdict="unsupported", cause=few, reason=f"unsupported: {few}", **left)(made)


@pytest.mark.parametrize(
    ("files", "says", "color"),
    [
        (runs, "L5, 1 waived", "yellow"),
        (
            lambda: runs(change("test_two[2ranks-float32]", verdict="passed", headline="", waiver="")),
            "L5",
            "brightgreen",
        ),
        (lambda: runs(change("collectives", verdict="failed", headline="no")), "not conformant", "red"),
        (lambda: runs()[:1], "not shown", "lightgrey"),
        (lambda: [("a", written(records(of=[])))], "not shown", "lightgrey"),
        (lambda: runs(on_two_ranks), "no level: L5 on 2 ranks: partial", "blue"),
    ],
)
def test_badge(files: Any, says: str, color: str) -> None:
    """The badge says the level, and how much is waived; it is XML, and needs nothing from elsewhere."""
    report = build(files())
    found = json.loads(badge.endpoint(report))
    assert (found["schemaVersion"], found["message"], found["color"]) == (1, says, color)
    tree = ElementTree.fromstring(badge.svg(report))
    assert [node.text for node in tree.iter() if node.text and node.text.strip()] == ["concord", says]
    assert b"href" not in badge.svg(report)


# The relay


def test_relay() -> None:
    """Counts, the failed tests with what they say, and the link."""
    found = relay.payload(failing(2), "https://example.com/report")
    assert found["conclusion"] == "failure"
    assert found["test-results"] == {"total": 26, "passed": 22, "failed": 2, "skipped": 2}
    assert [d["name"] for d in found["failed-tests-detail"]] == ["test_one[2ranks]-0", "test_one[2ranks]-1"]
    assert found["artifact-url"] == "https://example.com/report"
    assert "note" not in found
    assert relay.payload(build(runs()))["conclusion"] == "success"


@pytest.mark.parametrize(("count", "text"), [(3000, "no"), (300, "\N{SNOWMAN}" * 5000), (1, "x" * 3_000_000)])
def test_relay_fits(count: int, text: str) -> None:
    """It fits, whatever failed; what was left out is said, and the counts are whole."""
    report = failing(count, text)
    found = relay.payload(report)
    assert len(relay.encode(report)) <= relay.LARGEST
    assert len(json.dumps(found["failed-tests-detail"])) <= relay.LARGEST_INPUT
    assert found["test-results"]["failed"] == count
    assert len(found["failed-tests-detail"]) <= 1000
    assert ("note" in found) == (len(found["failed-tests-detail"]) < count)
    for detail in found["failed-tests-detail"]:
        assert len(detail["message"].encode()) <= 1024
        assert len(detail["stacktrace"].encode()) <= 4096


# Comparison


@pytest.mark.parametrize(
    ("before", "after", "kind", "worse"),
    [
        ("passed", "failed", "newly_failing", True),
        ("waived", "hung", "newly_failing", True),
        ("not-run", "failed", "newly_failing", True),
        ("failed", "passed", "fixed", False),
        ("passed", "not-run", "lost", True),
        ("waived", "unsupported", "lost", True),
        ("failed", "hung", "changed", False),
        ("passed", "waived", "changed", False),
        ("waived", "passed", "changed", False),
        ("passed", "flaky", "newly_failing", True),
        ("flaky", "passed", "fixed", False),
        ("flaky", "failed", "changed", False),
    ],
)
def test_compare(before: str, after: str, kind: str, worse: bool) -> None:
    """Each change of a verdict is of one kind, and some make the later run worse."""
    old, new = (build(runs(change("perf/test_a.py::test_one[2", verdict=v))) for v in (before, after))
    found = compare(old, new)
    (one,) = getattr(found, kind)
    assert (one.nodeid, one.before, one.after) == ("suites/perf/test_a.py::test_one[2ranks]", before, after)
    assert (found.unchanged, found.worse) == (23, worse)


def test_compare_added_and_removed() -> None:
    """Tests that came and went, and an environment that is another."""
    small, large = build(runs()[:1]), failing(2)
    large.environment["torch"] = "2.14"
    found = compare(small, large)
    assert [c.after for c in found.newly_failing] == ["failed", "failed"]
    assert found.environment["torch"] == ("2.13.0", "2.14")
    back = compare(large, small)
    assert ([c.before for c in back.removed], back.worse) == (["failed", "failed"], True)
    assert compare(small, small).worse is False
    assert list(lines(compare(small, small))) == ["24 unchanged"]


def test_compare_level() -> None:
    """A level that is lost makes it worse."""
    assert compare(build(runs()), build(runs()[:1])).worse is True


def test_compare_with_an_older_report() -> None:
    """A report of version 1 has two answers and no minimums; a level that is lost to minimums makes nothing worse."""
    data = json.loads(encode(build(runs())))
    del data["levels_version"], data["steps"]
    for level in data["levels"]:
        for name in ("answer", "partial", "reds", "missing", "waived_of_pytorch", "waived_of_others", "may_be_waived"):
            del level[name]
        level["why_not"] = []
    before = decode(json.dumps({**data, "version": 1}).encode(), "old")
    assert [level.answer for level in before.levels] == ["conformant"] * 6
    assert (badge.message(before)[0], before.levels_version) == ("L5, 1 waived", 0)
    found = compare(before, build(runs(on_two_ranks)))
    assert found.conformant == ("L5", "")
    assert found.environment["version of the levels' minimums"] == ("", "1")
    assert found.worse  # tests are no longer run
    unchanged = compare(before, build(runs()[:1]))
    assert (unchanged.conformant, unchanged.worse) == (("L5", ""), False)
    assert "  version of the levels' minimums: none before, 1 now" in lines(unchanged)


# Text


def test_visible() -> None:
    """What can't be seen is written out; the rest stays."""
    assert visible("a\tb\nc\r\nd é ☃") == "a\tb\nc\nd é ☃"
    assert visible("\x00\x7f\u202e\ud800") == "\\x00\\x7f\\u202e\\ud800"
    assert shortened("abcdef", 3) == "[3 characters before this are in the results]\ndef"


def test_times() -> None:
    """Times are as people say them; what is no time is shown as it is."""
    assert [duration(s) for s in (0.5, 12.3, 302)] == ["0.50 s", "12 s", "5 min 02 s"]
    assert [moment(s) for s in (0, 1.79e9, 1e300)] == ["", "2026-09-21 14:13 UTC", "1e+300"]


# Commands


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("harness.commands.reports.time", SimpleNamespace(time=lambda: STARTED + 86400))
    for name, data in runs():
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.jsonl").write_bytes(data)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


def test_commands(folder: Path) -> None:
    """From runs to a report, a bundle, its check and a comparison."""
    code, said = run("report", "first", "second", "--require", "L5")
    assert (code, "Conformant at L5 (dynamo), profile made-up" in said) == (0, True)
    assert {p.name for p in (folder / "second").iterdir()} >= {"report.html", "report.json", "report.md"}
    assert run("report", "first", "--require", "L1", "--json", "r.json")[0] == 1
    outputs = [
        "--html",
        "o/a.html",
        "--junit",
        "o/a.xml",
        "--badge",
        "o/a.svg",
        "--relay",
        "o/r.json",
        "--markdown",
        "s.md",
    ]
    assert run("report", "first", "second", *outputs)[0] == 0
    assert {p.name for p in (folder / "o").iterdir()} == {"a.html", "a.xml", "a.svg", "a.json", "r.json"}
    assert run("bundle", "first", "second", "-o", "x.zip")[0] == 0
    code, said = run("verify", "x.zip")
    assert (code, "x.zip: not shown: 1 thing could not be checked" in said) == (3, True)
    assert "unchecked there is no local suite to compare it with" in said
    assert run("compare", "first", "x.zip")[0] == 0
    assert run("compare", "x.zip", "r.json", "--markdown")[0] == 1
    assert json.loads(run("compare", "first", "second", "--json")[1])["unchanged"] == 24
    code, said = run("compare", "first", "x.zip", "--html", "c.html")
    assert (code, "wrote c.html" in said) == (0, True)
    assert (folder / "c.html").read_text().startswith("<!doctype html>")


@pytest.fixture
def full_disk() -> Iterator[None]:
    """Files of this process can't be larger than ten bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))  # Python itself ignores SIGXFSZ
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    "arguments",
    [
        ("bundle", "first", "-o", "new"),
        *(("report", "first", option, "new") for option in ("--html", "--json", "--junit", "--badge", "--relay")),
        ("report", "first", "--markdown", "new"),
        ("report", "first"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("there", [True, False], ids=["over-another", "new"])
def test_full_disk(folder: Path, full_disk: None, arguments: tuple[str, ...], there: bool) -> None:
    """On a full disk a command exits with 2 and one line that names the file; what was there before still is."""
    if there:
        (folder / "new").write_text("before")
    before = {path: path.stat().st_size for path in folder.rglob("*")}
    code, said = run(*arguments)
    assert (code, said.count("File too large"), "Traceback" in said) == (2, 1, False), said
    assert said.startswith(f"concord: {'new' if 'new' in arguments else 'first/report.md'}: ")
    assert {path: path.stat().st_size for path in folder.rglob("*")} == before


@pytest.fixture
def same_suite(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle, in a checkout of its suite."""
    run("bundle", "first", "second", "-o", "x.zip")
    monkeypatch.setattr("harness.commands.reports.suite_hash", lambda root: checkout().suite_hash)
    monkeypatch.setattr("harness.commands.reports.checkout_of", lambda root: checkout())
    return folder


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ([], 0),
        (["--strict"], 0),
        (["--require", "L5"], 0),
        (["--require", "L5", "--strict"], 0),
        (["--no-suite"], 3),
        (["--no-suite", "--require", "L1"], 3),
        (["--no-suite", "--strict"], 3),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_verified(same_suite: Path, arguments: list[str], code: int) -> None:
    """In a checkout of its suite a bundle is shown to be what it says, at its level; without one nothing is shown."""
    assert run("verify", "x.zip", *arguments)[0] == code


def test_verified_and_not_conformant(same_suite: Path) -> None:
    """A level that was not reached is 1 with --require, and 0 without: the bundle is honest."""
    run("bundle", "first", "-o", "x.zip")
    assert run("verify", "x.zip")[0] == 0
    code, said = run("verify", "x.zip", "--require", "L1")
    assert "concord: --require L1: L1 is not shown" in said
    assert (code, "No run of all tests of collectives that draw from the seed has one drawn at random" in said) == (
        1,
        True,
    )


def test_plugins_of_others(folder: Path) -> None:
    """The report warns that verify will know nothing of the plug-ins, before the vendor sends the bundle."""
    second = records()
    second[0].plugins = {**second[0].plugins, "anyio": "anyio 4.1"}
    (folder / "third").mkdir()
    (folder / "third/results.jsonl").write_bytes(written(second))
    warned = "a bundle will show no level: the runs had plug-ins of neither pytest nor Concord: anyio\n"
    assert warned not in run("report", "first")[1]
    assert warned in run("report", "third")[1]


def test_verify_strict(same_suite: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is only noted, as a profile that is not the one of its name here, is 3 with --strict and 0 without."""
    other = dataclasses.replace(checkout(), profiles={FILE: "name = 'other'"})
    monkeypatch.setattr("harness.commands.reports.checkout_of", lambda root: other)
    code, said = run("verify", "x.zip")
    assert (code, f"note      runs/1.jsonl: its {FILE} differs from the local profile of that name" in said) == (
        0,
        True,
    )
    assert run("verify", "x.zip", "--strict")[0] == 3


def test_page_made_anew(same_suite: Path) -> None:
    """The page that verify writes is made of the runs, and says of an unchecked bundle that nothing is shown."""
    assert run("verify", "x.zip", "--html", "here.html", "--json", "here.json")[0] == 0
    assert "Conformant at L5" in (same_suite / "here.html").read_text()
    assert json.loads((same_suite / "here.json").read_bytes())["conformant"] == "L5"
    assert run("verify", "x.zip", "--no-suite", "--html", "here.html")[0] == 3
    page = (same_suite / "here.html").read_text()
    assert ("Conformant at L5" in page, "Not checked: there is no local suite to compare it with" in page) == (
        False,
        True,
    )


def test_schema_command() -> None:
    """The schema is printed, and it is the one that the documentation has."""
    code, said = run("report", "--schema")
    published = Path(__file__).parents[2] / "docs" / "schemas" / "report-2.json"
    assert (code, said) == (0, published.read_text())


def test_verify_says_what_is_wrong(folder: Path) -> None:
    """A forged bundle exits with 1, and says what is wrong in a line."""
    run("bundle", "first", "second", "-o", "x.zip")
    data = (folder / "x.zip").read_bytes()
    at = data.index(b"report.html") + 2000
    (folder / "x.zip").write_bytes(data[:at] + b"\x00" + data[at + 1 :])
    code, said = run("verify", "x.zip")
    assert code in (1, 2)
    assert "WRONG" in said or "concord: x.zip: " in said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["report"], "no run was given"),
        (["report", "nothing"], "nothing: No such file"),
        (["report", "first", "--require", "L9"], "--require L9: one of L1,"),
        (["report", "first", "first"], "the same run was given twice"),
        (["report", "first", "--json", "first/results.jsonl/x"], "concord: "),
        (["compare", "first", "nothing.json"], "nothing.json: No such file"),
        (["compare", "first", "nothing.zip"], "nothing.zip: No such file"),
        (["verify", "first/results.jsonl"], "not a zip file"),
        (["verify", "x.zip", "--require", "L9"], "--require L9: one of L1,"),
        (["bundle", "nothing", "-o", "x.zip"], "nothing: No such file"),
        (["verify", "x.zip", "--signer", "me"], "--signature FILE and --signers FILE: not given"),
        (["verify", "x.zip", "--signers", "s"], "--signature FILE and --signer NAME: not given"),
        (["verify", "x.zip", "--signature", "s"], "--signers FILE and --signer NAME: not given"),
        (["verify", "x.zip", "--signature", "s", "--signer", "me"], "--signers FILE: not given"),
        (["verify", "x.zip", "--signature", "s", "--signer", "me", "--signers", "s"], "--signature s: no such file"),
        (["report", "first", "--artifact-url", "https://x.org"], "--artifact-url is for --relay FILE"),
        (["report", "first", "--schema"], "--schema prints the JSON Schema and reads no run"),
        (["report", "--schema", "--json", "x"], "--schema prints the JSON Schema and reads no run"),
        (["report", "first", "--html", "x", "--json", "./x"], "x: to be written, and it is written already"),
        (["report", "first", "--badge", "x.json"], "x.json: to be written, and it is written already"),
        (["report", "first", "--json", "first/results.jsonl"], "it is a run that is read"),
        (["report", "first", "--markdown", "first/results.jsonl"], "it is a run that is read"),
        (["bundle", "first", "-o", "first/results.jsonl"], "it is a run that is read"),
        (["bundle", "first/results.jsonl", "-o", "first/../first/results.jsonl"], "it is a run that is read"),
        (["compare", "first", "second", "--markdown", "--json"], "--markdown and --json: one of them"),
        (["compare", "first", "second", "--html", "first/results.jsonl"], "it is a run that is read"),
    ],
    ids=" ".join,
)
def test_bad_input(folder: Path, arguments: list[str], says: str) -> None:
    """Bad input is one line and exit code 2."""
    code, said = run(*arguments)
    assert (code, says in said) == (2, True), said
    assert len(said.strip().splitlines()) == 1
