"""Accessibility of all pages: axe-core's rules for WCAG 2.2 AA, in both color schemes, on desk and phone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from answers import ANSWERS, failed
from invented import change, evidence, runs
from other_pages import another_report, audit_page, board_of, compared_page, duet_page, findings_page, perf_page

from harness.results import Tried
from reports.build import build
from reports.model import encode
from reports.page import page as page_of

RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
VERDICTS = ("failed", "crashed", "hung", "not-run")
DESK, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}


@pytest.fixture
def violations(page: Any, tmp_path: Path) -> Callable[..., list[str]]:
    """Returns what axe-core finds wrong with the page of some runs, everything opened."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")

    def found(
        html: str,
        scheme: str,
        size: dict[str, int],
        fragment: str = "",
        before: Callable[[], None] = lambda: None,
    ) -> list[str]:
        page.set_viewport_size(size)
        page.emulate_media(color_scheme=scheme)
        (tmp_path / "report.html").write_text(html)
        page.goto((tmp_path / "report.html").as_uri() + fragment, wait_until="load")
        before()
        page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
        options = {"runOnly": {"type": "tag", "values": RULES}, "resultTypes": ["violations"]}
        response = axe.Axe().run(page, options=options).response
        return [
            f"{wrong['id']}: {node['target'][0]}: {node['html'][:120]}: {node['failureSummary']}"
            for wrong in response["violations"]
            for node in wrong["nodes"]
        ]

    return found


@pytest.mark.parametrize(("size", "scheme"), [(DESK, "light"), (PHONE, "dark")], ids=["desk", "phone"])
@pytest.mark.parametrize("name", ANSWERS)
def test_report(violations: Callable[..., list[str]], name: str, size: dict[str, int], scheme: str) -> None:
    """Whatever the answer, axe-core finds nothing wrong with the page, with all evidence open."""
    assert violations(page_of(build(ANSWERS[name][0]())), scheme, size) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_verdict(violations: Callable[..., list[str]], scheme: str) -> None:
    """Nor with every verdict, with evidence of ranks, and with problems of the runs."""
    stacks = ("collectives", "replicate", "replicate_fsdp", "tp_extension")
    changes = [failed(stack, verdict, evidence()) for stack, verdict in zip(stacks, VERDICTS, strict=True)]
    (name, data), second = runs(*changes)
    html = page_of(build([(name, data.rpartition(b'{"record":"end"')[0]), second]))
    assert violations(html, scheme, DESK) == []


@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("cell", ["collective=all_reduce&dtype=float32", "stack=replicate&size=2", "collective=none"])
def test_cases(violations: Callable[..., list[str]], cell: str, scheme: str, size: dict[str, int]) -> None:
    """Nor with the cases of a cell: several states, a waiver with its owner, or no case at all."""

    def several(made: list[Any]) -> None:
        endings = ("passed", "wrong", "stopped", "not-reached")
        for verdict, name in (("hung", "one[2ranks]"), ("failed", "two[3ranks-float32]")):
            tried = [Tried(int(name[4]), ended, [number], [1]) for number, ended in enumerate(endings)]
            change(f"collectives/test_a.py::test_{name}", verdict=verdict, tried=tried)(made)

    assert violations(page_of(build(runs(several))), scheme, size, f"#{cell}") == []


def test_finds_something(violations: Callable[..., list[str]]) -> None:
    """The rules are applied: gray text on gray, and a picture without a name, are found."""
    text = (
        "<p style='color:#999;background:#888'>gray on gray</p><img src='data:image/gif;base64,R0lGODlhAQABAAAAACw='>"
    )
    html = f"<html lang=en><title>x</title><main><h1>x</h1>{text}</main>"
    found = violations(html, "light", DESK)
    assert {line.partition(":")[0] for line in found} == {"color-contrast", "image-alt"}


PAGES = {
    "figures": perf_page,
    "duet": duet_page,
    "audit": audit_page,
    "comparison": compared_page,
    "findings": findings_page,
}
CELL = "#vs-cell=collective%3Dall_reduce%26dtype%3Dint32"


@pytest.mark.parametrize(("size", "scheme"), [(DESK, "light"), (DESK, "dark"), (PHONE, "light"), (PHONE, "dark")])
@pytest.mark.parametrize("name", PAGES)
def test_other_pages(
    violations: Callable[..., list[str]], tmp_path: Path, name: str, size: dict[str, int], scheme: str
) -> None:
    """Nor with the page of figures, of a duet, of an audit, of a comparison with a cell open, and of known defects."""
    fragment = CELL if name == "comparison" else ""
    assert violations(PAGES[name](tmp_path).read_text(), scheme, size, fragment) == []


@pytest.mark.parametrize(("size", "scheme"), [(DESK, "light"), (DESK, "dark"), (PHONE, "light"), (PHONE, "dark")])
def test_board(
    violations: Callable[..., list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    size: dict[str, int],
    scheme: str,
) -> None:
    """Nor with a board: its table, and each page of a bundle."""
    site = board_of(tmp_path, monkeypatch)
    for file in [site / "index.html", *sorted((site / "bundles").glob("*.html"))]:
        assert violations(file.read_text(), scheme, size) == [], file.name


@pytest.mark.parametrize(("size", "scheme"), [(DESK, "light"), (PHONE, "dark")], ids=["desk", "phone"])
def test_compared_report(
    violations: Callable[..., list[str]], page: Any, tmp_path: Path, size: dict[str, int], scheme: str
) -> None:
    """Nor with a page that is compared with a file, or that refused one."""
    (tmp_path / "other.json").write_bytes(encode(another_report()))
    (tmp_path / "bad.json").write_text("no report")

    def choose(name: str) -> None:
        page.set_input_files("#other", str(tmp_path / name))
        page.wait_for_selector("#comparison:not([hidden]), #compare-error:not(:empty)")

    html = page_of(build(runs()))
    assert violations(html, scheme, size, CELL, before=lambda: choose("bad.json")) == []
    assert violations(html, scheme, size, before=lambda: choose("other.json")) == []
