"""The standard: its rules, and docs/requirements, which is made of the suites."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.audit.records import load
from harness.commands.collecting import collected
from harness.commands.main import app
from harness.commands.outputs import INDEX, out_of_date
from harness.commands.standard import FOLDER, flaws, standard
from harness.plugin.waivers import Conditions
from harness.profiles.needs import Needs
from harness.profiles.shelf import Shelf
from harness.requirements import LEVELS, STACK_BY_PREFIX
from harness.results import RequirementText
from harness.suite_facts import SuiteFacts, TestFacts
from tests.unit.live_parts import HOST, NONE_LIVE, without_live_test

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def facts() -> SuiteFacts:
    """Collect the suites here, once."""
    return collected(ROOT)


@pytest.mark.timeout(300)
def test_every_sentence_follows_the_rules(facts: SuiteFacts) -> None:
    """No requirement of the suites breaks a rule."""
    assert {text.id: flaws(text.sentence) for text in facts.requirements.values() if flaws(text.sentence)} == {}


@pytest.mark.timeout(300)
def test_the_pages_are_up_to_date(facts: SuiteFacts) -> None:
    """docs/requirements is what the suites say."""
    assert out_of_date(standard(facts), ROOT / FOLDER) == [], f"run: concord requirements {FOLDER}"


@pytest.mark.timeout(300)
def test_prefixes_of_ids_name_the_stack(facts: SuiteFacts) -> None:
    """Links to a requirement find its page by the prefix of its id, so that says which stack it is about."""
    stacks = {text.id: LEVELS[text.level] for text in facts.requirements.values()}
    assert [name for name, stack in stacks.items() if STACK_BY_PREFIX.get(name.partition("-")[0]) != stack] == []


@pytest.mark.timeout(300)
def test_every_requirement_has_a_live_test(facts: SuiteFacts) -> None:
    """No requirement has only waived tests, behind which a second defect would hide, except those that are listed."""
    profile = Shelf(ROOT).read(ROOT / "fixtures/profiles/cpu-gloo.toml")
    found = without_live_test(facts, profile, Conditions.now(HOST))
    assert found == sorted(NONE_LIVE), "add a test of what does work, or the reason why there is none, to live_parts.py"


@pytest.mark.timeout(300)
def test_saved_audit_names_tests(facts: SuiteFacts) -> None:
    """Every test by which the saved audit knows a defect is a test of the suites."""
    results = load(ROOT / "fixtures/faults/noticed.json").results
    assert sorted({result.test for result in results} - set(facts.tests)) == []


def declared(source: str) -> dict[str, set[str]]:
    """Return what a file says of each requirement wherever it declares it, without the file's line breaks."""
    found: dict[str, set[str]] = {}
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call) and node.args]
    for call in calls:
        name = call.args[0]
        if isinstance(call.func, ast.Name) and call.func.id == "requirement" and isinstance(name, ast.Constant):
            rest = [ast.dump(each) for each in (*call.args[1:], *call.keywords)]
            found.setdefault(str(name.value), set()).add(" ".join(rest))
    return found


def test_every_requirement_is_one() -> None:
    """Tests that prove the same requirement say the same of it, or a run of some of them would seem to be forged."""
    every: dict[str, set[str]] = {}
    for file in (ROOT / "suites").rglob("*.py"):
        for name, texts in declared(file.read_text()).items():
            every.setdefault(name, set()).update(texts)
    assert len(every) > 100
    assert {name: texts for name, texts in every.items() if len(texts) > 1} == {}


def test_two_sources_are_noticed() -> None:
    """Another source of the same requirement is another text."""
    text = '@requirement("A-B-01", "A rank waits.", source="{}")\ndef test(): pass\n'
    assert len(declared(text.format("x") + text.format("x"))["A-B-01"]) == 1
    assert len(declared(text.format("x") + text.format("y"))["A-B-01"]) == 2


@pytest.mark.parametrize(
    ("sentence", "rule"),
    [
        ("A rank " + "very " * 28 + "waits.", "30 is the most"),
        ("A rank sends and receives and waits.", "'and' twice"),
        ("A rank sends. Another receives.", "not one sentence"),
        ("A rank sends", "not one sentence"),
        ("A rank sends; another receives.", "semicolon"),
        ("What a rank sends is received.", "indirect subject"),
        ("Whoever waits gets an error.", "indirect subject"),
        ("Where a rank is late, others wait.", "indirect subject"),
        ("A rank will wait.", "present tense"),
    ],
    ids=["long", "and", "two", "unended", "semicolon", "what", "whoever", "where", "future"],
)
def test_flaws(sentence: str, rule: str) -> None:
    """A sentence that breaks one rule has one flaw, which says so."""
    (flaw,) = flaws(sentence)
    assert rule in flaw


@pytest.mark.parametrize(
    "sentence",
    [
        "After all_reduce every rank holds the sum.",
        "A rank " + "very " * 27 + "waits.",
        "torch.distributed.send and recv deliver a message.",
        "Whether a rank waits does not depend on its number.",
    ],
    ids=["plain", "thirty", "dots", "whether"],
)
def test_no_flaws(sentence: str) -> None:
    """A plain sentence has none, with up to thirty words, one 'and' and dotted names."""
    assert flaws(sentence) == []


def made(*texts: RequirementText, **tests: TestFacts) -> dict[str, str]:
    """Render requirements of a made-up file of tests: pages by the name of their file."""
    named = {f"suites/dynamo/test_it.py::{name}": test for name, test in tests.items()}
    return standard(SuiteFacts(tests=named, requirements={text.id: text for text in texts}))


def text(id: str, level: str = "L5", *, mandatory: bool = True) -> RequirementText:
    return RequirementText(id=id, sentence="It holds.", source="torch", level=level, mandatory=mandatory)


def test_one_row() -> None:
    """A row has the id, the sentence, the source, and a link to the test."""
    page = made(text("DYNAMO-ONE-01"), test_one=TestFacts(requirements=["DYNAMO-ONE-01"]))["dynamo.md"]
    link = "[`test_one`](../../suites/dynamo/test_it.py)"
    assert page.endswith(f"## DYNAMO-ONE\n\n{_HEAD}| `DYNAMO-ONE-01` | It holds. | torch | {link} |\n")


_HEAD = "| id | requirement | source | tests |\n|---|---|---|---|\n"


def test_names_that_not_every_version_has() -> None:
    """The names in PyTorch that tests need are listed, each with the requirements of these tests."""
    pages = made(
        text("DYNAMO-ONE-01"),
        text("DYNAMO-ONE-02"),
        test_one=TestFacts(requirements=["DYNAMO-ONE-02"], needs=Needs(torch="torch.a.b(c)")),
        test_two=TestFacts(requirements=["DYNAMO-ONE-01"], needs=Needs(torch="torch.a.b(c)")),
    )
    assert pages[INDEX].endswith("|---|---|\n| `torch.a.b(c)` | `DYNAMO-ONE-01`, `DYNAMO-ONE-02` |\n")


def test_some_parameters() -> None:
    """Where only some instances of a test prove a requirement, their parameters are shown, without the world."""
    pages = made(
        text("DYNAMO-ONE-01"),
        **{"test_law[2ranks-a]": TestFacts(requirements=["DYNAMO-ONE-01"]), "test_law[3ranks-b]": TestFacts()},
    )
    assert "`test_law[a]`" in pages["dynamo.md"]


def test_properties_and_optional_ones() -> None:
    """A property and an optional requirement are marked, and counted."""
    pages = made(
        text("DYNAMO-ONE-01", mandatory=False),
        text("DYNAMO-ONE-02"),
        test_one=TestFacts(requirements=["DYNAMO-ONE-01", "DYNAMO-ONE-02"], property_based=True),
    )
    assert "| `DYNAMO-ONE-01` *(optional)* |" in pages["dynamo.md"]
    assert "(../../suites/dynamo/test_it.py) *(property)* |" in pages["dynamo.md"]
    assert "| [L5](dynamo.md) | `dynamo` | 2, 1 optional |" in pages[INDEX]


def test_order() -> None:
    """Levels, topics and numbers are in order, whatever the order of collection."""
    ids = ["REPL-B-10", "REPL-B-02", "REPL-A-01"]
    pages = made(
        text("DYN-A-01"), *(text(each, "L2") for each in ids), test_one=TestFacts(requirements=[*ids, "DYN-A-01"])
    )
    assert [*pages] == [INDEX, "replicate.md", "dynamo.md"]
    places = [pages["replicate.md"].index(f"`{each}`") for each in ("REPL-A-01", "REPL-B-02", "REPL-B-10")]
    assert places == sorted(places)


def test_escapes() -> None:
    """What Markdown could take for a border or emphasis is escaped, and names keep their underscores."""
    odd = RequirementText(id="DYNAMO-ONE-01", sentence="a|b.", source="_private, all_reduce, __new__, *x", level="L5")
    pages = made(odd, test_one=TestFacts(requirements=["DYNAMO-ONE-01"]))
    assert r"| a\|b. | \_private, all_reduce, \_\_new\_\_, \*x |" in pages["dynamo.md"]


class TestCommand:
    """``concord requirements``, which collects the suites in another process."""

    @pytest.fixture(autouse=True)
    def suites(self, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
        """One requirement instead of the suites; returns its pages."""
        facts = SuiteFacts(
            tests={"suites/dynamo/test_it.py::test_one": TestFacts(requirements=["DYNAMO-ONE-01"])},
            requirements={"DYNAMO-ONE-01": text("DYNAMO-ONE-01")},
        )
        monkeypatch.setattr("harness.commands.standard.collected", lambda root: facts)
        return standard(facts)

    def test_prints(self, suites: dict[str, str]) -> None:
        """Without a folder, it prints the pages."""
        assert CliRunner().invoke(app, ["requirements"]).output == "\n".join(suites.values())

    def test_writes(self, suites: dict[str, str], tmp_path: Path) -> None:
        """With a folder, it writes the pages, which are up to date then."""
        folder = tmp_path / "pages"
        assert CliRunner().invoke(app, ["requirements", str(folder)]).exit_code == 0
        assert {file.name: file.read_text() for file in folder.iterdir()} == suites
        assert CliRunner().invoke(app, ["requirements", str(folder), "--check"]).exit_code == 0

    @pytest.mark.parametrize("there", [None, "old"], ids=["missing", "old"])
    def test_out_of_date(self, there: str | None, suites: dict[str, str], tmp_path: Path) -> None:
        """--check exits with 1, says which pages are old and what to run, and writes nothing."""
        page = tmp_path / "dynamo.md"
        (tmp_path / INDEX).write_text(suites[INDEX])
        if there is not None:
            page.write_text(there)
        done = CliRunner().invoke(app, ["requirements", str(tmp_path), "--check"])
        assert done.exit_code == 1
        assert done.output == f"in {tmp_path}, dynamo.md out of date; run: concord requirements {tmp_path}\n"
        assert (page.read_text() if page.exists() else None) == there

    def test_a_page_too_many(self, tmp_path: Path) -> None:
        """A page that nothing writes any more is left where it is, and both ways name it."""
        (tmp_path / "old.md").write_text("old")
        done = CliRunner().invoke(app, ["requirements", str(tmp_path)])
        assert (done.exit_code, done.output) == (
            0,
            f"{tmp_path / 'old.md'}: nothing writes this page any more; remove it\n",
        )
        assert CliRunner().invoke(app, ["requirements", str(tmp_path), "--check"]).exit_code == 1

    def test_check_needs_a_folder(self) -> None:
        """--check without a folder is bad input."""
        assert CliRunner().invoke(app, ["requirements", "--check"]).exit_code == 2

    def test_a_file(self, tmp_path: Path) -> None:
        """A file in place of the folder is bad input."""
        (tmp_path / "page.md").write_text("mine")
        done = CliRunner().invoke(app, ["requirements", str(tmp_path / "page.md")])
        assert (done.exit_code, (tmp_path / "page.md").read_text()) == (2, "mine")
        assert "a file, not a folder for pages" in done.stderr


def test_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are no suites, the command says so, and names no option that it lacks."""
    monkeypatch.chdir(tmp_path)
    ended = CliRunner().invoke(app, ["requirements"])
    said = f"concord: {tmp_path} has no folder suites; run this where they are\n"
    assert (ended.exit_code, ended.stderr) == (2, said)
