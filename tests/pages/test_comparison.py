"""The comparison of two reports in a browser: from a file that is chosen or dropped, and as a page of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import pytest
from board_of import bundled, with_
from invented import CASES, Change, change, records, runs, written

from harness.results import NOT_REACHED, RunEnd, TestResult, Tried
from reports import archive, bundle, embedded
from reports.build import build
from reports.compare import TITLES, compare
from reports.model import CASE_ORDER, ORDER, Report, encode
from reports.page import comparison_page
from reports.page import page as page_of

HOSTILE = "</script><img src=x onerror='window.hacked = 1'>\u202e<script>window.hacked = 2</script>"
WORSE = (
    change("replicate_fsdp/test_a.py::test_one[2", verdict="failed", headline="rank 1 of 2 failed first: no"),
    change("replicate/test_a.py::test_two[2", verdict="passed", waiver="", bare="", tried=[]),
    change("dynamo/test_a.py::test_one[3", verdict="unsupported", reason="unsupported: no wind"),
    with_(torch="2.14.1"),
)


def other(*changes: Change, later: float = 5000.0) -> Report:
    """A report of another time, with changes."""
    files = []
    for name, made in (("c", records(later=later)), ("d", records("77", drawn=True, later=later + 1000))):
        for each in changes:
            each(made)
        files.append((name, written(made)))
    return build(files)


def wrong_cases(made: list[Any]) -> None:
    """One case of a collective is wrong, and its test failed."""
    tried = [Tried(2, "passed", [0, 2], [3, 2]), Tried(2, "wrong", [1], [1]), Tried(2, "undeclared", [3], [1])]
    change("collectives/test_a.py::test_one[2", verdict="failed", headline="no", tried=tried)(made)


@pytest.fixture
def opened(page: Any, tmp_path: Path) -> Callable[..., Any]:
    """Opens the page of two invented runs."""

    def open_(fragment: str = "", report: Report | None = None) -> Any:
        file = tmp_path / "report.html"
        file.write_text(page_of(report or build(runs())))
        page.goto(file.as_uri() + fragment, wait_until="load")
        return page

    return open_


def choose(page: Any, path: Path) -> None:
    """Choose a file, and wait for what comes of it."""
    page.set_input_files("#other", str(path))
    page.wait_for_selector("#comparison:not([hidden]), #compare-error:not(:empty)")


def refusal(page: Any, path: Path) -> str:
    """Choose a file that is refused; returns what is said."""
    choose(page, path)
    assert not page.is_visible("#comparison")
    said: str = page.inner_text("#compare-error")
    page.evaluate("document.querySelector('#compare-error').textContent = ''")
    return said


def rows(page: Any, selector: str) -> list[list[str]]:
    """The texts of a table."""
    return [
        [cell.inner_text().strip() for cell in row.query_selector_all("th, td")]
        for row in page.query_selector_all(f"{selector} tbody tr")
    ]


@pytest.mark.parametrize("kind", ["html", "json", "zip"])
def test_forms(opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """A page, JSON and a bundle of the same runs say the same: tests, levels, surroundings."""
    path = tmp_path / f"other.{kind}"
    if kind == "zip":
        monkeypatch.setattr(bundle, "page", lambda report: "no page")
        bundled(path, *WORSE, days=1)
    else:
        report = other(*WORSE)
        path.write_bytes(page_of(report).encode() if kind == "html" else encode(report))
    page = opened()
    with page.expect_file_chooser() as chooser:
        page.click("#compare")
    chooser.value.set_files(str(path))
    page.wait_for_selector("#comparison:not([hidden])")
    assert page.inner_text("#vs-sum") == ("1 test newly failing, 1 test no longer run, 1 test changed, 21 unchanged")
    assert page.inner_text("#vs-verdict") == "✕ Worse than before:"
    assert ["torch", "2.13.0", "2.14.1"] in rows(page, "#vs-around")
    assert ["L3 replicate_fsdp", "conformant", "not conformant ▽ lower"] in rows(page, "#vs-levels")
    assert ["L1 collectives", "conformant", "conformant"] in rows(page, "#vs-levels")
    text = page.inner_text("#vs-tests")
    assert "suites/replicate_fsdp/test_a.py::test_one[2ranks]\nrank 1 of 2 failed first: no" in text
    assert page.inner_text("#vs-after").startswith("made-up, PyTorch 2.14.1, 2027-01-")
    assert page.evaluate("document.activeElement.id") == "comparison"


def test_agrees_with_the_command(opened: Any, page: Any) -> None:
    """The browser finds the kinds of changes that `concord compare` finds, for every pair of verdicts."""
    opened()
    verdicts = ["", *ORDER]
    for was in verdicts:
        for now in verdicts:
            if not was and not now:
                continue
            made = [_one_test(verdict) for verdict in (was, now)]
            found = compare(*made)
            (kind,) = [name for name in TITLES if getattr(found, name)] or ["same"]
            assert page.evaluate(f"comparing.kind_of({was!r}, {now!r})") == kind, (was, now)


def _one_test(verdict: str) -> Report:
    report = build(runs())
    report.tests = [msgspec.structs.replace(report.tests[0], verdict=verdict)] if verdict else []
    return report


def test_same_data_in_both_forms(opened: Any, page: Any) -> None:
    """A page and JSON of one report differ in nothing, even where texts are long, foreign and invisible."""
    report = other(wrong_cases, *WORSE, with_(cpu="\u202e" + "x" * 300, empty=" ", **{HOSTILE: "\x00\u2028 é 漢"}))
    opened()
    shown = """([one, two]) => {
      const found = comparing.differences(reading.of_text(one), reading.of_text(two));
      const cases = found.cases.filter((each) => each.kind_of !== "same").length;
      const tests = found.tests.filter((each) => each.kind !== "same").length;
      return [found.around, tests, cases, found.tests.length, found.cases.length];
    }"""
    assert page.evaluate(shown, [str(embedded.data(report)), encode(report).decode()]) == [
        [],
        0,
        0,
        24,
        len(report.cases),
    ]


def test_cells(opened: Any, tmp_path: Path) -> None:
    """A cell shows what passed before and after, leads to the cases that differ, and its address leads back to it."""
    (tmp_path / "other.json").write_bytes(encode(other(wrong_cases)))
    page = opened()
    choose(page, tmp_path / "other.json")
    cell = page.query_selector("[aria-label='Collectives and dtypes, what differs'] a.cell")
    assert cell.inner_text().split() == ["✗", "1", "→", "0/1"]
    assert cell.get_attribute("aria-label") == ("all_reduce, int32: 1 newly failing; passed 1 before, 0/1 after")
    cell.click()
    page.wait_for_selector("#vs-cases:not([hidden])")
    assert page.inner_text("#vs-cases-h") == "all_reduce, int32"
    assert rows(page, "#vs-cases-table") == [
        ["newly failing", "passed → failed", "MAX", "contiguous", "some", "async", "2"]
    ]
    assert page.evaluate("location.hash") == "#vs-cell=collective%3Dall_reduce%26dtype%3Dint32"
    page.click("#vs-close-cases")
    assert not page.is_visible("#vs-cases")
    assert page.evaluate("document.activeElement.className").startswith("cell vs")


def test_address_holds_the_view(opened: Any, page: Any, tmp_path: Path) -> None:
    """Search, kinds, order and the chosen cell are in the address; with the file chosen again they are restored."""
    (tmp_path / "other.json").write_bytes(encode(other(wrong_cases, *WORSE)))
    opened()
    choose(page, tmp_path / "other.json")
    page.click("#vs-swap")
    page.check("[name=vs-kind][value=fixed]")
    page.fill("#vs-find", "fsdp")
    page.wait_for_selector("#vs-found >> text=1 test of 4 that differ")
    fragment = page.evaluate("location.hash")
    assert fragment == "#vs-swap=1&vs-find=fsdp&vs-kind=fixed"
    page.goto("about:blank")
    opened(f"{fragment}&vs-cell={quote('collective=all_reduce&dtype=int32')}")
    assert "Choose the other report again" in page.inner_text("#compare-error")
    choose(page, tmp_path / "other.json")
    page.wait_for_selector("#comparison:not([hidden])")
    assert page.inner_text("#compare-error") == ""
    assert page.inner_text("#vs-found") == "1 test of 4 that differ"
    assert page.is_checked("[name=vs-kind][value=fixed]")
    assert page.inner_text("#vs-cases-h") == "all_reduce, int32"
    assert page.inner_text("#vs-after").startswith("made-up, PyTorch 2.13.0, 2027-01-15 08:18")
    page.click("#vs-close")
    assert page.evaluate("location.hash") == ""
    assert not page.is_visible("#comparison")


def test_to_a_test(opened: Any, page: Any, tmp_path: Path) -> None:
    """The name of a test leads to its evidence on this page; the comparison stays."""
    (tmp_path / "other.json").write_bytes(encode(other(*WORSE)))
    opened()
    choose(page, tmp_path / "other.json")
    page.click("#vs-tests a >> text=replicate/test_a.py::test_two[2ranks-float32]")
    page.wait_for_selector("#REPLICATE-TWO-01 .evidence .headline >> visible=true", timeout=10_000)
    assert page.is_visible("#comparison")


def test_dropped(opened: Any, page: Any, tmp_path: Path) -> None:
    """A file can be dropped on the page; two at once are refused."""
    opened()
    drop = """([text, times]) => {
      const data = new DataTransfer();
      for (let i = 0; i < times; i += 1) data.items.add(new File([text], `other${i}.json`));
      const options = { bubbles: true, cancelable: true, dataTransfer: data };
      for (const kind of ["dragover", "drop"]) document.body.dispatchEvent(new DragEvent(kind, options));
    }"""
    text = encode(other(*WORSE)).decode()
    page.evaluate(drop, [text, 2])
    assert page.inner_text("#compare-error").startswith("Drop one file")
    page.evaluate(drop, [text, 1])
    page.wait_for_selector("#comparison:not([hidden])")
    assert page.inner_text("#compare-error") == ""


def test_keyboard(opened: Any, page: Any, tmp_path: Path) -> None:
    """The button, chips, cells and tests are reached with Tab alone, and Enter opens a cell."""
    (tmp_path / "other.json").write_bytes(encode(other(wrong_cases, *WORSE)))
    page.on("filechooser", lambda chooser: None)  # from the start, so that no window of the system opens
    opened()
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "compare"
    with page.expect_file_chooser() as chooser:
        page.keyboard.press("Enter")
    chooser.value.set_files(str(tmp_path / "other.json"))
    page.wait_for_selector("#comparison:not([hidden])")
    reached = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate(
                """() => ['#vs-swap', '#vs-close', 'a.cell.vs', '#vs-find', '[name=vs-kind]', '#vs-tests a']
                  .find((kind) => document.activeElement.matches(kind)) || ''"""
            )
        )
    assert reached >= {"#vs-swap", "#vs-close", "a.cell.vs", "#vs-find", "[name=vs-kind]", "#vs-tests a"}
    page.focus("a.cell.vs")
    page.keyboard.press("Enter")
    page.wait_for_selector("#vs-cases:not([hidden])")


def test_print(opened: Any, page: Any, tmp_path: Path) -> None:
    """On paper the comparison is there, without its controls."""
    (tmp_path / "other.json").write_bytes(encode(other(*WORSE)))
    opened()
    choose(page, tmp_path / "other.json")
    page.emulate_media(media="print")
    assert page.is_visible("#vs-sum")
    assert page.is_visible("#vs-tests .test")
    assert not any(page.is_visible(selector) for selector in ("#vs-swap", "#compare", "#vs-filters", "#vs-close"))


def test_phone(opened: Any, page: Any, tmp_path: Path) -> None:
    """On 390 pixels nothing is wider than the screen."""
    page.set_viewport_size({"width": 390, "height": 844})
    (tmp_path / "other.json").write_bytes(encode(other(wrong_cases, *WORSE, with_(cpu="x" * 300))))
    opened("#vs-cell=" + quote("collective=all_reduce&dtype=int32"))
    choose(page, tmp_path / "other.json")
    page.wait_for_selector("#vs-cases:not([hidden])")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_a_page_of_two(page: Any, tmp_path: Path) -> None:
    """`concord compare --html` makes a page of both, whose address restores the view without a file."""
    html = comparison_page(build(runs()), other(wrong_cases, *WORSE))
    (tmp_path / "compare.html").write_text(html)
    test = quote("suites/replicate_fsdp/test_a.py::test_one[2ranks]", safe="")
    address = (tmp_path / "compare.html").as_uri() + f"#vs-kind=newly_failing&vs-test={test}"
    page.goto(address)
    assert page.inner_text("h1") == "made-up, before and after"
    assert page.inner_text("#vs-sum").startswith("2 tests newly failing, 1 test no longer run, 1 test changed, ")
    assert page.inner_text("#vs-found") == "2 tests of 4 that differ"
    assert "test_one[2ranks]" in page.inner_text("#vs-tests [aria-current] code")
    assert page.evaluate("document.activeElement.closest('[aria-current]') !== null")
    page.click("#vs-swap")
    assert page.inner_text("#vs-sum").startswith("2 tests fixed, 2 tests changed, 20 unchanged")


def test_nothing_differs(opened: Any, page: Any, tmp_path: Path) -> None:
    """A report beside itself: nothing is worse, and the page says so."""
    (tmp_path / "same.json").write_bytes(encode(build(runs())))
    opened()
    choose(page, tmp_path / "same.json")
    assert page.inner_text("#vs-verdict") == "✓ Not worse than before:"
    assert page.inner_text("#vs-sum") == "24 unchanged"
    assert page.inner_text("#vs-found") == "No test differs."
    assert page.is_visible("#vs-alike")
    assert page.is_visible("#vs-no-cases")


def test_hostile_texts(opened: Any, page: Any, tmp_path: Path) -> None:
    """Whatever a file says stays text, in every place at once; what is invisible is written out."""
    report = other(wrong_cases, *WORSE)
    report.profile = report.concord = report.subject = HOSTILE
    report.environment = {HOSTILE: HOSTILE, "torch": HOSTILE, "__proto__": HOSTILE}
    report.levels[0].id = report.levels[0].stack = HOSTILE
    for test in report.tests[:3]:
        test.nodeid, test.headline, test.verdict = f"{test.nodeid}{HOSTILE}", HOSTILE, "failed"
    for each in report.cases:
        each.case = msgspec.structs.replace(each.case, **dict.fromkeys(each.case.__struct_fields__, HOSTILE))
    (tmp_path / "hostile.json").write_bytes(encode(report))
    (tmp_path / "hostile.html").write_text(page_of(msgspec.structs.replace(report, requirements=[])))
    for name in ("hostile.json", "hostile.html"):
        opened()
        choose(page, tmp_path / name)
        page.wait_for_selector("#comparison:not([hidden])")
        for cell in page.query_selector_all("a.cell.vs"):
            cell.evaluate("(e) => e.click()")
        text = page.inner_text("#comparison")
        assert text.count("<script>window.hacked = 2</script>") > 10
        assert "\u202e" not in text
        assert "\\u202e" in text
        assert page.evaluate("window.hacked") is None
        assert page.evaluate("document.querySelectorAll('img').length") == 0
        assert page.evaluate("({}).polluted === undefined && Object.getPrototypeOf({}) === Object.prototype")


def _without(**fields: Any) -> bytes:
    return json.dumps({**json.loads(encode(build(runs()))), **fields}).encode()


def test_bad_files(opened: Any, page: Any, tmp_path: Path) -> None:
    """Each file that is no report gets one error with its name, and the page goes on."""
    opened()
    whole = bundled_bytes(tmp_path)
    nested = "[" * 100_000
    files = {
        "empty.json": (b"", "it is no report"),
        "words.json": (b"hello", "it is no report"),
        "null.json": (b"null", "it is no report"),
        "nested.json": (nested.encode(), "it is no report"),
        "binary.json": (b"\xff\xfe\x00", "it is no text"),
        "other.html": (b"<!doctype html><script>window.hacked = 1</script>", "without data to compare"),
        "cut.html": (
            b'<html><script type="application/json" id="page-data">{"schema":"concord.page"',
            "it is no report",
        ),
        "results.jsonl": (runs()[0][1], "these are raw results"),
        "newer.json": (_without(version=99), "a newer Concord wrote it"),
        "page.html": (
            b'<html><script type="application/json" id="page-data">{"schema":"concord.page","version":2}</script>',
            "a page of another Concord",
        ),
        "tests.json": (_without(tests="all"), "its tests are no list"),
        "verdict.json": (_without(tests=[{"nodeid": "a", "verdict": "great"}]), "unknown verdict"),
        "nodeid.json": (_without(tests=[{"nodeid": 1, "verdict": "passed"}]), "its test is no text"),
        "many.json": (_without(tests=[0] * 20_001), "20,001 tests, and at most 20,000"),
        "levels.json": (_without(levels=[None]), "its level is no object"),
        "case.json": (_without(cases=[{"case": ["call", "a"], "size": 2, "verdict": "passed"}]), "other fields"),
        "size.json": (_without(made="yesterday"), "its time is no number"),
        "environment.json": (_without(environment=[]), "its environment is no object"),
        "garbage.zip": (b"PK\3\4" + b"x" * 200, "not a bundle that can be read"),
        "short.zip": (b"PK", "not a bundle that can be read"),
        "other.zip": (archive.packed({"readme.txt": b"hello"}), "without a report.json"),
        "cut.zip": (whole[: len(whole) // 2], "not a bundle that can be read"),
        "lying.zip": (lying(whole), "not a bundle that can be read"),
    }
    for name, (data, why) in files.items():
        (tmp_path / name).write_bytes(data)
        said = refusal(page, tmp_path / name)
        assert said.startswith(f"{name}: ")
        assert why in said, name
        assert said.count("\n") == 0
    assert page.evaluate("window.hacked") is None
    (tmp_path / "good.json").write_bytes(encode(other(*WORSE)))
    choose(page, tmp_path / "good.json")
    assert page.is_visible("#comparison")


def bundled_bytes(folder: Path) -> bytes:
    """A bundle's content, as far as a browser reads it."""
    return archive.packed({"manifest.json": b"{}", "report.json": encode(other(*WORSE))})


def lying(data: bytes) -> bytes:
    """A zip file whose directory says that report.json is smaller than it is."""
    at = data.rindex(b"PK\1\2")
    return data[: at + 24] + (100).to_bytes(4, "little") + data[at + 28 :]


def test_huge_files(opened: Any, page: Any, tmp_path: Path) -> None:
    """A file past the bound is refused by its size, before anything is read; so is a bomb in a bundle."""
    assert opened().evaluate("reading.LARGEST") == archive.LARGEST
    huge = tmp_path / "huge.json"
    with huge.open("wb") as stream:
        stream.truncate(archive.LARGEST + 1)
    page.evaluate("() => { Blob.prototype.arrayBuffer = () => { window.read = true; }; }")
    assert refusal(page, huge) == "huge.json: it has 49 MiB, and at most 48 are read."
    assert page.evaluate("window.read") is None
    opened()
    bomb = archive.packed({"report.json": b" " * (archive.LARGEST + 1)})
    assert len(bomb) < 1 << 20
    (tmp_path / "bomb.zip").write_bytes(bomb)
    assert refusal(page, tmp_path / "bomb.zip") == "bomb.zip: its report has 49 MiB, and at most 48 are read."


def test_only_the_last_file(opened: Any, page: Any) -> None:
    """If a second file is chosen while the first is read, the second is shown."""
    opened()
    texts = [encode(other(*WORSE)).decode(), encode(other(with_(torch="2.99"))).decode()]
    page.evaluate(
        """([slow, fast]) => {
          const drop = (file) => {
            const data = new DataTransfer();
            data.items.add(file);
            document.body.dispatchEvent(new DragEvent("drop", { bubbles: true, cancelable: true, dataTransfer: data }));
          };
          const original = File.prototype.arrayBuffer;
          const wait = new Promise((resolve) => { window.go = resolve; });
          let first = true;
          Blob.prototype.arrayBuffer = async function () {
            const data = await original.call(this);
            if (first) { first = false; await wait; document.body.dataset.late = "yes"; }
            return data;
          };
          drop(new File([slow], "slow.json"));
          drop(new File([fast], "fast.json"));
        }""",
        texts,
    )
    page.wait_for_selector("#comparison:not([hidden])")
    page.evaluate("window.go()")
    page.wait_for_selector("body[data-late]")
    page.evaluate("new Promise((resolve) => setTimeout(resolve))")
    assert "PyTorch 2.99" in page.inner_text("#vs-after")


def test_known_words(opened: Any, page: Any) -> None:
    """Scripts know the verdicts of tests and of cases."""
    opened()
    assert page.evaluate("[VERDICTS, CASE_VERDICTS]") == [list(ORDER), list(CASE_ORDER)]
    assert NOT_REACHED in CASE_ORDER


def test_large_reports(opened: Any, page: Any, tmp_path: Path) -> None:
    """Two reports of many thousand tests, all of which differ: lists are cut, and say so."""
    many = [
        TestResult(nodeid=f"suites/collectives/test_a.py::test_all[{number}]", verdict="passed", stack="collectives")
        for number in range(5000)
    ]
    before, after = (
        build([("a", written([*_few(tests), *tests, RunEnd(records()[-1].finished, 0)]))])
        for tests in (many, [msgspec.structs.replace(test, verdict="failed", headline="no") for test in many])
    )
    (tmp_path / "after.json").write_bytes(encode(after))
    opened(report=before)
    choose(page, tmp_path / "after.json")
    assert page.inner_text("#vs-sum") == "5,000 tests newly failing, 0 unchanged"
    assert len(page.query_selector_all("#vs-tests li")) == 100
    page.click("#vs-tests button >> text=Show 4,900 more")
    assert len(page.query_selector_all("#vs-tests li")) == 5000


def _few(tests: list[TestResult]) -> list[Any]:
    made = records(of=[])[:3]
    made[1].tests = [test.nodeid for test in tests]
    return made


def test_cases_that_reports_share() -> None:
    """The invented cases have both kinds, so that both are compared."""
    assert {type(case).__name__ for case in CASES} == {"Call", "Setting"}
