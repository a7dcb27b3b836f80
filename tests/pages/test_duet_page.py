"""The page of a duet, in a browser: what differs, series by size with intervals, rounds in time, and text as text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.bench.duet.state import State
from harness.bench.duet.view import view
from reports.duet import page as page_of
from tests.perf.duets import ABOUT, OFFERS, SIZES, Machine, begun, duet

HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>{{ 7 * 7 }}"
MINE = msgspec.structs.replace(ABOUT, label="/other", variables=(("GLOO_X", "1"),))


@pytest.fixture
def measured(tmp_path: Path) -> Callable[..., State]:
    """Measures a made-up duet whose series of 512 B is slower in B."""

    def measure(**fields: object) -> State:
        found = duet(tmp_path, Machine(2, ranks=0.03), {SIZES[1]: 1.5}, **fields)
        found.run(400)
        return found.state

    return measure


@pytest.fixture
def opened(page: Any, tmp_path: Path) -> Callable[..., Any]:
    """Opens the page of a duet."""

    def open_(state: State, **given: str) -> Any:
        file = tmp_path / "duet.html"
        file.write_text(page_of(view(state, **given)))
        page.goto(file.as_uri(), wait_until="load")
        return page

    return open_


def test_what_it_says(opened: Any, measured: Any) -> None:
    """The result first, then what differs, a table of all series, and why it ended."""
    tab = opened(measured(b=MINE), ended="The 6 minutes are used up")
    assert "B is slower in 1 of 6 series: all_reduce sum float32 512 B on 2 ranks" in tab.inner_text("#headline")
    cells = [row.inner_text().split("\t") for row in tab.query_selector_all("#sides tbody tr")]
    assert cells == [["environment", "/env", "/other"], ["GLOO_X", "", "1"]]
    assert len(tab.query_selector_all("#figures tbody tr")) == len(OFFERS)
    assert tab.inner_text("#figures td.slower") == "slower"
    assert "The 6 minutes are used up." in tab.inner_text("body")


def test_intervals_and_rounds(opened: Any, measured: Any) -> None:
    """Every series has its interval, in the order of sizes; rounds of both sides are drawn, one series at a time."""
    tab = opened(measured())
    tab.wait_for_selector("#plot-rounds .plot-container")
    data = tab.evaluate("document.getElementById('plot-series').data.map(t => [t.name, t.y, t.x, t.error_x.array])")
    assert sorted(name for _, names, _, _ in data for name in names) == sorted(
        f"all_reduce sum float32 {size} 2 ranks" for size in ("8 B", "512 B", "8 KiB", "128 KiB", "1 MiB", "2 MiB")
    )
    (slower,) = [row for row in data if row[0] == "slower"]
    assert 40 < slower[2][0] < 60
    assert slower[3][0] > 0
    order = tab.evaluate("document.getElementById('plot-series').layout.yaxis.categoryarray")
    assert [label.split(" 2 ranks")[0].split("float32 ")[1] for label in order][:2] == ["8 B", "512 B"]
    visible = "document.getElementById('plot-rounds').data.filter(t => t.visible !== false).map(t => t.name)"
    assert tab.evaluate(visible) == ["A, us", "B, us"]
    tab.click("#plot-rounds .updatemenu-header")
    tab.wait_for_selector("#plot-rounds .updatemenu-dropdown-button")
    assert len(tab.query_selector_all("#plot-rounds .updatemenu-dropdown-button")) == len(OFFERS)


def test_an_a_a_duet_before_its_first_look(opened: Any) -> None:
    """A page with nothing measured opens, and says that nothing differs."""
    state = State(begun(), [{"fastest": [], "median": []} for _ in OFFERS], figures=[[] for _ in OFFERS])
    tab = opened(state)
    assert "this is an A/A duet" in tab.inner_text("#sides")
    assert "undecided in 6" in tab.inner_text("#headline")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone(opened: Any, measured: Any, page: Any, scheme: str) -> None:
    """Nothing is wider than the screen."""
    page.set_viewport_size({"width": 390, "height": 800})
    page.emulate_media(color_scheme=scheme)
    tab = opened(measured(b=msgspec.structs.replace(MINE, label="/a/very/long/path" * 12)))
    tab.wait_for_selector("#plot-series .plot-container")
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390


def test_hostile_text(opened: Any, measured: Any) -> None:
    """Names of series, labels, variables and reasons are text, wherever they are shown."""
    hostile = msgspec.structs.replace(ABOUT, label=HOSTILE, variables=((HOSTILE, HOSTILE),), source=HOSTILE)
    state = measured(b=hostile)
    series = tuple(msgspec.structs.replace(one, operation=HOSTILE, variant=(("a", HOSTILE),)) for one in OFFERS)
    state.begun = msgspec.structs.replace(state.begun, series=series)
    tab = opened(state, ended=HOSTILE)
    tab.wait_for_selector("#plot-rounds .plot-container")
    assert tab.evaluate("window.hacked") is None
    assert HOSTILE in tab.inner_text("#sides tbody")
    assert HOSTILE in tab.inner_text("#headline")


def test_counts_that_differ(opened: Any, tmp_path: Path) -> None:
    """They have a table, what B needs more of first, and the headline is bad; without any, there is none."""
    found = duet(tmp_path, Machine(), series=OFFERS[:2])
    found.sides["A"].needs = {SIZES[0]: {"copies": 3.0}, SIZES[1]: {"copies": 1.0}}  # type: ignore[attr-defined]
    found.sides["B"].needs = {SIZES[0]: {"copies": 1.0}, SIZES[1]: {"copies": 2.0}}  # type: ignore[attr-defined]
    found.count()
    tab = opened(found.state)
    assert "B needs more in 1 series: copies 1 -> 2 (+100.0 %)" in tab.inner_text("#headline")
    assert "bad" in tab.get_attribute("#headline", "class")
    rows = [row.inner_text().split("\t") for row in tab.query_selector_all("#counts tbody tr")]
    assert rows == [
        [OFFERS[1].name, "copies 1 -> 2 (+100.0 %)"],
        [OFFERS[0].name, "copies 3 -> 1 (-66.7 %)"],
    ]
    assert opened(duet(tmp_path, Machine(), series=OFFERS[:1]).state).query_selector("#counts") is None
