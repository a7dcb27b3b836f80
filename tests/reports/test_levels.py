"""Levels: conformant where everything is as it must be, and one sentence for each way of not being so."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from invented import change, every_test, older, records, runs, tried, written

from harness.requirements import LEVELS
from harness.results import VERSION, GivenWorld, NotClaimed, OptionGiven, RunEnd, TestResult
from reports.build import build
from reports.model import ORDER, ReportError, decode, encode, json_schema, worst

BAD = "suites/replicate_fsdp/test_a.py::test_one[2ranks]"
ALONE = (
    "2 of 2 tests that draw their worlds had worlds of at most 1 rank alone, where nothing is communicated; "
    "they ask for up to 4."
)
UNDRAWN = (
    "No run of all tests of collectives that draw from the seed has one drawn at random "
    "(--concord-seed random -m property_based)."
)


def test_conformant() -> None:
    """Two whole runs without a failure are conformant at every level, with a waiver and an undeclared size."""
    report = build(runs())
    assert (report.conformant, report.problems) == ("L5", [])
    assert [level.why_not for level in report.levels] == [[]] * len(LEVELS)
    assert report.counts == {"waived": 1, "passed": 22, "undeclared": 1}
    assert [(w.reason, len(w.tests)) for w in report.waivers] == [("known to be wrong", 1)]


def test_second_run_of_what_draws() -> None:
    """Tests that draw nothing need no second run."""
    report = build(properties())
    assert (report.conformant, report.problems) == ("L5", [])


def test_nothing_to_draw() -> None:
    """A stack without properties needs no second run at all."""
    plain = [msgspec.structs.replace(test, property_based=False) for test in every_test()]
    assert build([("a", written(records(of=plain)))]).conformant == "L5"


def test_flaky() -> None:
    """A mandatory requirement of which one test failed at first is not proven by the attempt that passed."""
    report = build(runs(tried(BAD, "failed", "passed")))
    found = {level.id: level for level in report.levels}
    assert report.conformant == "L2"
    assert found["L3"].why_not == [f"REPLICATEFSDP-ONE-01: 1 flaky of 2 tests; first {BAD}."]
    (test,) = (test for test in report.tests if test.nodeid == BAD)
    assert (test.verdict, test.headline) == ("flaky", "wrong in attempt 1")
    assert [(a.verdict, a.headline) for a in test.attempts] == [("failed", "wrong in attempt 1"), ("passed", "")]


@pytest.mark.parametrize("verdict", ["failed", "crashed", "hung"])
def test_failure(verdict: str) -> None:
    """One bad test takes its level, and those above; those below stay."""
    report = build(runs(change("replicate_fsdp/test_a.py::test_one[2", verdict=verdict, headline="no")))
    assert report.conformant == "L2"
    found = {level.id: level.why_not for level in report.levels}
    assert found["L3"] == [f"REPLICATEFSDP-ONE-01: 1 {verdict} of 2 tests; first {BAD}."]
    assert found["L4"] == ["L3, on which L4 stands, is not conformant."]
    assert found["P"] == []


def one(**fields: Any) -> list[tuple[str, bytes]]:
    """The first run as it is, the second with another header."""
    second = records("123", drawn=True, later=1000)
    for key, value in fields.items():
        setattr(second[0], key, value)
    if second[0].version != VERSION:
        older(second, second[0].version)
    return [("a", written(records())), ("b", written(second))]


def properties(*, leave_out: str = "(none)", first_version: int = VERSION) -> list[tuple[str, bytes]]:
    """The second run is one of tests that draw, without some; the first is perhaps from an earlier Concord."""
    first = records()
    if first_version != VERSION:
        older(first, first_version)
    some = [test for test in every_test() if test.property_based and leave_out not in test.nodeid]
    second = records("123", drawn=True, of=some, later=1000)
    second[-1].whole, second[-1].left_out = [], [OptionGiven("-m")]
    return [("a", written(first)), ("b", written(second))]


def torn() -> list[tuple[str, bytes]]:
    (name, data), second = runs()
    return [(name, data.rpartition(b'{"record":"end"')[0]), second]


def edited() -> list[tuple[str, bytes]]:
    (name, data), second = runs()
    return [(name, data.replace(b'"seconds":2.0', b'"seconds":1.0', 1)), second]


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (lambda: runs()[:1], UNDRAWN),
        (lambda: runs()[1:], "No run of all tests of collectives has the default seed."),
        (lambda: one(seed_drawn=False), UNDRAWN),
        (lambda: properties(leave_out="collectives/test_a.py::test_two[3"), UNDRAWN),
        (lambda: properties(first_version=2), UNDRAWN),
        (torn, "Run 1 was cut off before its end."),
        (edited, "Run 1 is not as it was written: line 41"),
        (lambda: one(faults=["gloo_lies"]), "Run 2 had defects put into its ranks on purpose: gloo_lies."),
        (lambda: one(effort=0.1), UNDRAWN),
        (lambda: one(profile=""), "Run 2 went by no profile, so that nothing is claimed."),
        (lambda: one(version=1), "Run 2 is a file of version 1, which says neither seed nor selection."),
        (lambda: one(suite_hash="6" * 64), "The runs differ in the suite (its hash): 555555555555 and 666666666666."),
        (lambda: one(subject="reference"), "The runs differ in the subject: torch and reference."),
        (lambda: one(environment={"torch": "2.12"}), "The runs differ in the environment (torch): 2.13.0 and 2.12."),
        (
            lambda: runs(change("collectives", verdict="not-run")),
            "COLLECTIVES-ONE-01: 2 not run of 2 tests; first suites/",
        ),
        (
            lambda: runs(change("collectives", verdict="unsupported", reason="unsupported: none", cause=None)),
            "No requirement of L1 was passed.",
        ),
        (
            lambda: runs(
                change(
                    "collectives/test_a.py::test_one",
                    verdict="unsupported",
                    reason="unsupported: not claimed: x",
                    cause=NotClaimed(what="x"),
                )
            ),
            "COLLECTIVES-ONE-01 was not run: the profile claims nothing that it is about.",
        ),
        (
            lambda: runs(change("collectives/test_a.py::test_two", verdict="failed", requirements=[])),
            "Tests that prove no requirement failed: suites/collectives/test_a.py::test_two[2ranks-float32], ",
        ),
    ],
)
def test_why_not(files: Any, says: str) -> None:
    """Each way of not being conformant is a sentence, and the level is not conformant."""
    report = build(files())
    assert report.conformant == ""
    assert any(why.startswith(says) for why in report.levels[0].why_not), report.levels[0].why_not


def test_part_of_a_stack() -> None:
    """A run of a part says what was left out."""
    made = records()
    made[-1].whole, made[-1].left_out = [], [OptionGiven("-k")]
    (level, *_) = build([("a", written(made))]).levels
    assert "Not all tests of collectives were run (-k was given)." in level.why_not


def test_part_of_a_stack_with_few_examples() -> None:
    """What ran is not denied, though it does not count."""
    made = records()
    made[0].effort = 0.1
    made[-1].whole, made[-1].left_out = [], [OptionGiven("-k")]
    (level, *_) = build([("a", written(made))]).levels
    few = "Not all tests of collectives were run, and those with too few of their examples (CONCORD_EXAMPLES)."
    assert few in level.why_not
    assert "No test of collectives was run." not in level.why_not


def test_only_the_lowest() -> None:
    """A vendor may ask for L1 alone: a whole run of its stack is enough."""
    files = [
        ("a", written(records(of=every_test(["collectives"])))),
        ("b", written(records("9", drawn=True, of=every_test(["collectives"]), later=1000))),
    ]
    report = build(files)
    assert report.conformant == "L1"
    assert report.levels[1].why_not == ["No test of replicate was run."]


def test_not_mandatory() -> None:
    """A requirement that is not mandatory is reported, and no level depends on it."""

    def optional(made: list[Any]) -> None:
        for record in made:
            if getattr(record, "id", "") == "DYNAMO-TWO-01":
                record.mandatory = False

    report = build(runs(optional, change("dynamo/test_a.py::test_two", verdict="failed")))
    assert report.conformant == "L5"
    assert [r.verdict for r in report.requirements if r.id == "DYNAMO-TWO-01"] == ["failed"]


def test_undeclared_and_unsupported() -> None:
    """What the profile does not claim is kept apart from what the backend can't do."""
    report = build(runs(change("dynamo/test_a.py::test_two[2", verdict="unsupported", reason="unsupported: no float8")))
    assert (report.counts["undeclared"], report.counts["unsupported"]) == (1, 1)


def test_worst() -> None:
    """The worst verdict counts; what was not asked for says nothing beside what was run."""
    assert worst(["passed", "waived"]) == "waived"
    assert worst(["passed", "unsupported", "undeclared"]) == "passed"
    assert worst(["unsupported", "undeclared"]) == "undeclared"
    assert worst(["waived", "not-run"]) == "not-run"
    assert worst(list(ORDER)) == "crashed"
    assert worst([]) == "not-run"


def test_worst_of_runs() -> None:
    """Of a test in several runs the worst counts, with the evidence of that run."""
    first, second = records(), records("1", drawn=True, later=1000)
    change("dynamo/test_a.py::test_one[2", verdict="failed", headline="no")(second)
    report = build([("a", written(first)), ("b", written(second))])
    (test,) = (t for t in report.tests if t.verdict == "failed")
    assert (test.verdicts, test.run, test.headline) == (["passed", "failed"], 1, "no")


def test_order_does_not_matter() -> None:
    """Runs are put in their order in time, so the same runs make the same report."""
    assert encode(build(runs()[::-1])) == encode(build(runs()))


def test_matrix() -> None:
    """Cells are by stack, dtype and number of ranks."""
    cells = {(c.stack, c.dtype, c.size): c.counts for c in build(runs()).matrix}
    assert cells["replicate", "float32", 2] == {"waived": 1}
    assert cells["collectives", "", 3] == {"undeclared": 1}


def drew(*sizes: int, run: int | None = None) -> list[tuple[str, bytes]]:
    """Two runs in which the properties of ``replicate`` drew from such worlds; ``run``: in one of them only."""
    made = [records(), records("123", drawn=True, later=1000)]
    for number, each in enumerate(made):
        had = sizes if run in (None, number) else (1, 2, 4)
        world = GivenWorld(had[-1], "gloo", "cpu", had)
        change("replicate/test_a.py::test_two", size=4, world=world)(each)
    return [(str(number), written(each)) for number, each in enumerate(made)]


@pytest.mark.parametrize(
    ("files", "drawn", "notes"),
    [
        (lambda: drew(1, 2, 4), {"1": 2, "2": 2, "4": 2}, []),
        (
            lambda: drew(1, 2),
            {"1": 2, "2": 2},
            ["2 of 2 tests that draw their worlds had worlds of at most 2 ranks; they ask for up to 4."],
        ),
        (lambda: drew(1), {"1": 2}, [ALONE]),
        (lambda: drew(1, run=1), {"1": 2}, [ALONE]),
    ],
)
def test_drawn(files: Any, drawn: dict[str, int], notes: list[str]) -> None:
    """A level says of which sizes its properties drew, and whether they ask for larger ones; of two runs, the worse."""
    report = build(files())
    found = {level.id: level for level in report.levels}
    assert (found["L2"].drawn, found["L2"].notes, found["L2"].conformant) == (drawn, notes, True)
    assert (found["L3"].drawn, found["L3"].notes) == ({}, [])
    assert {(c.dtype, c.size) for c in report.matrix if c.stack == "replicate"} == {
        ("", 2),
        ("", 3),
        ("float32", max(map(int, drawn))),
    }


def test_drawn_in_older_results() -> None:
    """Results without the sizes have the largest, and show if it is smaller than what a property asks for."""
    world = GivenWorld(1, "gloo", "cpu")
    found = {level.id: level for level in build(runs(change("replicate/test_a.py::test_two[3", world=world))).levels}
    assert found["L2"].drawn == {"1": 1}
    assert "they ask for up to 3." in found["L2"].notes[0]


def test_drawn_by_what_did_not_run() -> None:
    """A property that is unsupported drew nothing."""
    world = GivenWorld(1, "gloo", "cpu")
    unsupported = change(
        "replicate/test_a.py::test_two[3", world=world, verdict="unsupported", reason="unsupported: none"
    )
    assert next(level for level in build(runs(unsupported)).levels if level.id == "L2").drawn == {}


def test_json() -> None:
    """A report is read back as it was written, and its schema names every field of it."""
    report = build(runs())
    assert decode(encode(report), "x") == report
    assert b'"conformant"' in json_schema()


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"\xff", b'{"schema":"x","version":1}', b"[" * 100_000], ids=ascii)
def test_no_report(data: bytes) -> None:
    """What is no report is refused in a line."""
    with pytest.raises(ReportError, match="^x: not a report of Concord"):
        decode(data, "x")


def test_newer_report() -> None:
    """A newer version says to update."""
    with pytest.raises(ReportError, match="version 9.*update"):
        decode(b'{"schema":"concord.report","version":9}', "x")


def test_bad_input() -> None:
    """No run, the same run twice, and what is no run are refused."""
    with pytest.raises(ReportError, match="no run"):
        build([])
    with pytest.raises(ReportError, match="given twice"):
        build([runs()[0], runs()[0]])
    with pytest.raises(ReportError, match="x, line 1"):
        build([("x", b"garbage\n")])


def test_version_1() -> None:
    """A run that says neither requirements nor seed makes a report, which is not conformant."""
    old = (
        b'{"record":"run","schema":"concord.results","version":1,"started":1.0,"environment":{"torch":"2.13"}}\n'
        b'{"record":"test","nodeid":"suites/replicate/test_a.py::test_a","verdict":"passed","stack":"replicate"}\n'
        b'{"record":"end","finished":2.0,"exit_status":0,"profile":"cpu-gloo","profile_hash":"00"}\n'
    )
    report = build([("old", old)])
    assert (report.conformant, report.counts) == ("", {"passed": 1})


def test_cut_off() -> None:
    """Of a run that was cut off, every result so far is in the report."""
    made = [r for r in records() if not isinstance(r, RunEnd)]
    last = max(i for i, r in enumerate(made) if isinstance(r, TestResult))
    report = build([("a", written(made[:last]))])
    assert (report.counts["not-run"], len(report.tests)) == (1, 24)
    assert report.levels[-1].why_not[-2:] != []
