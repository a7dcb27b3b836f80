"""The cases of a report: merged over tests and runs, the worst first, and in tables that lead to them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from invented import CASES, change, runs

from harness.results import Call, NotClaimed, Setting, Tried
from reports import embedded, matrix
from reports.build import build
from reports.model import CaseReport, Report, decode, encode

ONE = "collectives/test_a.py::test_one[2ranks]"
TWO = "collectives/test_a.py::test_two[2ranks-float32]"
SUM = CASES[0]


def found(report: Report, case: Any, size: int = 2) -> CaseReport:
    """A case of a report."""
    (each,) = (each for each in report.cases if (each.case, each.size) == (case, size))
    return each


def names(report: Report, case: CaseReport) -> list[str]:
    """The tests of a case, in its order."""
    return [report.tests[number].nodeid.removeprefix("suites/") for number in case.tests]


def test_merged() -> None:
    """Executions are counted over tests and runs; sizes are apart; a wrong case of a waived test is waived."""
    report = build(runs(change(TWO, tried=[Tried(2, "passed", [0], [4])])))
    case = found(report, SUM)
    assert (case.verdict, case.count, names(report, case)) == ("passed", 2 * (3 + 4), [ONE, TWO])
    assert found(report, SUM, 3).count == 10
    waived = found(report, CASES[5])
    assert (waived.verdict, waived.count) == ("waived", 2 * (1 + 1))
    assert names(report, waived) == [
        "replicate/test_a.py::test_two[2ranks-float32]",
        "replicate/test_a.py::test_one[2ranks]",
    ]
    undeclared = found(report, CASES[3])
    assert (undeclared.verdict, undeclared.count) == ("undeclared", 0)


@pytest.mark.parametrize(
    ("verdict", "ended", "shown"),
    [
        ("failed", "wrong", "failed"),
        ("hung", "wrong", "failed"),
        ("hung", "stopped", "hung"),
        ("crashed", "stopped", "crashed"),
        ("failed", "stopped", "failed"),
        ("failed", "not-reached", "passed"),  # another test has shown it
        ("failed", "passed", "passed"),
        ("failed", "undeclared", "passed"),
    ],
)
def test_worst(verdict: str, ended: str, shown: str) -> None:
    """The worst verdict of a case counts, and its test comes first; what a test did not reach says nothing."""
    report = build(runs(change(TWO, verdict=verdict, tried=[Tried(2, ended, [0], [1])])))
    case = found(report, SUM)
    assert case.verdict == shown
    assert names(report, case) == ([ONE, TWO] if shown == "passed" else [TWO, ONE])


def test_not_reached() -> None:
    """A case that no test reached is neither passed nor tried."""
    case = found(build(runs(change(TWO, verdict="failed", tried=[Tried(2, "not-reached", [4], [1])]))), CASES[4])
    assert case.verdict == "passed"
    report = build(
        runs(change(TWO, verdict="failed", tried=[Tried(2, "not-reached", [3], [1])]), change(ONE, tried=[]))
    )
    assert (found(report, CASES[3]).verdict, found(report, CASES[3]).count) == ("not-reached", 0)


def test_runs_differ() -> None:
    """Each run has numbers of its own for cases."""
    first, (name, second) = runs()
    lines = [json.loads(line) for line in second.splitlines()]
    table = next(line for line in lines if line["record"] == "cases")
    table["cases"].reverse()
    for line in lines:
        for tried in line.get("tried", []):
            tried[2] = [len(table["cases"]) - 1 - number for number in tried[2]]
        if line["record"] == "end":
            line.pop("digest")
    other = name, b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    assert build([first, other]).cases == build([first, (name, second)]).cases


@pytest.mark.parametrize(
    ("cause", "case"),
    [
        (NotClaimed(what="", collective="gather", dtypes=("int8",)), Call("gather", "", "int8", "", "", "", "")),
        (NotClaimed(what="", collective="gather"), Call("gather", "", "", "", "", "", "")),
        (NotClaimed(what="", stack="replicate", feature="comm_hooks"), Setting("replicate", "feature", "comm_hooks")),
    ],
)
def test_undeclared_tests(cause: NotClaimed, case: Any) -> None:
    """A test that did not run for a claim makes what it is about undeclared."""
    report = build(runs(change(ONE, verdict="unsupported", cause=cause, reason=f"unsupported: {cause}", tried=[])))
    assert (found(report, case).verdict, found(report, case).count) == ("undeclared", 0)


def boxes(tables: list[matrix.Table], title: str) -> dict[tuple[str, str], Any]:
    """The cells of a table, by row and column."""
    (table,) = (table for table in tables if table.title == title)
    return {
        (name, column): cell for name, cells in table.rows for column, cell in zip(table.columns, cells, strict=True)
    }


def test_tables() -> None:
    """Cases are counted by two of their fields, with the owners of waived ones; where none is, there is no cell."""
    report = build(runs())
    cells = boxes(matrix.of_calls(report), "Collectives and dtypes")
    assert cells["all_reduce", "float32"].counts == {"passed": 2}
    assert cells["all_reduce", "float32"].link == "collective=all_reduce&dtype=float32"
    assert cells["broadcast", "int32"] is None
    assert boxes(matrix.of_calls(report), "Reductions and dtypes")["MAX", "int32"].figure == "1"
    waived = boxes(matrix.of_stacks(report), "replicate")["static_graph=yes", "2"]
    assert (waived.verdict, waived.figure, waived.owners) == ("waived", "0/1", ["made-up"])
    tests = boxes([matrix.of_tests(report)], "Tests by stack and world size")
    assert tests["replicate", "2"].counts == {"waived": 1, "passed": 1}
    assert tests["collectives", "3"].counts == {"passed": 1, "undeclared": 1}


def test_collective_that_is_not_claimed() -> None:
    """It is undeclared in every dtype that the table has."""
    cells = boxes(matrix.of_calls(build(runs())), "Collectives and dtypes")
    assert {column: cell.verdict for (name, column), cell in cells.items() if name == "reduce"} == {
        "int32": "undeclared",
        "float32": "undeclared",
    }


def test_many_rows() -> None:
    """A table has at most some rows and columns, and says how many rows are missing."""
    made = [Call(f"c{n}", "", f"d{n}", "contiguous", "", "world", "sync") for n in range(80)]
    report = build(runs())
    report.cases = [CaseReport(case=case, size=2, verdict="passed", count=1, tests=[0]) for case in made]
    table = matrix.of_calls(report)[0]
    assert (len(table.rows), len(table.columns), table.left_out) == (matrix.MOST, matrix.MOST, 20)


def test_data() -> None:
    """The page has every case for its script; no text can end the script, and invisible characters are written out."""
    report = build(runs())
    report.cases[0].case = Setting("</script><!--&", "\u202e\u2028", "x")
    text = str(embedded.data(report))
    assert not {*"<>&\u2028\u202e"} & {*text}
    read = json.loads(text)
    assert "</script><!--&" in read["words"]
    assert sum(len(case) - 1 for case in read["cases"]) == len(report.cases)
    assert {read["verdicts"][size[1]] for case in read["cases"] for size in case[1:]} == {
        "passed",
        "waived",
        "undeclared",
    }


def test_round_trip() -> None:
    """Cases are in the report's JSON; a report without any, of an older Concord, is read."""
    report = build(runs())
    assert decode(encode(report), "x").cases == report.cases
    older = json.loads(encode(report))
    del older["cases"]
    assert decode(json.dumps(older).encode(), "x").cases == []
