"""Pages other than a report's, as tests need them: figures, a duet, an audit, a board, a comparison, known defects."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import numpy as np
import pytest
from board_of import FAILED, entry, with_
from invented import change, records, runs, written

from harness.audit.records import Defect, Result, Summary
from harness.audit.table import COLUMNS, rows
from harness.bench.detection.gate import decide
from harness.bench.duet.view import view as view_of_duet
from harness.bench.history.lines import Line
from harness.bench.records import Series
from harness.bench.view import view
from harness.results import Tried
from harness.versions.catalog import catalog
from harness.versions.catalog import view as view_of_findings
from reports import audit, bundle, duet, findings, perf
from reports.board import Entry, refused, site
from reports.build import build
from reports.model import Report
from reports.page import comparison_page
from reports.page import page as page_of
from tests.perf.duets import ABOUT, SIZES, Machine
from tests.perf.duets import duet as begun_duet
from tests.perf.nights import line
from tests.versions.known_defects import checkout

HOSTILE = "</style></title><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>\u202e"
NIGHTS = 30
SWEEP = [
    Series(operation="all_reduce", op="sum", dtype=dtype, bytes=8 << (3 * i), world=2, backend="gloo", device="cpu")
    for dtype in ("float32", "bfloat16")
    for i in range(6)
]
STEP = [
    Series(operation="step.replicate", metric=metric, world=2, backend="gloo", device="cpu")
    for metric in ("time", "compute", "communication", "exposed")
]


def nights(slower: float = 1.0, more: tuple[Series, ...] = ()) -> Line:
    """Quiet nights; in the last four bfloat16 from 512 B on takes longer."""
    every = [*SWEEP, *STEP, *more]
    noise = np.random.default_rng(1).normal(0, 0.01, (NIGHTS, len(every)))
    logs = np.log(np.array([1e-6 * (i + 1) for i in range(len(every))])) + noise
    slow = [i for i, s in enumerate(every) if s.dtype == "bfloat16" and s.bytes >= 512]
    logs[-4:, slow] += np.log(slower)
    return line(logs, every)


def perf_page(folder: Path) -> Path:
    """The page of figures, with an alarm."""
    of = nights(slower=1.5)
    return _written(folder / "perf.html", perf.page(view(of, decide(of))))


def duet_page(folder: Path) -> Path:
    """The page of a duet of which a series is slower, and whose sides differ."""
    other = msgspec.structs.replace(ABOUT, label="/other", variables=(("GLOO_X", "1"),))
    found = begun_duet(folder, Machine(2, ranks=0.03), {SIZES[1]: 1.5}, b=other)
    found.run(400)
    return _written(folder / "duet.html", duet.page(view_of_duet(found.state, ended="The 6 minutes are used up")))


def audit_page(folder: Path) -> Path:
    """The page of an audit with every state of a defect."""
    states = ("killed", "survived", "not reached", "timed out", "not injected")
    results = [
        Result(
            defect=Defect(name=state, sort="fault", component="replicate", says=f"says {state}", about="SW a/b#1"),
            state=state,
            seconds=1.0,
            test="suites/replicate/test_a.py::test",
            verdict="failed",
            headline="rank 0 of 2 failed first",
            requirements=["REPL-SYNC-02"],
            equivalent="so they said" if state == "not reached" else "",
        )
        for state in states
    ]
    environment = {"torch": "2.13.0", "python": "3.11", "cores": "2"}
    found = Summary(
        started=1.7e9,
        seconds=9.0,
        arguments=["audit"],
        environment=environment,
        digest="0",
        red=["suites/replicate/test_b.py::test"],
        healthy={},
        results=results,
    )
    return _written(folder / "audit.html", audit.page(msgspec.to_builtins(found), rows(found), COLUMNS))


def another_report() -> Report:
    """A later report, in which a test with its cases newly fails, one is lost, and one is no longer waived."""
    tried = [Tried(2, "passed", [0, 2], [3, 2]), Tried(2, "wrong", [1], [1]), Tried(2, "undeclared", [3], [1])]
    changes = (
        change("collectives/test_a.py::test_one[2", verdict="failed", headline="rank 1 of 2 failed", tried=tried),
        change("replicate/test_a.py::test_two[2", verdict="passed", waiver="", bare="", tried=[]),
        change("dynamo/test_a.py::test_one[3", verdict="unsupported", reason="unsupported: no wind"),
        with_(torch="2.14.1"),
    )
    made = records(later=5000.0)
    for each in changes:
        each(made)
    return build([("c", written(made))])


def compared_page(folder: Path) -> Path:
    """The page that compares two reports."""
    return _written(folder / "compare.html", comparison_page(build(runs()), another_report()))


def findings_page(folder: Path) -> Path:
    """The page of known defects of every kind, one of which is hostile."""
    return _written(folder / "findings.html", findings.page(view_of_findings(catalog(checkout(folder / "checkout")))))


def board_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A board of five bundles of two backends, one of them hostile, and two refused files; returns its folder."""
    monkeypatch.setattr(bundle, "page", lambda report: "no page")
    made = [
        entry(folder / "one.zip"),
        entry(folder / "two.zip", FAILED, days=1),
        entry(folder / "three.zip", with_(torch="2.14.1"), days=2, signer="vendor@example.com"),
        entry(folder / "four.zip", with_(torch="2.15.0"), days=3, suite=False),
    ]
    entries = [each for each in made if isinstance(each, Entry)]
    assert len(entries) == 4
    report = msgspec.structs.replace(entries[0].report, profile=HOSTILE, about=HOSTILE, backend=HOSTILE, device=HOSTILE)
    other = dataclasses.replace(entries[0], name=HOSTILE, sha256="f" * 64, report=report, notes=(HOSTILE,))
    out = folder / "site"
    pages = dict(site([*entries, other], [refused(HOSTILE, (HOSTILE,)), refused("garbage.zip", ("not a zip file",))]))
    pages |= {each.whole: page_of(each.report) for each in (*entries, other)}
    for name, text in pages.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(text)
    return out


def _written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path
