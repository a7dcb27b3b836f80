"""The page of a report, in a browser: it answers first, can be clicked and filtered, and what is in it stays text."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import pytest
from answers import ANSWERS
from invented import PROFILE, change, evidence, records, runs, written

from harness.profiles.vocabulary import DTYPES, REDUCING
from harness.results import (
    GROUPS,
    Call,
    Cases,
    GivenWorld,
    OptionGiven,
    RequirementText,
    RunEnd,
    Setting,
    TestResult,
    Tried,
)
from reports.build import build
from reports.page import page as page_of

LAYOUTS = ("contiguous", "offset", "column", "transposed")
HOSTILE = [
    "<script>window.hacked = 1</script>",
    "</script><script>window.hacked = 2</script>",
    "</style></pre></details><img src=x onerror='window.hacked = 3'>",
    "{{ 7 * 7 }}{% raw %}${7 * 7}",
    '" onmouseover="window.hacked = 4" x=\'',
    "' autofocus onfocus='window.hacked = 5",
    "javascript:window.hacked=6",
    "<!-- <svg onload=window.hacked=7> ]]>",
    "&lt;b&gt;&amp;#60;",
    "\x00\x1b[31m\x07\u202egnp.exe\u2066\u200b\ufeff",
]


@pytest.fixture
def opened(page: Any, tmp_path: Path) -> Callable[..., Any]:
    """Opens the page of some runs, or of two invented ones."""

    def open_(*changes: Any, files: list[tuple[str, bytes]] | None = None) -> Any:
        file = tmp_path / "report.html"
        file.write_text(page_of(build(files if files is not None else runs(*changes))))
        page.goto(file.as_uri(), wait_until="load")
        return page

    return open_


def shown(page: Any, selector: str) -> list[str]:
    """Texts of what can be seen."""
    return [node.inner_text() for node in page.query_selector_all(selector) if node.is_visible()]


def test_answer_first(opened: Any) -> None:
    """At which level, on what, when, with how many waivers: on the first screen, in words."""
    page = opened()
    assert page.inner_text("h1") == "Conformant at L5 (dynamo)"
    facts = page.inner_text(".facts")
    for part in (
        "gloo on cpu",
        "A processor",
        "2.13.0",
        "2027-01-15",
        "2 runs, seed default, seed 123",
        "1 test for made-up",
    ):
        assert part in facts
    assert page.query_selector(".facts").bounding_box()["y"] < 400
    assert "Conformant at L5" in page.title()


def test_why_not(opened: Any) -> None:
    """A level that is not conformant says why; what is wrong with a run is said once, above."""
    page = opened(files=runs(change("replicate_fsdp/test_a.py::test_one[2", verdict="hung"))[:1])
    assert page.inner_text("h1") == "Not conformant at L3 (replicate_fsdp)"
    assert page.inner_text(".means").startswith("1 thing is wrong. REPLICATEFSDP-ONE-01: 1 hung of 2 tests")
    third = page.query_selector_all(".levels > li")[2].inner_text()
    assert "REPLICATEFSDP-ONE-01: 1 hung of 2 tests; first suites/replicate_fsdp/test_a.py::test_one[2" in third
    assert page.query_selector(".problems") is None
    cut = runs()[0][1].rpartition(b'{"record":"end"')[0]
    page = opened(files=[("cut", cut)])
    assert page.inner_text(".problems li") == "The run was cut off before its end."


def test_answers(opened: Any) -> None:
    """Each answer differs from the others without color: by its words and its sign, in the heading and at the level."""
    said, signs = [], []
    for name, (files, words) in ANSWERS.items():
        page = opened(files=files())
        assert (page.inner_text("h1"), page.inner_text(".levels .state")) == (words, name)
        said.append(words)
        of = "(selector) => getComputedStyle(document.querySelector(selector), '::before').content"
        signs.append(page.evaluate(of, "h1"))
        assert page.evaluate(of, ".levels .state") == signs[-1]
    assert len({*signs}) == len({*said}) == len(ANSWERS)


def test_next_command(opened: Any, page: Any) -> None:
    """What to do next is on the first screen, right below the answer, also on a phone; a click selects the command."""
    for width, height in ((1280, 800), (390, 844)):
        page.set_viewport_size({"width": width, "height": height})
        opened(files=runs()[:1])
        command = page.query_selector(".next pre")
        assert command.inner_text() == "pytest suites/ -n 2 --concord-seed random -m property_based"
        box = command.bounding_box()
        assert box["y"] + box["height"] < 400
        assert box["x"] + box["width"] <= width
    command.click()
    assert page.evaluate("getSelection().toString()").strip() == command.inner_text()


def test_no_next_command(opened: Any) -> None:
    """Where all is shown, or a run would not help, nothing is to do."""
    for files, _ in (ANSWERS["conformant"], ANSWERS["not conformant"]):
        assert opened(files=files()).query_selector(".next") is None


def test_search(opened: Any) -> None:
    """Words narrow requirements and tests, all of them; nothing found is said; Show all brings everything back."""
    page = opened()
    assert page.inner_text("#found") == "24 tests of 12 requirements"
    page.fill("#q", "tpextension two")
    assert page.inner_text("#found") == "2 tests of 1 requirement"
    assert shown(page, ".requirement .id") == ["TPEXTENSION-TWO-01"]
    page.fill("#q", "no such thing")
    assert shown(page, ".requirement") == []
    assert page.is_visible("#nothing")
    page.click("#again")
    assert page.inner_text("#found") == "24 tests of 12 requirements"
    assert not page.is_visible("#nothing")


def test_filters(opened: Any) -> None:
    """Verdicts and stacks narrow together; undeclared is not unsupported."""
    page = opened(change("dynamo/test_a.py::test_one[2", verdict="unsupported", reason="unsupported: no float8"))
    page.check("[name=verdict][value=undeclared]")
    assert shown(page, ".requirement .id") == ["COLLECTIVES-ONE-01"]
    page.check("[name=verdict][value=unsupported]")
    assert page.inner_text("#found") == "2 tests of 2 requirements"
    page.select_option("#stack", "dynamo")
    assert shown(page, ".requirement .id") == ["DYNAMO-ONE-01"]
    page.click("#reset")
    assert page.inner_text("#found") == "24 tests of 12 requirements"


def test_tests_by_size(opened: Any) -> None:
    """A cell of the last table narrows to its tests, the address leads there, and the button shows all again."""
    page = opened()
    cell = page.query_selector(".cell[href='#tests=replicate&size=2']")
    assert cell.get_attribute("aria-label") == "replicate, 2: 1 waived, 1 passed"
    cell.click()
    page.wait_for_selector("#cell:not([hidden])")
    assert page.inner_text("#found") == "2 tests of 2 requirements"
    assert page.inner_text("#cell") == "replicate, 2 ranks"
    page.click("#reset")
    assert page.inner_text("#found") == "24 tests of 12 requirements"


def at(page: Any, fragment: str) -> Any:
    """Go to another place of the page, as a link from elsewhere does."""
    page.goto(f"{page.url.partition('#')[0]}#{fragment}")
    return page


def listed(page: Any) -> list[list[str]]:
    """The rows of the cases that are shown, without their tests."""
    rows = page.query_selector_all("#cases-table tbody tr")
    return [[cell.inner_text() for cell in row.query_selector_all("td")[:-1]] for row in rows]


def test_cell(opened: Any) -> None:
    """A cell says how many of its cases passed, and leads to them: fields, sizes, times, tests, requirements."""
    page = opened()
    cell = page.query_selector(".cell[href='#collective=all_reduce&dtype=float32']")
    assert (cell.inner_text(), cell.get_attribute("aria-label")) == ("✓ 2", "all_reduce, float32: 2 passed")
    assert not page.is_visible("#cases")
    cell.click()
    page.wait_for_selector("#cases:not([hidden])")
    assert (page.inner_text("#cases-h"), page.inner_text("#cases-sum")) == ("all_reduce, float32", "2 passed")
    assert listed(page) == [["✓ passed", "SUM", "contiguous", "world", "sync", "2, 3", "16"]]
    assert "collectives/test_a.py::test_two[3ranks-float32] COLLECTIVES-TWO-01" in page.inner_text("#cases-table")
    assert page.evaluate("document.activeElement.id") == "cases"
    assert cell.get_attribute("aria-current") == "true"
    page.click("#close")
    assert not page.is_visible("#cases")
    assert page.evaluate("document.activeElement.textContent") == cell.text_content()
    page.go_back()
    assert page.inner_text("#cases-h") == "all_reduce, float32"


def test_cell_of_a_stack(opened: Any) -> None:
    """A waived case says whose the defect is, in its cell and beside its test, with the reproducer."""
    page = opened()
    cell = page.query_selector(".cell[href='#stack=replicate&option=static_graph&value=yes&size=2']")
    assert cell.inner_text().split() == ["◐", "0/1", "made-up"]
    cell.click()
    page.wait_for_selector("#cases:not([hidden])")
    assert page.inner_text("#cases-h") == "replicate, static_graph, yes, 2 ranks"
    assert [row[0] for row in listed(page)] == ["◐ waived"]
    tests = page.inner_text("#cases-table")
    assert "replicate/test_a.py::test_two[2ranks-float32] REPLICATE-TWO-01 waived, of made-up" in tests
    assert "torchrun repro_a.py" in tests


def test_states_of_cells(opened: Any) -> None:
    """Every state of a cell has a sign and a word of its own, so that colors are not needed."""
    endings = {0: "passed", 1: "wrong", 2: "stopped", 4: "not-reached"}
    tried = [Tried(2, ended, [number], [1]) for number, ended in endings.items()]

    def other(made: list[Any]) -> None:
        for verdict, name in (("failed", "one[2ranks]"), ("hung", "one[3ranks]"), ("crashed", "two[2ranks-float32]")):
            change(f"collectives/test_a.py::test_{name}", verdict=verdict, cause=None, reason="", tried=[])(made)
        size = {"hung": 3}
        for record in made:
            if isinstance(record, TestResult) and record.verdict in ("failed", "hung", "crashed"):
                of = size.get(record.verdict, 2)
                record.tried = [msgspec.structs.replace(each, size=of) for each in tried]
        for name in ("one[2", "two[2"):
            change(f"dynamo/test_a.py::test_{name}", verdict="unsupported", reason="unsupported: no float8")(made)
        change("dynamo/test_a.py::test_one[3", verdict="not-run", reason="not now")(made)
        change("replicate/test_a.py::test_one[3ranks]", tried=[Tried(3, "undeclared", [3], [1])])(made)

    page = opened(other)
    signs = {}
    for cell in page.query_selector_all(".cell"):
        (verdict,) = set(cell.get_attribute("class").split()) - {"cell"}
        assert verdict.replace("-", " ") in cell.get_attribute("aria-label").replace("-", " ")
        signs.setdefault(verdict, set()).add(cell.text_content().strip()[0])
    assert {*signs} >= {"failed", "hung", "crashed", "waived", "passed", "not-reached", "undeclared", "unsupported"}
    assert all(len(sign) == 1 for sign in signs.values())
    assert len({*map(tuple, signs.values())}) == len(signs)
    words = page.inner_text(".legend")
    assert all(verdict.replace("-", " ") in words for verdict in signs)


def test_permalinks(opened: Any) -> None:
    """An address opens what it names: a cell's cases, a test with its evidence, a requirement. No other breaks it."""
    page = opened()
    assert at(page, "op=MAX&size=2").inner_text("#cases-h") == "MAX, 2 ranks"
    assert at(page, "collective=all_shout").inner_text("#cases-sum") == "No case that was tried fits this address."
    at(page, "test=" + quote("suites/replicate/test_a.py::test_two[2ranks-float32]"))
    assert page.is_visible("#REPLICATE-TWO-01 .evidence .headline")
    assert not page.is_visible("#cases")
    at(page, "DYNAMO-ONE-01")
    assert page.evaluate("document.getElementById('DYNAMO-ONE-01').open")
    for fragment in ("%", "=", "a=b", "size=", "test=none", "%E0%A4%A", "collective=all_reduce&what=else"):
        assert not at(page, fragment).is_visible("#cases")


def test_link_from_a_case_to_its_test(opened: Any) -> None:
    """The link of a case opens the test in its requirement, even if a filter hides it."""
    page = opened()
    page.fill("#q", "no such thing")
    at(page, "collective=broadcast&dtype=float32")
    page.click("#cases-table tbody a >> nth=0")
    page.wait_for_selector("#COLLECTIVES-ONE-01[open]")
    assert page.is_visible("#COLLECTIVES-ONE-01 .test")
    assert page.input_value("#q") == ""


def test_nothing_tried(opened: Any) -> None:
    """Older results have no cases, which the page says; tests are there by stack and size."""
    page = opened(change("", tried=[]))
    assert "The results do not say which cases tests tried" in page.inner_text(".tried")
    assert page.query_selector_all(".cell.passed[href^='#collective']") == []
    assert page.query_selector(".cell[href='#tests=replicate&size=2']") is not None


def test_whole_run(opened: Any, page: Any) -> None:
    """A run as large as all suites, with all cases, is a page of less than 2 MB, and its cells open."""
    words = [("SUM", "MAX", "MIN"), DTYPES, LAYOUTS, ("", "offset", "column"), GROUPS, ("sync", "async", "functional")]
    every = [Call(name, *rest) for name in REDUCING for rest in itertools.product(*words)][:3600]
    tests = [
        TestResult(
            nodeid=f"suites/collectives/arguments/test_crossings.py::test_an_input_of_any_layout[2ranks-{number}-{name}]",
            verdict="passed",
            stack="collectives",
            requirements=[f"COLL-X-{number % 300:02}"],
            size=2,
            world=GivenWorld(2, "gloo", "cpu"),
            tried=[Tried(2, "passed", sorted({(number * 3 + i) % 3600 for i in range(3)}), [2, 2, 2])],
        )
        for number, name in zip(range(2600), itertools.cycle(REDUCING))
    ]
    made = [each for each in records(of=[]) if not isinstance(each, RunEnd)]
    made[1].tests = [test.nodeid for test in tests]
    sentences = [RequirementText(id=f"COLL-X-{n:02}", sentence="A word. " * 12, level="L1") for n in range(300)]
    opened(files=[("a", written([*made, *sentences, Cases(every), *tests, *records(of=[])[-1:]]))])
    assert len(page.content().encode()) < 2_000_000
    at(page, "collective=all_reduce&dtype=float32")
    rows = "document.querySelectorAll('#cases-table tbody tr').length"
    assert page.evaluate(rows) == 100
    page.click("#all-cases")
    assert page.evaluate(rows) > 100


def test_evidence(opened: Any) -> None:
    """From a requirement to its test, to each rank: error, collectives, stack, output, and the reproducer."""
    page = opened()
    page.check("[name=verdict][value=waived]")
    page.click("#REPLICATE-TWO-01 > summary")
    page.click("#REPLICATE-TWO-01 .test details > summary")
    text = page.inner_text("#REPLICATE-TWO-01")
    for part in (
        "rank 0 of 2 failed first",
        "without the waiver it failed",
        "torchrun repro_a.py",
        "AssertionError: 1 is",
    ):
        assert part in text
    assert "all_reduce(float32[4]) #1 on group 0" in text
    assert "printed by 0" in text
    assert page.get_attribute(".waiver a", "href") == "https://example.com/issues/1"
    page = opened(change("dynamo/test_a.py::test_one[2", verdict="failed", headline="no", ranks=evidence()))
    page.click("#DYNAMO-ONE-01 > summary")
    page.click("#DYNAMO-ONE-01 .test details > summary")
    assert "printed by 1" not in page.inner_text("#DYNAMO-ONE-01")
    page.click("#DYNAMO-ONE-01 .rank:not([open]) > summary")
    assert "printed by 1" in page.inner_text("#DYNAMO-ONE-01")


def test_evidence_of_a_known_defect(opened: Any) -> None:
    """A waived test has the end of the first rank's evidence, and says what is left out; a failed test has all."""
    texts: dict[str, Any] = {"headline": "no", "text": "<" + "t" * 900, "ranks": evidence("<" + "e" * 900)}
    page = opened(change("test_two[2ranks-float32", **texts), change("test_one[2", verdict="failed", **texts))
    for id_, cut, ranks in (("REPLICATE-TWO-01", 200, 1), ("REPLICATE-ONE-01", 926, 2)):
        texts_of = page.evaluate(f"[...document.querySelectorAll('#{id_} .rank pre')].map((pre) => pre.textContent)")
        long = [text.partition("\n")[2] if text.startswith("[") else text for text in texts_of if "eee" in text]
        assert [len(text) for text in long] == [cut] * ranks
        assert ("The results have the evidence of 1 other rank." in page.text_content(f"#{id_}")) is (ranks == 1)


def test_tests_of_a_function(opened: Any) -> None:
    """Tests of a function that passed have its name once; each can be searched, linked to and compared by its own."""
    page = opened()
    page.evaluate("location.hash = '#DYNAMO-ONE-01'")
    page.wait_for_selector("#DYNAMO-ONE-01[open]")
    assert page.inner_text("#DYNAMO-ONE-01").count("suites/dynamo/test_a.py::test_one") == 1
    page.fill("#q", "dynamo test_one[3ranks]")
    page.wait_for_function("document.querySelector('#found').textContent === '1 test of 1 requirement'")
    assert shown(page, "#DYNAMO-ONE-01 .test") == ["[3ranks]"]
    page.check("[name=verdict][value=waived]")
    assert page.query_selector_all(".function >> visible=true") == []
    page.click("#reset")
    page.evaluate("location.hash = '#test=" + quote("suites/dynamo/test_a.py::test_one[3ranks]") + "'")
    page.wait_for_selector("#DYNAMO-ONE-01[open] .test code:text-is('[3ranks]')")
    page = opened(change("dynamo/test_a.py::test_one[2", verdict="failed", headline="no"))
    assert [*page.evaluate("[...document.querySelectorAll('#DYNAMO-ONE-01 .test')].map(nameOf)")] == [
        "suites/dynamo/test_a.py::test_one[2ranks]",
        "suites/dynamo/test_a.py::test_one[3ranks]",
    ]


def test_link_to_a_requirement(opened: Any) -> None:
    """The address with a requirement's id shows it, open."""
    page = opened()
    page.evaluate("location.hash = '#DYNAMO-ONE-01'")
    page.wait_for_selector("#DYNAMO-ONE-01[open]")
    assert "suites/dynamo/test_a.py::test_one\n[2ranks]" in page.inner_text("#DYNAMO-ONE-01")


def test_keyboard(opened: Any) -> None:
    """Without a mouse: a link past the top comes first, / goes to the search, Escape empties it, Enter opens."""
    page = opened()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the requirements"
    page.keyboard.press("/")
    page.keyboard.type("dynamo-one")
    assert page.inner_text("#found") == "2 tests of 1 requirement"
    page.keyboard.press("Escape")
    assert page.inner_text("#found") == "24 tests of 12 requirements"
    page.focus("#DYNAMO-ONE-01 > summary")
    page.keyboard.press("Enter")
    assert page.query_selector("#DYNAMO-ONE-01[open]") is not None


def test_names_for_screen_readers(opened: Any) -> None:
    """There is one heading of the first level, none is skipped, and everything that can be used has a name."""
    page = opened()
    levels = page.evaluate("[...document.querySelectorAll('h1,h2,h3')].map((h) => Number(h.tagName[1]))")
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    nameless = page.evaluate(
        "[...document.querySelectorAll('input,select,button,[role=img],[role=region]')].filter((e) =>"
        " !(e.getAttribute('aria-label') || e.textContent.trim() || e.closest('label'))).length"
    )
    assert nameless == 0
    assert page.get_attribute("html", "lang") == "en"


def contrast(page: Any, selector: str) -> float:
    """The contrast of a text with what is behind it, as WCAG defines it."""
    return float(
        page.evaluate(
            """(selector) => {
              const numbers = (text) => text.match(/[\\d.]+/g).map(Number);
              const light = (rgb) => rgb.slice(0, 3).map((v) => v / 255)
                .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
                .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
              const node = document.querySelector(selector);
              let behind = node;
              let found = numbers(getComputedStyle(behind).backgroundColor);
              while (found.length === 4 && found[3] === 0 && behind.parentElement) {
                behind = behind.parentElement;
                found = numbers(getComputedStyle(behind).backgroundColor);
              }
              const [a, b] = [light(numbers(getComputedStyle(node).color)), light(found)].sort((x, y) => y - x);
              return (a + 0.05) / (b + 0.05);
            }""",
            selector,
        )
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colors(opened: Any, page: Any, scheme: str) -> None:
    """Texts can be read in both schemes (a contrast of 4.5), and the button changes it for the page."""
    page.emulate_media(color_scheme=scheme)
    for files, _ in ANSWERS.values():
        opened(files=files())
        for selector in ("h1", ".levels .state", ".means", ".next p", ".next pre", ".why li"):
            if page.query_selector(selector) is not None:
                assert contrast(page, selector) >= 4.5, selector
    opened(
        change("dynamo/test_a.py::test_one[2", verdict="failed"), change("dynamo/test_a.py::test_two", verdict="hung")
    )
    marks = [f".chip .mark.{verdict}" for verdict in ("failed", "hung", "waived", "passed", "undeclared")]
    for selector in ("h1", ".lead", ".facts dt", ".levels .state", *marks, ".cell", "footer"):
        assert contrast(page, selector) >= 4.5, selector
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
    assert contrast(page, ".lead") >= 4.5


def test_phone(opened: Any, page: Any) -> None:
    """On 390 pixels nothing is wider than the screen, with evidence open, and what is touched is large enough."""
    page.set_viewport_size({"width": 390, "height": 844})
    opened(change("dynamo/test_a.py::test_one[2", verdict="failed", headline="x" * 300, ranks=evidence("y" * 500)))
    at(page, "collective=all_reduce&dtype=float32")
    page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    heights = page.evaluate(
        "[...document.querySelectorAll('.chip, .cell')].map((e) => e.getBoundingClientRect().height)"
    )
    assert min(heights) >= 32


def test_print(opened: Any, page: Any) -> None:
    """On paper the page is light, has no controls, cuts nothing off, and shows why a level is not reached."""
    page.emulate_media(color_scheme="dark")
    opened(change("collectives/test_a.py::test_one[2", verdict="failed", headline="no"))
    page.click("#theme")  # light, as chosen
    page.click("#theme")  # dark, as chosen
    page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = false; })")
    page.emulate_media(media="print", color_scheme="dark")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert contrast(page, "h1") >= 4.5
    assert not any(page.is_visible(selector) for selector in ("#filters", "#theme"))
    assert page.is_visible(".why li")
    assert page.is_visible(".waiver .tests")
    assert page.evaluate(
        "[...document.querySelectorAll('.scroll')].every((e) => getComputedStyle(e).overflowX === 'visible')"
    )
    assert len(page.pdf()) > 10_000
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    page.emulate_media(media="screen", color_scheme="dark")
    assert not page.is_visible(".why li")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"


def test_keyboard_reaches_everything(opened: Any) -> None:
    """Tab alone reaches the next command, reasons, cells, filters and requirements, and shows where it is."""
    page = opened(files=runs()[:1])
    reached, outlined = set(), True
    for _ in range(200):
        page.keyboard.press("Tab")
        where, outline = page.evaluate(
            """() => {
              const e = document.activeElement;
              const kinds = ['.next pre', '.why summary', '.cell', '#q', '#stack', '.chip input',
                '.requirement > summary'];
              return [kinds.find((kind) => e.matches(kind)) || '', getComputedStyle(e).outlineStyle];
            }"""
        )
        reached.add(where)
        outlined &= where == "" or outline != "none"
    assert {".next pre", ".why summary", ".cell", "#q", "#stack", ".chip input", ".requirement > summary"} <= reached
    assert outlined


def hostile(text: str) -> Callable[[list[Any]], None]:
    """Puts a text wherever a run says anything."""

    def apply(made: list[Any]) -> None:
        header, collected = made[0], made[1]
        hit: list[int] = []
        verdicts = itertools.cycle([("waived", "failed"), ("failed", "")])
        header.arguments, header.profile, header.environment = [text], text, {text: text, "cpu": text}
        header.seed, header.subject, header.concord = text, text, text
        for record in made:
            if type(record).__name__ == "ProfileText":
                record.name = record.about = record.backend = record.device = text
                record.claims = {text: text}
                record.waivers[0].reason = record.waivers[0].link = record.waivers[0].place = text
            if type(record).__name__ == "RequirementText" and record.id.startswith("REPLICATE-"):
                record.sentence, record.source = text, text
            if isinstance(record, TestResult) and "replicate/" in record.nodeid:
                before = record.nodeid
                record.nodeid = f"{before}[{text}]"
                collected.tests = [record.nodeid if name == before else name for name in collected.tests]
                record.verdict, record.bare = next(verdicts)
                record.waiver = text if record.verdict == "waived" else ""
                record.reason = record.headline = record.text = record.dtype = text
                record.world = GivenWorld(2, text, text)
                ranks = evidence(text)
                record.ranks = [msgspec.structs.replace(r, output=text, stack=text, collectives=[text]) for r in ranks]
                if record.reproducer is not None:
                    record.reproducer.text = record.reproducer.command = record.reproducer.file = text
            if isinstance(record, Cases):
                call, setting = record.cases[0], record.cases[-1]
                assert isinstance(call, Call)
                assert isinstance(setting, Setting)
                shown = text[:100]
                for name in HOSTILE:
                    record.cases.append(msgspec.structs.replace(call, collective=name, op=shown, dtype=shown))
                    record.cases.append(msgspec.structs.replace(setting, stack=name[:100], option=shown, value=shown))
                    hit += [len(record.cases) - 2, len(record.cases) - 1]
            if isinstance(record, TestResult) and "collectives/test_a.py::test_two[2" in record.nodeid:
                record.tried = [Tried(2, "passed", sorted(hit), [1] * len(hit))]
        made[-1].left_out = [OptionGiven(text)]

    return apply


def test_hostile_text(opened: Any, page: Any) -> None:
    """Whatever tests, ranks and profiles say stays text, in every place at once; what is invisible is written out."""
    text = "\n".join(HOSTILE)
    opened(hostile(text))
    page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    page.evaluate("document.querySelectorAll('*').forEach((e) => e.dispatchEvent(new Event('mouseover')))")
    assert page.evaluate("window.hacked") is None
    assert page.evaluate("document.querySelectorAll('img, svg, iframe, object').length") == 0
    assert page.evaluate("document.scripts.length") == 2  # and the cases, which are data
    assert page.evaluate("[...document.links].filter((a) => a.protocol === 'javascript:').length") == 0
    outputs = [element.inner_text() for element in page.query_selector_all(".rank pre:last-of-type")]
    whole = [output for output in outputs if "characters before this" not in output]
    # Tests that failed are shown whole, waived ones from their last 200 characters.
    assert 0 < len(whole) < len(outputs)
    for line in HOSTILE[:-1]:
        assert all(line in output for output in whole)
    assert all("\\x00\\x1b[31m\\x07\\u202egnp.exe\\u2066\\u200b\\ufeff" in output for output in outputs)
    assert page.evaluate("document.body.innerText.includes('\\u202e')") is False
    page.fill("#q", "<script>")
    assert page.inner_text("#found") == "4 tests of 2 requirements"
    for cell in page.query_selector_all(".cell"):
        cell.evaluate("(e) => e.click()")
        page.evaluate("0")
    assert page.evaluate("window.hacked") is None
    assert page.evaluate("document.querySelectorAll('img, svg, iframe, object').length") == 0
    assert "\\x00\\x1b[31m" in page.inner_text(".tried")
    assert page.evaluate("document.body.innerText.includes('\\u202e')") is False


def test_hostile_link(opened: Any, page: Any) -> None:
    """A link that is none of the web is no link."""
    opened(hostile("javascript:window.hacked=1"))
    assert page.query_selector(".waiver a") is None


def test_a_great_deal(opened: Any) -> None:
    """A megabyte of output on each rank: the page has its end, and says how much is missing."""
    text = "".join(f"line {i}\n" for i in range(100_000)) + "the end"
    ranks = [msgspec.structs.replace(rank, output=text) for rank in evidence()]
    files = [
        ("a", written(records())),
        *runs(change("dynamo/test_a.py::test_one[2", verdict="failed", ranks=ranks))[1:],
    ]
    page = opened(files=files)
    page.evaluate(
        "document.querySelectorAll('#DYNAMO-ONE-01, #DYNAMO-ONE-01 details').forEach((d) => { d.open = true; })"
    )
    shown_text = page.inner_text("#DYNAMO-ONE-01")
    assert "the end" in shown_text
    assert "characters before this are in the results" in shown_text
    assert len(page.content()) < 300_000


def test_empty(opened: Any) -> None:
    """A run in which nothing was run makes a page, too."""
    made = records(of=[])
    page = opened(files=[("a", written(made))])
    assert page.inner_text("h1") == "Not shown yet at any level"
    assert PROFILE.splitlines()[0] not in page.content()


def test_address_holds_filters(opened: Any, page: Any) -> None:
    """Search, stack and verdicts are in the address, from which they come back; Show all empties it."""
    opened()
    page.fill("#q", "one")
    page.select_option("#stack", "collectives")
    page.check("[name=verdict][value=undeclared]")
    page.wait_for_url("**#find=one&in=collectives&verdict=undeclared")
    address = page.url
    page.goto("about:blank")
    page.goto(address)
    assert (page.input_value("#q"), page.input_value("#stack")) == ("one", "collectives")
    assert page.inner_text("#found") == "1 test of 1 requirement"
    page.click("#reset")
    page.wait_for_url("**/report.html")
    assert page.inner_text("#found") == "24 tests of 12 requirements"


def test_address_holds_the_cell_and_filters(opened: Any, page: Any) -> None:
    """A cell that is opened while filters are on keeps them; closing it leaves them; Back leads to the view before."""
    opened()
    page.fill("#q", "broadcast")
    page.wait_for_url("**#find=broadcast")
    page.click(".cell[href='#collective=all_reduce&dtype=float32']")
    page.wait_for_url("**#collective=all_reduce&dtype=float32&find=broadcast")
    assert page.inner_text("#cases-h") == "all_reduce, float32"
    page.reload()
    assert page.inner_text("#cases-h") == "all_reduce, float32"
    assert page.query_selector(".cell[aria-current]").get_attribute("href") == "#collective=all_reduce&dtype=float32"
    assert page.input_value("#q") == "broadcast"
    page.go_back()
    page.wait_for_url("**#find=broadcast")
    assert not page.is_visible("#cases")
    page.go_forward()
    page.wait_for_selector("#cases:not([hidden])")
    page.click("#close")
    assert page.url.endswith("#find=broadcast")


def test_address_holds_what_is_open(opened: Any, page: Any) -> None:
    """A requirement and a test that someone opens are in the address, and open from it; closing removes them."""
    opened()
    page.click("#REPLICATE-TWO-01 > summary")
    assert page.url.endswith("#REPLICATE-TWO-01")
    page.click("#REPLICATE-TWO-01 .test details > summary >> nth=0")
    assert page.url.endswith(
        "#REPLICATE-TWO-01&test=" + quote("suites/replicate/test_a.py::test_two[2ranks-float32]", safe="_.")
    )
    address = page.url
    page.goto("about:blank")
    page.goto(address)
    assert page.is_visible("#REPLICATE-TWO-01 .evidence .headline")
    page.click("#REPLICATE-TWO-01 .test details > summary >> nth=0")
    assert page.url.endswith("#REPLICATE-TWO-01")
    page.click("#REPLICATE-TWO-01 > summary")
    assert "#" not in page.url


def test_hostile_address(opened: Any, page: Any) -> None:
    """An address that anyone may have made shows no text of its own as more than text, and breaks nothing."""
    opened()
    for fragment in (
        "find=<img src=x onerror=window.hacked=1>&verdict=none&in=nowhere",
        "collective=<img src=x onerror=window.hacked=2>",
        "__proto__=x&constructor=y",
        "vs-cell=%3Cimg%20src%3Dx%3E&vs-kind=none&vs-test=]",
        "test=" + "x" * 10_000,
    ):
        at(page, fragment)
        page.reload()
    assert page.evaluate("window.hacked") is None
    assert page.query_selector("img") is None
    assert page.inner_text("h1") == "Conformant at L5 (dynamo)"
