"""The catalog of known defects: what it reads, how it orders and counts, and its page, summary and command."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.commands.main import app
from harness.profiles.vocabulary import KINDS
from harness.versions import areas, findings
from harness.versions.areas import AREAS, area
from harness.versions.catalog import NOT_RUN, OTHERWISE, Catalog, CatalogError, Finding, catalog, counts, view
from harness.versions.findings import GONE, THERE
from harness.versions.summary import BEGIN, END, summary, with_summary
from harness.versions.tables import rows, standard
from reports.findings import page, report_of, short
from tests.versions.known_defects import DEFECTS, HOSTILE, ISSUE, NEW, OLD, REQUIREMENTS, checkout, defect

ROOT = Path(__file__).parents[2]
VERSIONS, PYTORCH = "docs/findings/versions.json", "fixtures/defects/pytorch.toml"


@pytest.fixture
def made(tmp_path: Path) -> Catalog:
    """The catalog of a few known defects."""
    return catalog(checkout(tmp_path))


def named(of: Catalog, id: str) -> Finding:
    """The defect with an id."""
    (found,) = [each for each in of.findings if each.id == id]
    return found


class TestOrder:
    def test_worst_first(self, made: Catalog) -> None:
        """By kind, then those that the newest version has; one without a kind comes last."""
        kinds = [each.kind for each in made.findings]
        assert kinds == ["wrong", "wrong", "wrong", "hang", "crash", "error", "accepts", "cost", ""]
        assert [each.id for each in made.findings[:3]] == ["without_script", "dtensor_item", "dtensor_fixed"]

    def test_counts(self, made: Catalog) -> None:
        """Each area that has defects is counted by kind, and so are all; other endings than none are there."""
        of = {each.area: each for each in counts(made)}
        assert list(of) == ["Collectives", "DTensor", "torch.compile", ""]
        dtensor = of["DTensor"]
        assert (dtensor.kinds["wrong"], dtensor.total, dtensor.there, dtensor.reported) == (2, 2, 1, 1)
        assert of[""].kinds == {"wrong": 3, "hang": 1, "crash": 1, "error": 1, "accepts": 1, "cost": 1}
        assert (of[""].total, of[""].there, of[""].reported) == (9, 5, 1)


class TestWhatIsKnown:
    def test_row(self, made: Catalog) -> None:
        """A defect has the sentence of its row, or its reason if a row is of several or there is none."""
        assert named(made, "dtensor_item").sentence == "item() of a `DTensor` is silently wrong"
        assert named(made, "stuck").sentence == "the reason of stuck"
        assert named(made, "strided").sentence == "the reason of strided"

    def test_versions(self, made: Catalog) -> None:
        """A version has the defect, or has it not, or its script ends otherwise, or was not run."""
        states = {each.id: [(v.state, v.how) for v in each.versions] for each in made.findings}
        assert states["dtensor_fixed"] == [(THERE, ""), (GONE, "")]
        assert states["strided"] == [(THERE, ""), (OTHERWISE, "raises TypeError")]
        assert states["of_no_kind"] == [(NOT_RUN, "")] * 2

    def test_other_backends(self, tmp_path: Path) -> None:
        """A script on gloo says nothing of a defect that shows elsewhere alone."""
        elsewhere = defect("strided", "error").replace("expires", 'backends = ["nccl"]\nexpires')
        found = named(catalog(checkout(tmp_path, [elsewhere])), "strided")
        assert [each.state for each in found.versions] == [NOT_RUN, NOT_RUN]

    def test_scripts(self, made: Catalog) -> None:
        """A script has its text and its command, from the checkout; a row's script that is no defect comes with it."""
        (script,) = named(made, "dtensor_item").scripts
        assert script.command == "torchrun --standalone --nproc-per-node=2 docs/findings/dtensor_item.py"
        assert "# what dtensor_item does" in script.text
        assert [each.name for each in named(made, "stuck").scripts] == ["stuck", "also"]
        assert named(made, "without_script").scripts == ()

    def test_report(self, made: Catalog) -> None:
        """An unreported defect has no link."""
        assert (named(made, "dtensor_item").link, named(made, "stuck").link) == (ISSUE, "")

    def test_requirements(self, made: Catalog) -> None:
        """A defect has the requirements of its tests, as far as parameters tell."""
        assert named(made, "dtensor_item").requirements == {"TP-B-01": "Numbers add up."}
        assert named(made, "stuck").requirements == {"COLL-A-01": "A collective _works_."}
        assert named(made, "compiled_often").requirements == {"DYN-C-01": "Compiled."}

    def test_unknown_parameters(self) -> None:
        """If no parameter fits a glob, the requirements of the whole test are given rather than none."""
        known = standard([REQUIREMENTS])
        of_other = known.of(["suites/tp_extension/test_b.py::test_b[*-other]"])
        assert list(of_other) == ["TP-B-01", "TP-B-02"]
        assert known.of(["suites/x.py::test_b", "no file"]) == {}

    def test_escaped_bars(self) -> None:
        """A bar that is escaped does not end a cell."""
        (row,) = rows(r"| a \| b | [c](findings/c.py) | d |")
        assert (row.sentence, row.scripts) == (r"a \| b", ("c",))


class TestAreas:
    @pytest.mark.parametrize(
        ("id", "stack", "expected"),
        [
            ("dtensor_new", "tp_extension", "DTensor"),
            ("fsdp_new", "tp_extension", "FSDP1"),
            ("fsdp_new", "replicate_fsdp", "FSDP2"),
            ("checkpoint_new", "replicate_fsdp", "State dicts, checkpoints"),
            ("checkpoint_keyword", "replicate_fsdp", "FSDP2"),
            ("something", "dynamo", "torch.compile"),
            ("something", "elsewhere", "Collectives"),
        ],
    )
    def test_area(self, id: str, stack: str, expected: str) -> None:
        """The name of a defect says its area, or else the stack of its test."""
        assert area(id, [f"suites/{stack}/test_x.py::test_y"]) == expected

    def test_all_are_described(self) -> None:
        """Every area that a rule names says what it is about."""
        assert {*areas._BEGINNINGS, *areas._OF_STACK.values()} == {*AREAS}

    def test_rules_are_of_use(self, shipped: Catalog) -> None:
        """Each beginning is that of a shipped defect in the area, so that none is left of one that is gone."""
        ids = {name: [each.id for each in shipped.findings if each.area == name] for name in AREAS}
        unused = [
            beginning
            for name, beginnings in areas._BEGINNINGS.items()
            for beginning in beginnings
            if not any(each.startswith(beginning) for each in ids[name])
        ]
        assert unused == []


class TestShipped:
    def test_summary(self, shipped: Catalog) -> None:
        """The table of docs/findings.md has the numbers of today: python -m harness.versions.summary."""
        page = (ROOT / "docs/findings.md").read_text()
        assert page == with_summary(page, summary(shipped))

    def test_complete(self, shipped: Catalog) -> None:
        """Every shipped defect has a kind, tests that prove a requirement, and a script that says how it is run."""
        assert [each.named for each in shipped.findings if not each.kind or not each.requirements] == []
        assert [each.named for each in shipped.findings for script in each.scripts if not script.command] == []

    def test_kinds_agree_with_scripts(self, shipped: Catalog) -> None:
        """A defect whose script dies is no refusal, and one whose script hangs is a hang."""
        known = findings.read(ROOT)
        ends = {
            each.named: {
                known[version.version].outcomes[each.id] for version in each.versions if version.state == THERE
            }
            for each in shipped.findings
        }
        killed = ("dies by signal 6", "dies by signal 11")
        mild = [each for each in shipped.findings if each.kind not in ("wrong", "hang", "crash")]
        assert [each.named for each in mild if ends[each.named] & {*killed, "hangs"}] == []
        assert [each.named for each in shipped.findings if each.kind == "crash" and "hangs" in ends[each.named]] == []

    def test_kinds_are_documented(self) -> None:
        """docs/versions.md explains each kind in the words of the page."""
        page = (ROOT / "docs/versions.md").read_text()
        table = page.partition("## `concord findings`")[2].partition("## ")[0]
        documented = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", table, re.MULTILINE))
        assert documented == dict(KINDS)


class TestSummary:
    def test_numbers(self, made: Catalog) -> None:
        """The summary has a row for each area and one for all, without zeros."""
        assert "| DTensor | 2 |  |  |  |  |  | 2 | 1 | 1 |" in summary(made).splitlines()
        assert "| all | 3 | 1 | 1 | 1 | 1 | 1 | 9 | 5 | 1 |" in summary(made).splitlines()

    def test_replaced(self) -> None:
        """Only what is between its lines is written anew; a page without them is an error."""
        assert with_summary(f"a\n{BEGIN}\nold\n{END}\nb\n", f"{BEGIN}\nnew\n{END}") == f"a\n{BEGIN}\nnew\n{END}\nb\n"
        with pytest.raises(ValueError, match="has no lines"):
            with_summary(f"a\n{END}\n{BEGIN}\n", "")


class TestPage:
    def test_hostile(self, tmp_path: Path) -> None:
        """What defects and scripts say stays text, and only addresses of the web are links."""
        hostile = [*DEFECTS, defect("linked", "wrong")]
        known = view(catalog(checkout(tmp_path, hostile)))
        for each in known["findings"]:
            if each["id"] == "linked":
                each["link"] = "javascript:window.hacked=3"
        text = page(known)
        assert HOSTILE not in text
        assert (text.count("<script>"), text.count("<img"), 'href="javascript' in text) == (1, 0, False)
        assert "javascript:window.hacked=3" in text
        assert f'href="{ISSUE}"' in text

    def test_offline(self, made: Catalog) -> None:
        """The page is one file that asks for nothing."""
        text = page(view(made))
        assert "default-src 'none'" in text
        addresses = re.findall(r"""<\w[^<>]*\s(?:src|href)=["']?([^"' >]+)""", text)
        assert {each for each in addresses if not each.startswith(("#", "data:"))} == {ISSUE}

    def test_nothing(self, tmp_path: Path) -> None:
        """A checkout without a defect has a page, too."""
        assert "0 defects" in page(view(catalog(checkout(tmp_path, [], {}))))

    def test_links(self) -> None:
        """A report on GitHub is called by its number, and any other by its address."""
        assert report_of(ISSUE) == "pytorch#130515"
        assert report_of("https://example.com/a/b") == "https://example.com/a/b"

    def test_short_versions(self) -> None:
        """A version is called by its minor, unless two have the same."""
        assert short(["2.13.0", "2.15.0"]) == {"2.13.0": "2.13", "2.15.0": "2.15"}
        assert short(["2.15.0", "2.15.1"]) == {"2.15.0": "2.15.0", "2.15.1": "2.15.1"}


class TestCommand:
    def test_page(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The command writes the page, runs nothing and changes nothing that is recorded."""
        monkeypatch.chdir(checkout(tmp_path))
        before = (tmp_path / findings.FILE).read_bytes()
        monkeypatch.setattr(findings, "Ranks", None)
        ended = CliRunner().invoke(app, ["findings", "--page", "out/page.html"])
        assert (ended.exit_code, ended.output) == (0, f"out/page.html: 9 known defects, 5 of them in PyTorch {NEW}\n")
        assert "item() of a <code>DTensor</code> is silently wrong" in (tmp_path / "out/page.html").read_text()
        assert (tmp_path / findings.FILE).read_bytes() == before

    @pytest.mark.parametrize(
        ("file", "text", "says"),
        [
            (VERSIONS, None, "nothing is known of any version"),
            (VERSIONS, "{}", "nothing is known of any version"),
            (VERSIONS, "garbage", f"{VERSIONS}: not what concord findings writes"),
            (VERSIONS, '{"x": {}}', f"{VERSIONS}: not what concord findings writes"),
            (VERSIONS, '{"x": {"torch": "x", "python": "3", "outcomes": {}}}', f"{VERSIONS}: not what concord"),
            (PYTORCH, 'owner = "pytorch"\nx = 1\n', f"{PYTORCH}:2: x: no such key"),
        ],
        ids=["absent", "empty", "garbage", "schema", "version", "defects"],
    )
    def test_unreadable(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, text: str | None, says: str
    ) -> None:
        """What can't be read is one clear error, and no page is written."""
        monkeypatch.chdir(checkout(tmp_path))
        if text is None:
            (tmp_path / file).unlink()
        else:
            (tmp_path / file).write_text(text)
        ended = CliRunner().invoke(app, ["findings", "--page", "page.html"])
        assert (ended.exit_code, says in ended.output, ended.output.count("\n")) == (2, True, 1), ended.output
        assert not (tmp_path / "page.html").exists()

    def test_garbage_without_a_page(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Neither are scripts run if what is known can't be read."""
        monkeypatch.chdir(checkout(tmp_path))
        (tmp_path / findings.FILE).write_text("garbage")
        ended = CliRunner().invoke(app, ["findings", "stuck"])
        assert (ended.exit_code, "not what concord findings writes" in ended.output) == (2, True)
        assert (tmp_path / findings.FILE).read_text() == "garbage"

    @pytest.mark.parametrize("arguments", [["stuck"], ["--env", "."]])
    def test_runs_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
        """A page takes no names and no environments, which would run."""
        monkeypatch.chdir(checkout(tmp_path))
        ended = CliRunner().invoke(app, ["findings", *arguments, "--page", "page.html"])
        assert (ended.exit_code, "--page runs nothing" in ended.output) == (2, True)

    def test_not_a_checkout(self, tmp_path: Path) -> None:
        """Elsewhere than in a checkout there is an error that says so."""
        with pytest.raises(CatalogError, match="run it in a checkout of Concord"):
            catalog(tmp_path)

    def test_other_files_are_missing(self, tmp_path: Path) -> None:
        """Without rows, requirements and scripts, defects are there with their reasons."""
        root = checkout(tmp_path)
        docs = root / "docs"
        for file in [docs / "findings.md", *docs.glob("requirements/*"), *docs.glob("findings/*.py")]:
            file.unlink()
        found = named(catalog(root), "dtensor_item")
        assert (found.sentence, found.requirements, found.scripts) == ("the reason of dtensor_item", {}, ())
        assert [each.version for each in found.versions] == [OLD, NEW]
