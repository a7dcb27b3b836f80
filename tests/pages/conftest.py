"""A real browser for pages: they must open offline, without an error, and do what they say when clicked.

``page`` is a tab of a Chromium of the machine.  Its test fails if the page asks for anything but a file, or if its
scripts fail.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

sys.path.insert(0, str(Path(__file__).parents[1] / "reports"))  # the runs that are invented there
sys.path.insert(0, str(Path(__file__).parent))  # import-mode=importlib leaves the tests' own modules out of it

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--no-sandbox",  # containers have no user namespaces
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
LOCAL = ("file:", "data:", "blob:", "about:")


@pytest.fixture(autouse=True)
def minimums_of_the_invented_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    """The invented suite has minimums of its own, as it has tests of its own."""
    from invented import MINIMUMS

    monkeypatch.setattr("reports.minimums.shipped", lambda: MINIMUMS)


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """Chromium without a window; one for all tests of pages."""
    executable = next(filter(None, map(shutil.which, NAMES)), None)
    if executable is None:
        pytest.skip(f"no Chromium on the PATH (looked for {', '.join(NAMES)})")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=executable, headless=True, args=list(FLAGS))
        yield chromium
        chromium.close()


@contextmanager
def tab_of(browser: Browser) -> Iterator[Page]:
    """A tab, 1280 by 800, light; ``tab.troubles`` is what went wrong in it, a line each; complete once it is closed."""
    context = browser.new_context(viewport={"width": 1280, "height": 800}, color_scheme="light")
    context.set_default_timeout(60_000)  # a busy machine
    tab = context.new_page()
    troubles: list[str] = []
    tab.troubles = troubles

    def gate(route: Route) -> None:
        if route.request.url.startswith(LOCAL):
            route.continue_()
        else:
            troubles.append(f"asked for {route.request.url[:200]}")
            route.abort()

    context.route("**/*", gate)
    tab.on("console", lambda message: troubles.append(message.text) if message.type == "error" else None)
    tab.on("pageerror", lambda error: troubles.append(f"uncaught: {error}"))
    yield tab
    context.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A new tab in which nothing goes wrong."""
    with tab_of(browser) as tab:
        yield tab
    assert tab.troubles == []
