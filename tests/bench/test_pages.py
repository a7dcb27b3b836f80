"""The size of a whole run's page with all cases, and how long a browser takes to show it and to compare it.

The run is one of all tests of the suites, with as many cases as a run of them has, and never ran.  Run with
``pytest tests/bench/test_pages.py --benchmark-enable``; nothing here fails for being slow.
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.commands.collecting import collected
from harness.profiles.vocabulary import COLLECTIVES, DTYPES, OPS, REDUCING
from harness.requirements import stack_of
from harness.results import GROUPS, Call, CaseOf, Cases, GivenWorld, RankEvidence, RunEnd, Setting, TestResult, Tried
from harness.suite_facts import SuiteFacts
from reports.build import build
from reports.model import Report
from reports.page import page as page_of
from tests.pages.conftest import browser, tab_of  # noqa: F401 - a fixture

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

CASES, SETTINGS, REFERENCES, WAIVED = 3701, 104, 7505, 308
"""Of a whole run: different cases, those of them that are options of stacks, how often tests refer to one, and how many
tests are waived (`concord report` of a run of all suites, 2026-11-25)."""
RANKS = 3
ERROR = "AssertionError: 1.0 is not 2.0"
ROUNDS = 7
PAINTED = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? 0"
DONE = "performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd"


def every_case(draw: random.Random) -> list[CaseOf]:
    """As many different cases as a whole run has: an eighth of them options of stacks."""
    layouts, forms = ("contiguous", "offset", "column", "transposed"), ("sync", "async", "functional", "coalesced")
    calls: list[CaseOf] = [
        Call(name, op, dtype, layout, "", group, form)
        for name in COLLECTIVES
        for op in (OPS if name in REDUCING else ("",))
        for dtype, layout, group, form in itertools.product(DTYPES, layouts, GROUPS, forms)
    ]
    stacks = ("replicate", "replicate_fsdp", "tp_extension", "dynamo")
    settings: list[CaseOf] = [
        Setting(stack, f"an_option_{option}", f"value {value}")
        for stack in stacks
        for option in range(13)
        for value in range(2)
    ]
    return [*draw.sample(calls, CASES - SETTINGS), *settings[:SETTINGS]]


def whole_run(facts: SuiteFacts, seed: int) -> Report:
    """The report of a run of every test of the suites here, of which a hundred failed."""
    from invented import WAIVER, records, written

    draw = random.Random(seed)
    results = [
        TestResult(
            nodeid=nodeid,
            verdict="passed",
            stack=stack_of(nodeid),
            requirements=fact.requirements,
            size=fact.size,
            dtype=fact.dtype,
            world=GivenWorld(fact.size, "gloo", "cpu") if fact.size else None,
            property_based=fact.property_based,
            seconds=draw.random(),
        )
        for nodeid, fact in facts.tests.items()
    ]
    every = every_case(random.Random(0))
    tried: dict[int, set[int]] = {}
    for number in [*range(CASES), *(draw.randrange(CASES) for _ in range(REFERENCES - CASES))]:
        tried.setdefault(draw.randrange(len(results)), set()).add(number)
    for at, numbers in tried.items():
        results[at].tried = [Tried(results[at].size or 2, "passed", sorted(numbers), [1] * len(numbers))]
    for test in draw.sample(results, 100):
        test.verdict, test.headline = "failed", f"rank 1 of 2 failed first: {ERROR}"
    for number, test in enumerate(draw.sample([test for test in results if test.verdict == "passed"], WAIVED)):
        test.verdict, test.bare, test.waiver = "waived", "failed", WAIVER
        test.reason, test.headline = "known to be wrong", f"rank 0 of {RANKS} failed first: {ERROR}"
        test.text = f"E   {ERROR}\n" * 40
        if number % 2:
            test.ranks = [
                RankEvidence(rank=rank, kind="raised", what=ERROR, first=rank == 0, text=test.text, output=test.text)
                for rank in range(RANKS)
            ]
    made = [each for each in records(of=[]) if not isinstance(each, RunEnd)]
    made[1].tests = [test.nodeid for test in results]
    end = records(of=[])[-1]
    return build([("a", written([*made, *facts.requirements.values(), Cases(every), *results, end]))])


def test_whole_run(
    asked_for: None,
    browser: Any,  # noqa: F811 - the fixture
    tmp_path: Path,
    figures: Callable[[str, str], None],
) -> None:
    """A page has less than 2 MB; its first paint, its scripts, a cell and a comparison take this long."""
    facts, names = collected(Path(__file__).parents[2]), ("one.html", "two.html")
    for seed, name in enumerate(names):
        (tmp_path / name).write_text(page_of(whole_run(facts, seed)))
    size = (tmp_path / "one.html").stat().st_size
    figures("size of the page", f"{size / 1e6:.2f} MB")
    assert size < 2_000_000
    found: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        with tab_of(browser) as tab:
            tab.goto((tmp_path / "one.html").as_uri(), wait_until="load")
            tab.wait_for_timeout(300)
            found.setdefault("first paint", []).append(tab.evaluate(PAINTED))
            found.setdefault("scripts done", []).append(tab.evaluate(DONE))
            began = tab.evaluate("performance.now()")
            tab.click(".cell[href='#collective=all_reduce&dtype=float32']")
            tab.wait_for_selector("#cases:not([hidden])")
            found.setdefault("a cell opened", []).append(tab.evaluate("performance.now()") - began)
            began = tab.evaluate("performance.now()")
            tab.set_input_files("#other", str(tmp_path / "two.html"))
            tab.wait_for_selector("#comparison:not([hidden])")
            found.setdefault("compared with another", []).append(tab.evaluate("performance.now()") - began)
    for what, times in found.items():
        figures(what, f"{statistics.median(times):.0f} ms (at most {max(times):.0f})")
