"""The page of figures, in a browser: it says what is wrong first, draws all that there is, and keeps text as text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from other_pages import NIGHTS, SWEEP, nights

from harness.bench.detection.alarms import Decision
from harness.bench.detection.gate import decide
from harness.bench.history.lines import Line
from harness.bench.records import Series
from harness.bench.view import view
from reports.perf import page as page_of

PLACE = {"backend": "gloo", "device": "cpu"}
SCALED = (
    *(
        Series(operation="all_reduce", op="sum", dtype="float32", bytes=size, world=ranks, **PLACE)
        for size in (1 << 16, 1 << 20)
        for ranks in (2, 4, 8)
    ),
    *(Series(operation="broadcast", dtype="int8", bytes=1 << 20, world=ranks, **PLACE) for ranks in (2, 8)),
    *(Series(operation="memory.copy", bytes=1 << 20, world=ranks, **PLACE) for ranks in (2, 4, 8)),
    Series(operation="link", metric="link", world=2, **PLACE),
    *(
        Series(operation="step.replicate_fsdp", metric=metric, world=ranks, **PLACE)
        for metric in ("time", "compute")
        for ranks in (1, 2, 4)
    ),
)
HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>{{ 7 * 7 }}"


@pytest.fixture
def opened(page: Any, tmp_path: Path) -> Callable[..., Any]:
    """Opens the page of some nights."""

    def open_(of: Line, decision: Decision | None = None) -> Any:
        file = tmp_path / "perf.html"
        file.write_text(page_of(view(of, decision or decide(of))))
        page.goto(file.as_uri(), wait_until="load")
        page.wait_for_selector("#plot-history .plot-container")
        return page

    return open_


def drawn(page: Any, plot: str) -> list[str]:
    """Names of the traces that a plot shows."""
    found: list[str] = page.evaluate(
        "key => document.getElementById(key).data.filter(t => t.visible !== false).map(t => t.name)", f"plot-{plot}"
    )
    return found


def test_nothing_wrong(opened: Any) -> None:
    """It says so above everything else, and draws bandwidth, latency, dtypes, steps and history."""
    page = opened(nights())
    assert page.inner_text(".verdict") == "No alarm"
    titles = [title.inner_text() for title in page.query_selector_all("h2")]
    assert titles == ["Bandwidth over size", "Latency over size", "Dtypes", "Training steps", "History", "All figures"]
    assert page.query_selector("#plot-sizes").bounding_box()["height"] > 300
    assert drawn(page, "sizes") == ["float32, 2 ranks", "bfloat16, 2 ranks"]
    assert drawn(page, "steps") == ["compute", "exposed communication", "its communication alone"]


def test_an_alarm(opened: Any) -> None:
    """The alarm is the first thing to read; its history comes first, with the step marked and its confidence said."""
    page = opened(nights(slower=1.5))
    assert page.inner_text(".verdict") == "1 alarm"
    said = page.inner_text("ul.said li.bad")
    assert "bfloat16" in said
    assert "confidence" in said
    history, step = drawn(page, "history")
    assert history == f"us, {NIGHTS} nights"
    assert "bfloat16" in step


def test_another_history(opened: Any) -> None:
    """The menu shows another series."""
    page = opened(nights())
    page.click("#plot-history .updatemenu-header")
    page.wait_for_selector("#plot-history .updatemenu-dropdown-button")
    buttons = page.query_selector_all("#plot-history .updatemenu-dropdown-button")
    before = page.evaluate("document.getElementById('plot-history').data.findIndex(t => t.visible !== false)")
    buttons[1].click()
    page.wait_for_function(
        "before => document.getElementById('plot-history').data.findIndex(t => t.visible !== false) !== before",
        arg=before,
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone(opened: Any, page: Any, scheme: str) -> None:
    """Nothing is wider than the screen, and text can be told from what is behind it."""
    page.set_viewport_size({"width": 390, "height": 800})
    page.emulate_media(color_scheme=scheme)
    tab = opened(nights(slower=1.5))
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390
    ink = tab.evaluate("document.getElementById('plot-sizes').layout.font.color")
    assert ink == ("#e7eaf0" if scheme == "dark" else "#1c2330")


def test_figures_can_be_read(opened: Any) -> None:
    """All of them, in a table."""
    page = opened(nights())
    page.click("#figures summary")
    assert len(page.query_selector_all("#figures tbody tr")) == len(SWEEP)


def test_hostile_text(opened: Any) -> None:
    """Names of operations, commits and alarms are text, wherever they are shown."""
    more = tuple(
        msgspec.structs.replace(SWEEP[0], operation=HOSTILE, dtype=HOSTILE, bytes=8 << i, variant=(("a", HOSTILE),))
        for i in range(3)
    )
    of = nights(more=more)
    of = msgspec.structs.replace(of, nights=[msgspec.structs.replace(n, commit=HOSTILE) for n in of.nights])
    page = opened(of, Decision(night=of.nights[-1].id, alarms=[], notes=[HOSTILE]))
    assert page.evaluate("window.hacked") is None
    assert page.inner_text("ul.said li") == HOSTILE


def test_scaling(opened: Any) -> None:
    """Each size has its curve, dashed what memory allows and dotted the link; steps have that of their compute."""
    page = opened(nights(more=SCALED))
    assert page.query_selector("#plot-scaling").bounding_box()["height"] > 300
    dashes = "key => document.getElementById(key).data.filter(t => t.visible !== false).map(t => t.line.dash)"
    sizes = ("64 KiB, float32", "1 MiB, float32")
    assert drawn(page, "scaling") == [name + of for name in sizes for of in ("", ": memory", ": link")]
    assert page.evaluate(dashes, "plot-scaling") == ["solid", "dash", "dot"] * 2
    ticks = page.evaluate("document.getElementById('plot-scaling').layout.xaxis.ticktext")
    assert ticks == ["2", "4", "8"]
    assert drawn(page, "efficiency") == ["", ": compute alone"]
    first = page.evaluate("document.getElementById('plot-efficiency').data[0].y[0]")
    assert first == 100


def test_scaling_of_another_collective(opened: Any) -> None:
    """The menu shows its curve, and only its own."""
    page = opened(nights(more=SCALED))
    page.click("#plot-scaling .updatemenu-header")
    page.wait_for_selector("#plot-scaling .updatemenu-dropdown-button")
    page.query_selector_all("#plot-scaling .updatemenu-dropdown-button")[1].click()
    page.wait_for_function("document.getElementById('plot-scaling').data[0].visible === false")
    assert drawn(page, "scaling") == ["1 MiB, int8", "1 MiB, int8: memory", "1 MiB, int8: link"]
