"""The page of known defects, in a browser: filters, their address, the keyboard, print, and no script at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from other_pages import findings_page

from tests.pages.conftest import tab_of
from tests.versions.known_defects import HOSTILE, NEW

EVERY = "9 defects, 5 of them there in 2.15.0"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The page of nine known defects."""
    return findings_page(tmp_path)


@pytest.fixture
def opened(page: Any, file: Path) -> Callable[..., Any]:
    """Opens the page with a fragment."""

    def open_(fragment: str = "") -> Any:
        page.goto("about:blank")
        page.goto(file.as_uri() + fragment, wait_until="load")
        return page

    return open_


def shown(page: Any) -> list[str]:
    """The ids of the defects that can be seen, without their owner."""
    nodes = page.query_selector_all(".finding")
    return [node.get_attribute("id").partition("/")[2] for node in nodes if node.is_visible()]


def soon(page: Any, read: Callable[[Any], Any], expected: Any) -> None:
    """Compare what is read from the page, once a link of the page has taken effect, a moment after the click."""
    for _ in range(100):
        if read(page) == expected:
            return
        page.wait_for_timeout(20)
    assert read(page) == expected


def found(page: Any) -> str:
    """How many defects the page says that it lists."""
    return str(page.inner_text("#found"))


def fragment(page: Any) -> str:
    """The fragment of the address, once nothing is to be written to it any more."""
    page.wait_for_timeout(300)
    return str(page.evaluate("location.hash"))


def cell(page: Any, area: str, kind: str) -> Any:
    """The cell of the table for an area and a kind."""
    return page.query_selector(f'td .go[data-area="{area}"][data-kind="{kind}"]')


def test_at_first(opened: Callable[..., Any]) -> None:
    """All defects are listed, the worst first, with their numbers above; the address says nothing."""
    page = opened()
    assert shown(page)[:3] == ["without_script", "dtensor_item", "dtensor_fixed"]
    assert (page.inner_text("#found"), len(shown(page)), fragment(page)) == (EVERY, 9, "")
    facts = page.inner_text(".facts")
    for part in ("Known defects\n9", "Silently wrong\n3", f"Still there in {NEW}\n5\nof 7 that ran", "Reported\n1"):
        assert part in facts
    assert page.inner_text('[data-row="DTensor"]').split() == ["DTensor", "2", "2", "1", "1"]


def test_versions_in_words(opened: Callable[..., Any]) -> None:
    """A mark says in text whether the version has the defect."""
    page = opened()
    names = ("dtensor_fixed", "strided", "of_no_kind")
    assert {name: page.text_content(f'[id="pytorch/{name}"] .versions') for name in names} == {
        "dtensor_fixed": "2.13 there2.15 not there",
        "strided": "2.13 there2.15 raises TypeError",
        "of_no_kind": "2.13 not run2.15 not run",
    }


def test_filters(opened: Callable[..., Any]) -> None:
    """Each filter narrows the list, counts follow, and Show all brings everything back."""
    page = opened()
    page.check("[name=kind][value=wrong]")
    assert shown(page) == ["without_script", "dtensor_item", "dtensor_fixed"]
    page.select_option("#area", "DTensor")
    assert page.inner_text("#found") == "2 defects of 9, 1 of them there in 2.15.0"
    assert page.inner_text("[data-count=hang]") == "0"
    page.select_option("#in", f"!{NEW}")
    assert shown(page) == ["dtensor_fixed"]
    page.select_option("#in", NEW)
    assert shown(page) == ["dtensor_item"]
    assert cell(page, "", "").inner_text() == "5"
    page.select_option("#report", "unreported")
    assert (shown(page), page.is_visible("#nothing")) == ([], True)
    page.click("#again")
    assert (page.inner_text("#found"), fragment(page)) == (EVERY, "")


def test_search(opened: Callable[..., Any]) -> None:
    """Words are sought in sentences, names, requirements and tests, and all must be there."""
    page = opened()
    for sought, expected in (
        ("SILENTLY item()", ["dtensor_item"]),
        ("TP-B-01", ["dtensor_item", "dtensor_fixed"]),
        ("pytorch/stuck", ["stuck"]),
        ("test_c.py", ["compiled_often"]),
        ("130515", ["dtensor_item"]),
        ("_dispatch.py", ["dtensor_item", "dtensor_fixed", "strided"]),
        ("item stuck", []),
    ):
        page.fill("#q", sought)
        assert shown(page) == expected, sought


def test_sent_address(opened: Callable[..., Any], page: Any) -> None:
    """What is chosen is in the address, and an address that is sent shows the same."""
    opened()
    page.check("[name=kind][value=wrong]")
    page.check("[name=kind][value=error]")
    page.select_option("#in", NEW)
    page.fill("#q", "the reason")
    chosen, listed = fragment(page), shown(page)
    assert listed == ["strided"]
    opened(chosen)
    assert (shown(page), page.input_value("#q"), page.input_value("#in")) == (listed, "the reason", NEW)
    assert [chip.get_attribute("value") for chip in page.query_selector_all("[name=kind]:checked")] == [
        "wrong",
        "error",
    ]


@pytest.mark.parametrize("strange", ["#kind=x&area=y&in=z&report=%ff", "#%ff", "#a/b", "#&&=", "#in=1&in=2"])
def test_strange_address(opened: Callable[..., Any], strange: str) -> None:
    """An address that says what there is not shows everything."""
    assert opened(strange).inner_text("#found") == EVERY


def test_cells(opened: Callable[..., Any]) -> None:
    """A cell of the table filters by its kind and area, keeps other filters, and goes back with the browser."""
    page = opened()
    page.select_option("#in", NEW)
    cell(page, "DTensor", "wrong").click()
    soon(page, shown, ["dtensor_item"])
    assert cell(page, "DTensor", "wrong").get_attribute("aria-current") == "true"
    assert (page.input_value("#area"), page.input_value("#in")) == ("DTensor", NEW)
    page.click('th .go[data-area="torch.compile"]')
    soon(page, shown, ["compiled_often"])
    page.go_back()
    soon(page, shown, ["dtensor_item"])


def test_back_to_all(opened: Callable[..., Any]) -> None:
    """From the defects of a cell, the browser goes back to all of them."""
    page = opened()
    cell(page, "DTensor", "wrong").click()
    soon(page, lambda page: len(shown(page)), 2)
    page.go_back()
    soon(page, found, EVERY)


def test_one_defect(opened: Callable[..., Any]) -> None:
    """What is opened is in the address; a link to a defect opens it, also where filters hid it."""
    page = opened()
    page.click('[id="pytorch/dtensor_item"] summary')
    assert fragment(page) == "#pytorch%2Fdtensor_item"
    opened("#pytorch%2Fstuck")
    assert page.get_attribute('[id="pytorch/stuck"] details', "open") is not None
    assert "TP-B-01" not in page.inner_text('[id="pytorch/stuck"]')
    assert page.inner_text('[id="pytorch/stuck"] .command').endswith("--nproc-per-node=2 docs/findings/stuck.py")
    opened("#pytorch/stuck&kind=wrong")
    assert len(shown(page)) == 9


def test_causes(opened: Callable[..., Any]) -> None:
    """A file of PyTorch opens to what is wrong in it, and a defect named there is opened by a click, also if hidden."""
    page = opened("#kind=hang")
    file = page.query_selector(".file")
    assert file.inner_text().split("\n") == ["torch/distributed/tensor/_dispatch.py", "3 defects, 2 causes"]
    file.query_selector("summary").click()
    assert HOSTILE in file.inner_text()
    file.query_selector("text=pytorch/dtensor_fixed").click()
    soon(page, lambda page: page.is_visible('[id="pytorch/dtensor_fixed"] .script'), True)
    cause = page.inner_text('[id="pytorch/dtensor_fixed"] .pairs')
    assert "torch/distributed/tensor/_dispatch.py::OpDispatcher.dispatch: It forgets item." in cause


def test_keyboard(opened: Callable[..., Any]) -> None:
    """A slash goes to the search, Escape empties it, and a defect is opened by Enter."""
    page = opened()
    page.keyboard.press("/")
    page.keyboard.type("item()")
    assert shown(page) == ["dtensor_item"]
    page.keyboard.press("Escape")
    assert (len(shown(page)), page.evaluate("document.activeElement.id")) == (9, "q")
    page.keyboard.type("item()")
    for _ in range(30):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.tagName") == "SUMMARY":
            break
    page.keyboard.press("Enter")
    assert page.is_visible('[id="pytorch/dtensor_item"] .script')
    page.focus('td .go[data-area="DTensor"][data-kind="wrong"]')
    page.keyboard.press("Enter")
    soon(page, lambda page: page.input_value("#area"), "DTensor")


def test_without_scripts(browser: Any, file: Path) -> None:
    """Without JavaScript everything is listed and can be opened, and nothing is there that would do nothing."""
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(file.as_uri())
    assert len(shown(page)) == 9
    assert [page.is_visible(each) for each in ("#filters", "#theme", "#reset", "#nothing")] == [False] * 4
    assert page.query_selector_all("a[href^='#']:not(.skip, .names a)") == []
    page.click('[id="pytorch/dtensor_item"] summary')
    assert page.is_visible('[id="pytorch/dtensor_item"] .script')
    context.close()


def test_hostile_text(opened: Callable[..., Any]) -> None:
    """What defects and scripts say is shown as it is written."""
    page = opened()
    page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    assert page.evaluate("window.hacked") is None
    assert page.query_selector("img") is None
    assert page.inner_text("h3") == HOSTILE
    assert HOSTILE in page.inner_text('[id="pytorch/stuck"] .script')


@pytest.mark.parametrize("width", [360, 800, 1280])
def test_widths(opened: Callable[..., Any], page: Any, width: int) -> None:
    """The page is as wide as the window, and so is an opened defect."""
    page.set_viewport_size({"width": width, "height": 800})
    opened("#pytorch/dtensor_item")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_print(opened: Callable[..., Any]) -> None:
    """Paper has the table and what the filters left, with their number, and neither filters nor buttons."""
    page = opened("#kind=hang")
    page.emulate_media(media="print")
    assert shown(page) == ["stuck"]
    assert [page.is_visible(each) for each in ("#filters", "#reset", ".heat", "#found")] == [False, False, True, True]


def test_colors(browser: Any, file: Path) -> None:
    """The button changes between light and dark."""
    with tab_of(browser) as page:
        page.goto(file.as_uri())
        color = "getComputedStyle(document.body).backgroundColor"
        before = page.evaluate(color)
        page.click("text=Dark colors")
        assert (before, page.evaluate(color)) == ("rgb(255, 255, 255)", "rgb(20, 23, 27)")
        assert page.inner_text("#theme") == "Light colors"
    assert page.troubles == []
