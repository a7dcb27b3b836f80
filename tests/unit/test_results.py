"""Verdicts on disk: what is written comes back, what is damaged is told."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import results
from harness.requirements import stack_of
from harness.results import (
    VERDICTS,
    VERSION,
    Call,
    Cases,
    Collected,
    GivenWorld,
    ProfileText,
    RankEvidence,
    Record,
    RequirementText,
    ResultsError,
    RunEnd,
    RunHeader,
    Setting,
    TestResult,
    Tried,
    Writer,
    read,
)

HEADER = RunHeader(started=1.0, arguments=["-n", "4"], environment={"torch": "2.13"})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "results.jsonl"


def write(path: Path, *records: Record) -> None:
    writer = Writer(path)
    for record in records:
        writer.write(record)
    writer.close()


def test_round_trip(path: Path) -> None:
    """A result comes back with its evidence."""
    rank = RankEvidence(
        rank=1, kind="died", what="killed", first=True, text="tb", stack="s", collectives=["a"], output="o"
    )
    test = TestResult(
        nodeid="suites/collectives/test_x.py::test_a[2ranks]",
        verdict="crashed",
        stack="collectives",
        requirements=["COLL-X-01"],
        world=GivenWorld(2, "gloo", "cpu"),
        seconds=1.25,
        reason="r",
        headline="h",
        ranks=[rank],
    )
    write(path, HEADER, Collected([test.nodeid]), test, RunEnd(9.0, 1))
    assert (HEADER, {test.nodeid: test}) == (read(path).header, read(path).tests)


def test_digest(path: Path) -> None:
    """A file whose last line has a digest is seen to be changed, wherever that is."""
    writer = Writer(path)
    for record in (HEADER, TestResult(nodeid="a", verdict="passed"), TestResult(nodeid="b", verdict="failed")):
        writer.write(record)
    writer.write(RunEnd(9.0, 1, digest=writer.digest))
    writer.close()
    whole = path.read_bytes()
    assert read(path).damaged == ""
    path.write_bytes(whole.replace(b"failed", b"passed"))
    assert "line 4: the file is not the one that the run wrote" in read(path).damaged
    lines = whole.splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], *lines[2:]]))
    assert read(path).damaged != ""


def test_version_1(path: Path) -> None:
    """Files of version 1, which have neither requirements nor a digest, are read."""
    path.parent.mkdir()
    path.write_text(
        '{"record":"run","schema":"concord.results","version":1,"started":1.0,"environment":{"torch":"2.13"}}\n'
        '{"record":"collected","tests":["a"]}\n{"record":"test","nodeid":"a","verdict":"passed"}\n'
        '{"record":"end","finished":2.0,"exit_status":0,"profile":"cpu-gloo","profile_hash":"00"}\n'
    )
    run = read(path)
    assert (run.header.profile, run.header.seed, run.tests["a"].verdict) == ("cpu-gloo", "", "passed")
    assert (run.complete, run.damaged, run.profile, run.requirements) == (True, "", None, {})


def test_header_of_now() -> None:
    """The header of a run that starts now says on what it runs."""
    header = results.header(["-x"])
    assert (header.arguments, {"python", "platform", "cores"} <= set(header.environment)) == (["-x"], True)


@pytest.mark.parametrize(("known", "at_the_end"), [("a", "a"), ("a", ""), ("", "a")])
def test_profile_of_a_run(path: Path, known: str, at_the_end: str) -> None:
    """The profile is the header's, whether it was known when the run began or only when it ended."""
    write(path, results.header([], known, known and "hash"), RunEnd(9.0, 0, at_the_end, at_the_end and "hash"))
    header = read(path).header
    assert (header.profile, header.profile_hash) == ("a", "hash")


def test_makes_its_folder(path: Path) -> None:
    """The folder of a results file is made."""
    write(path, HEADER)
    assert path.is_file()


@pytest.mark.parametrize("there", ["file", "link"])
def test_never_appends(path: Path, there: str) -> None:
    """A run writes to a new file; what is there already, behind a link as well, stays as it is."""
    write(path, HEADER)
    (path.parent / "link").symlink_to(path.name)
    with pytest.raises(FileExistsError):
        Writer(path if there == "file" else path.parent / "link")
    assert list(read(path).tests) == []


def test_each_record_is_there_at_once(path: Path) -> None:
    """A reader sees a record as soon as write() has returned."""
    writer = Writer(path)
    writer.write(HEADER)
    writer.write(TestResult(nodeid="a", verdict="passed"))
    seen = list(read(path).tests)
    writer.close()
    assert seen == ["a"]


def test_complete(path: Path) -> None:
    """A run with its last line is complete, and has an exit status."""
    write(path, HEADER, RunEnd(9.0, 3))
    run = read(path)
    assert (run.complete, run.exit_status, run.torn) == (True, 3, False)


def test_cut_off(path: Path) -> None:
    """A run without its last line is not complete, and has no exit status."""
    write(path, HEADER, Collected(["a"]))
    run = read(path)
    assert (run.complete, run.exit_status, run.torn) == (False, None, False)


def test_not_run(path: Path) -> None:
    """A test that was collected and has no result is not-run, with its stack."""
    nodeid = "suites/replicate/test_x.py::test_a"
    write(path, HEADER, Collected([nodeid]))
    test = read(path).tests[nodeid]
    assert (test.verdict, test.stack) == ("not-run", "replicate")


def attempts(*verdicts: str) -> list[TestResult]:
    return [
        TestResult(nodeid="a", verdict=verdict, attempt=number, headline=f"{verdict} in {number}")
        for number, verdict in enumerate(verdicts, 1)
    ]


@pytest.mark.parametrize(
    ("verdicts", "expected", "of"),
    [
        (["passed"], "passed", 1),
        (["failed", "passed"], "flaky", 1),
        (["failed", "failed", "passed"], "flaky", 1),
        (["failed", "hung", "passed"], "flaky", 2),
        (["failed", "waived"], "flaky", 1),
        (["failed", "crashed"], "crashed", 2),
        (["hung", "failed"], "hung", 1),
        (["passed", "failed"], "failed", 2),
        (["failed", "passed", "failed"], "failed", 1),
        (["waived", "passed"], "waived", 1),
        (["passed", "passed"], "passed", 1),
        (["failed", "not-run"], "failed", 1),
        (["not-run", "passed"], "passed", 2),
        (["failed", "unsupported"], "failed", 1),
        (["unsupported", "not-run"], "not-run", 2),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else str(value),
)
def test_attempts(path: Path, verdicts: list[str], expected: str, of: int) -> None:
    """A test comes to the worst of its attempts, and to flaky if only the last was right; all their evidence stays."""
    made = attempts(*verdicts)
    write(path, HEADER, Collected(["a"]), *made, Collected(["a"]), RunEnd(9.0, 1))
    run = read(path)
    assert (run.tests["a"].verdict, run.tests["a"].headline) == (expected, f"{verdicts[of - 1]} in {of}")
    assert list(run.records()) == made
    assert (run.counts()[expected], sum(run.counts().values())) == (1, 1)


def test_crash_among_attempts(path: Path) -> None:
    """What only one of the attempts could tell of a test is told of the test."""
    lost = TestResult(nodeid="a", verdict="crashed")
    again = TestResult(nodeid="a", verdict="passed", attempt=2, requirements=["A-B-01"], property_based=True, size=2)
    write(path, HEADER, lost, again)
    test = read(path).tests["a"]
    assert (test.verdict, test.requirements, test.property_based, test.size) == ("flaky", ["A-B-01"], True, 2)


END = RunEnd(9.0, 0)
PROFILE = ProfileText(name="p", file="p.toml", texts={})
REQUIREMENT = RequirementText(id="A-B-01", sentence="It is.")


@pytest.mark.parametrize(
    ("records", "line", "what"),
    [
        ([*attempts("failed"), *attempts("passed"), END], 3, "a second result for attempt 1 of a"),
        ([*attempts("failed", "passed"), *attempts("failed", "passed")[1:]], 4, "a second result for attempt 2 of a"),
        ([*attempts("failed", "passed")[1:], END], 2, "attempt 2 of a, of which there are 0"),
        ([TestResult(nodeid="a", verdict="passed", attempt=0)], 2, "attempt 0 of a"),
        ([END, END], 3, "after the one that ends the run"),
        ([END, *attempts("passed")], 3, "after the one that ends the run"),
        ([END, Collected(["a"])], 3, "after the one that ends the run"),
        ([END, HEADER], 3, "after the one that ends the run"),
        ([HEADER, END], 2, "a second run begins here"),
        ([PROFILE, PROFILE, END], 3, "a second profile"),
        ([REQUIREMENT, REQUIREMENT, END], 3, "the requirement A-B-01 for the second time"),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_records_that_no_run_writes(path: Path, records: list[Record], line: int, what: str) -> None:
    """Records that are there twice, or after the end, make a file unusable; the error names the line."""
    write(path, HEADER, *records)
    with pytest.raises(ResultsError, match=rf"results\.jsonl, line {line}: .*{what}"):
        read(path)


def test_counts(path: Path) -> None:
    """Every verdict has a count, those that nothing came to as well."""
    write(path, HEADER, Collected(["a", "b"]), TestResult(nodeid="b", verdict="hung"))
    assert {**dict.fromkeys(VERDICTS, 0), "hung": 1, "not-run": 1} == read(path).counts()


def test_torn_anywhere(path: Path) -> None:
    """A file cut off at any byte of its last line is read up to there, and says that it is torn."""
    write(path, HEADER, TestResult(nodeid="a", verdict="passed"))
    whole = path.read_bytes()
    line = msgspec.json.encode(TestResult(nodeid="b \N{SNOWMAN}", verdict="failed", headline="x")) + b"\n"
    for length in range(1, len(line) - 1):
        path.write_bytes(whole + line[:length])
        run = read(path)
        assert (list(run.tests), run.torn) == (["a"], True), line[:length]


def test_only_the_newline_is_missing(path: Path) -> None:
    """A last line that lacks only its end is whole."""
    write(path, HEADER, TestResult(nodeid="a", verdict="passed"))
    path.write_bytes(path.read_bytes()[:-1])
    assert (list(read(path).tests), read(path).torn) == (["a"], False)


GARBAGE = [
    b"garbage",
    b"{}",
    b"[]",
    b"null",
    b'{"record":"nothing"}',
    b'{"record":"test"}',
    b'{"record":"test","nodeid":1,"verdict":"passed"}',
    b'{"record":"test","nodeid":"\xff","verdict":"passed"}',
    b'{"record":"test","nodeid":"\\ud800","verdict":"passed"}',
    b'{"x":' * 100_000,
    b"\x00" * 50,
]


@pytest.mark.parametrize("line", GARBAGE, ids=lambda line: ascii(line[:40]))
def test_garbage_in_the_middle(path: Path, line: bytes) -> None:
    """Damage before the end is an error that names file and line."""
    write(path, HEADER)
    path.write_bytes(path.read_bytes() + line + b"\n" + b'{"record":"end","finished":1,"exit_status":0}\n')
    with pytest.raises(ResultsError, match=r"results\.jsonl, line 2"):
        read(path)


@pytest.mark.parametrize("line", GARBAGE, ids=lambda line: ascii(line[:40]))
def test_garbage_only(path: Path, line: bytes) -> None:
    """A file of something else is refused, also when it has no line end."""
    path.parent.mkdir()
    path.write_bytes(line)
    with pytest.raises(ResultsError, match=r"results\.jsonl"):
        read(path)


@pytest.mark.parametrize("content", [b"", b"\n\n", b'{"record":"end","finished":1,"exit_status":0}\n'], ids=ascii)
def test_no_header(path: Path, content: bytes) -> None:
    """A file whose first line does not describe a run is not one of ours."""
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(ResultsError, match="not a results file"):
        read(path)


def test_other_schema(path: Path) -> None:
    """A run of another schema is not one of ours."""
    write(path, RunHeader(started=0, schema="else.results"))
    with pytest.raises(ResultsError, match="not a results file"):
        read(path)


def test_newer_version(path: Path) -> None:
    """A newer version says to update, even where it has records that this version can't know."""
    write(path, RunHeader(started=0, version=VERSION + 1))
    path.write_bytes(path.read_bytes() + b'{"record":"hologram"}\n{"record":"end"}\n')
    with pytest.raises(ResultsError, match=f"version {VERSION + 1}.*update"):
        read(path)


def test_unknown_keys(path: Path) -> None:
    """Keys that this version does not know are passed over."""
    write(path, HEADER)
    line = json.dumps({"record": "test", "nodeid": "a", "verdict": "passed", "mood": {"x": [1]}})
    path.write_text(path.read_text() + line + "\n")
    assert list(read(path).tests) == ["a"]


def test_missing_file(path: Path) -> None:
    """A file that is not there is an error of ours, with its name."""
    with pytest.raises(ResultsError, match=r"results\.jsonl: No such file"):
        read(path)


def test_folder_in_place_of_a_file(tmp_path: Path) -> None:
    """A folder is refused like a file that is not there."""
    with pytest.raises(ResultsError, match="directory"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("nodeid", "stack"),
    [
        ("suites/collectives/test_x.py::test_a[2ranks]", "collectives"),
        ("suites/replicate/deep/test_x.py::TestX::test_a", "replicate"),
        ("elsewhere/suites/dynamo/test_x.py::test_a", "dynamo"),
        ("suites/test_x.py::test_a", ""),
        ("tests/unit/test_x.py::test_a[suites/replicate/x.py]", ""),
        ("test_x.py::test_a", ""),
        ("", ""),
        ("suites", ""),
        ("suites/", ""),
        ("::", ""),
    ],
)
def test_stack_of(nodeid: str, stack: str) -> None:
    """The stack is the folder under suites, and nothing for any other test."""
    assert stack == stack_of(nodeid)


@pytest.mark.parametrize(
    "text",
    [
        "\x1b[31mred\x1b[0m",
        "</script><script>",
        '"}\n{"record":"end"',
        "\x00",
        "\r\n\u2028\x85",
        "%s{0}",
        "x" * 1_000_000,
    ],
    ids=lambda text: ascii(text[:20]),
)
def test_hostile_text(path: Path, text: str) -> None:
    """Whatever a test's name and message hold comes back as it was."""
    test = TestResult(
        nodeid=text, verdict="failed", headline=text, ranks=[RankEvidence(rank=0, kind="raised", text=text)]
    )
    write(path, HEADER, test)
    assert {text: test} == read(path).tests


def test_half_a_surrogate_pair(path: Path) -> None:
    """A text that is not Unicode costs the letter, not the result."""
    write(path, HEADER, TestResult(nodeid="a\ud800b", verdict="failed", ranks=[RankEvidence(rank=0, kind="\udfff")]))
    (test,) = read(path).tests.values()
    assert (test.nodeid, test.verdict, test.ranks[0].kind) == ("a?b", "failed", "?")


@settings(deadline=None, max_examples=150)
@given(st.text(), st.text(), st.sampled_from(VERDICTS))
def test_any_text(tmp_path_factory: pytest.TempPathFactory, nodeid: str, text: str, verdict: str) -> None:
    """Any text that is Unicode makes the round trip."""
    path = tmp_path_factory.mktemp("any") / "r.jsonl"
    test = TestResult(nodeid=nodeid, verdict=verdict, reason=text, ranks=[RankEvidence(rank=0, kind=text, output=text)])
    write(path, HEADER, test)
    assert {nodeid: test} == read(path).tests


@settings(deadline=None, max_examples=150)
@given(data=st.binary(max_size=300), after_header=st.booleans())
def test_any_bytes(tmp_path_factory: pytest.TempPathFactory, data: bytes, after_header: bool) -> None:
    """Any bytes are read as a run or refused with a ResultsError."""
    path = tmp_path_factory.mktemp("any") / "r.jsonl"
    if after_header:
        write(path, HEADER)
        data = path.read_bytes() + data
    path.write_bytes(data)
    try:
        read(path)
    except ResultsError:
        pass


WRITES_FOR_EVER = """
import sys
from pathlib import Path
from harness.results import RunHeader, TestResult, Writer
writer = Writer(Path(sys.argv[1]))
writer.write(RunHeader(started=0.0))
i = 0
while True:
    writer.write(TestResult(nodeid=str(i), verdict="passed", headline="x" * 5000))
    if i == 50:
        print("fifty", flush=True)
    i += 1
"""


def test_killed_writer(path: Path) -> None:
    """Everything written before a writer is killed can be read, and the run is not complete."""
    writer = subprocess.Popen([sys.executable, "-c", WRITES_FOR_EVER, str(path)], stdout=subprocess.PIPE)
    with writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        writer.kill()
    run = read(path)
    assert (len(run.tests) > 50, run.complete) == (True, False)
    assert [str(i) for i in range(len(run.tests))] == list(run.tests)


CASES = Cases(
    [Call("all_reduce", "SUM", "float32", "contiguous", "", "world", "sync"), Setting("replicate", "a", "yes")]
)


def test_cases(path: Path) -> None:
    """A test's cases come back by their numbers, which go on from one record of cases to the next."""
    more = Cases([Setting("replicate", "b", "no")])
    one = TestResult(nodeid="a", verdict="passed", tried=[Tried(2, "passed", [0, 1], [3, 1])])
    other = TestResult(nodeid="b", verdict="failed", tried=[Tried(3, "wrong", [2], [1])])
    write(path, HEADER, CASES, one, more, other)
    run = read(path)
    assert run.cases == [*CASES.cases, *more.cases]
    assert (run.tests["a"], run.tests["b"]) == (one, other)


@pytest.mark.parametrize(
    ("tried", "says"),
    [
        ([Tried(2, "passed", [2], [1])], "line 3: a: case 2, of which there are 2 before it"),
        ([Tried(2, "passed", [0, 1], [1])], "line 3: a: 2 cases and 1 counts of them"),
        ([Tried(2, "passed", [0], [1]), Tried(2, "wrong", [1 << 40], [1])], "line 3: Expected `int` <= 1000000000"),
    ],
)
def test_cases_that_are_not_there(path: Path, tried: list[Tried], says: str) -> None:
    """A number of no case, and counts that do not belong to the cases, are refused with their line."""
    write(path, HEADER, CASES, TestResult(nodeid="a", verdict="passed", tried=tried))
    with pytest.raises(ResultsError, match=re.escape(says)):
        read(path)


def test_before_cases(path: Path) -> None:
    """A file of version 8 is read as it was: its tests say nothing of cases."""
    lines = [
        {"record": "run", "schema": "concord.results", "version": 8, "started": 1.0},
        {"record": "test", "nodeid": "a", "verdict": "passed", "cases": {"count": 3, "digest": "0123456789abcdef"}},
    ]
    path.parent.mkdir()
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    run = read(path)
    assert (run.cases, run.tests["a"].tried, run.tests["a"].cases.count) == ([], [], 3)  # type: ignore[union-attr]


def test_cases_of_the_worst_attempt(path: Path) -> None:
    """A test that ran twice has the cases of the attempt whose verdict counts."""
    bad = TestResult(nodeid="a", verdict="failed", tried=[Tried(2, "wrong", [0], [1])])
    good = TestResult(nodeid="a", verdict="passed", attempt=2, tried=[Tried(2, "passed", [0], [1])])
    write(path, HEADER, CASES, bad, good)
    assert read(path).tests["a"].tried == bad.tried
