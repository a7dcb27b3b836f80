"""The browser of the tests notices what it is there to notice."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.pages.conftest import tab_of


def opened(page: Any, folder: Path, html: str) -> Any:
    file = folder / "page.html"
    file.write_text(f"<!doctype html><meta charset=utf-8>{html}")
    page.goto(file.as_uri(), wait_until="load")
    return page


def test_page_is_driven(page: Any, tmp_path: Path) -> None:
    """A page's own script runs, and what it does is seen."""
    opened(page, tmp_path, "<button onclick='this.textContent = 6 * 7'>?</button>").click("button")
    assert page.inner_text("button") == "42"


@pytest.mark.parametrize(
    ("html", "says"),
    [
        ("<img src='https://example.com/x.png'>", "asked for https://example.com/x.png"),
        ("<link rel=stylesheet href='http://127.0.0.1:9/x.css'>", "asked for http://127.0.0.1:9/x.css"),
        ("<script>fetch('https://example.com/data').catch(() => {})</script>", "asked for https://example.com/data"),
        ("<script>console.error('it broke')</script>", "it broke"),
        ("<script>nothing()</script>", "uncaught: nothing is not defined"),
        ("<img src='missing.png'>", "Failed to load resource: net::ERR_FILE_NOT_FOUND"),
    ],
    ids=["image", "stylesheet", "fetch", "console", "exception", "missing-file"],
)
def test_trouble_is_noticed(browser: Any, tmp_path: Path, html: str, says: str) -> None:
    """What a page fetches from elsewhere, and what fails in it, is a line."""
    with tab_of(browser) as tab:
        opened(tab, tmp_path, html)
        soon = time.monotonic() + 30
        while says not in tab.troubles and time.monotonic() < soon:
            tab.wait_for_timeout(20)  # what a page asks for is told by another process, some time after it was loaded
    assert says in tab.troubles
