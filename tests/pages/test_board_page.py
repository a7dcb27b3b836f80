"""The board, in a browser: it opens offline, its links lead to its pages, and what bundles say stays text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from other_pages import board_of


@pytest.fixture
def board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A board of five bundles of two backends, one of them hostile, and two refused files."""
    return board_of(tmp_path, monkeypatch)


def test_there_and_back(page: Any, board: Path) -> None:
    """From the table to a bundle, to the one before it, to its whole report; each page opens and runs nothing."""
    page.goto((board / "index.html").as_uri())
    assert page.inner_text("h1") == "Conformance of backends"
    assert page.evaluate("window.hacked") is None
    page.click("text=1 newly failing")
    assert "1 test newly failing" in page.inner_text("main")
    assert page.inner_text("h1") == "made-up, PyTorch 2.13.0"
    page.click("text=bundle of 2027-01-15")
    assert "It is the first of this backend." in page.inner_text("main")
    page.click("text=The whole report")
    assert page.inner_text("h1") == "Conformant at L5 (dynamo)"


def test_hostile_text(page: Any, board: Path) -> None:
    """Whatever a bundle calls itself is shown as it is written."""
    for name in ("index.html", f"bundles/{'f' * 32}.html"):
        page.goto((board / name).as_uri())
        assert page.evaluate("window.hacked") is None
        assert page.query_selector("img") is None
        assert "<script>window.hacked = 1</script>" in page.inner_text("body")


def test_states_in_words(page: Any, board: Path) -> None:
    """The first row of the backend has each state, with a title for those who see no color."""
    page.goto((board / "index.html").as_uri())
    titles = [mark.get_attribute("title") for mark in page.query_selector_all("#newest ~ .scroll .states .mark")]
    for state in ("L1 collectives: conformant", "L3 replicate_fsdp: not conformant", "L1 collectives: not checked"):
        assert state in titles


@pytest.mark.parametrize("width", [360, 800, 1280])
def test_widths(page: Any, board: Path, width: int) -> None:
    """Wide tables scroll within themselves, and never the page."""
    page.set_viewport_size({"width": width, "height": 800})
    for name in ("index.html", f"bundles/{'f' * 32}.html"):
        page.goto((board / name).as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        rows = [row.bounding_box()["height"] for row in page.query_selector_all(".history tbody tr")]
        assert max(rows, default=0) < 200


def test_dark(page: Any, board: Path) -> None:
    """The colors follow the reader's."""
    page.emulate_media(color_scheme="dark")
    page.goto((board / "index.html").as_uri())
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)"
