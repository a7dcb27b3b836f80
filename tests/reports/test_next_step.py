"""The next command: worked out from the runs, safe to paste, and enough once it has been run."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from invented import CONCORD, STARTED, change, checkout, every_test, records, runs, written
from typer.testing import CliRunner

from harness.commands.main import app
from harness.requirements import LEVELS
from harness.results import (
    NoFittingSize,
    NotClaimed,
    OptionGiven,
    SizeNotClaimed,
    TooFewDevices,
)
from reports import bundle
from reports.answer import answer, explained, kind
from reports.arguments import asked
from reports.badge import message
from reports.build import build
from reports.bundle import MANIFEST, manifest_of, packed
from reports.markdown import markdown
from reports.page import page
from reports.verify import verify

SECOND = "pytest suites/ -n 2 --concord-seed random -m property_based"
WITHOUT_3 = "L1 takes tests that pass on worlds of 2 and 3 ranks; none passed on worlds of 3 ranks."
CLEAN: dict[str, Any] = {"headline": "", "ranks": [], "waiver": "", "bare": "", "reproducer": None}

Files = list[tuple[str, bytes]]


def first(*changes: Callable[[list[Any]], None]) -> Files:
    """The first run alone, changed."""
    made = records()
    for each in changes:
        each(made)
    return [("first", written(made))]


def header(**fields: Any) -> Callable[[list[Any]], None]:
    def apply(made: list[Any]) -> None:
        for key, value in fields.items():
            setattr(made[0], key, value)

    return apply


def given(*arguments: str, **variables: str) -> Callable[[list[Any]], None]:
    """Has a run with these arguments and environment variables."""
    environment = {f"variable {name}": value for name, value in variables.items()}

    def apply(made: list[Any]) -> None:
        made[0].arguments = list(arguments)
        made[0].environment |= environment

    return apply


def cut_off(made: list[Any]) -> None:
    del made[-1]


def part(made: list[Any]) -> None:
    made[-1].whole, made[-1].left_out = [], [OptionGiven("-k")]


def of_stacks(*stacks: str) -> Files:
    return [("a", written(records(of=every_test(stacks))))]


def commands(files: Files) -> list[str]:
    return [step.command for step in build(files).steps]


# the three answers


def test_healthy_first_run() -> None:
    """A first run in which nothing is wrong is not shown, and begins with the command of the second."""
    report = build(first())
    assert (kind(report), answer(report)) == ("not shown", "Not shown yet at any level")
    assert explained(report) == "Nothing is wrong in what ran. Something is missing."
    assert [(level.answer, level.reds) for level in report.levels] == [("not shown", [])] * len(LEVELS)
    (step,) = report.steps
    assert step.do == "Run the property-based tests with a seed that is drawn at random:"
    assert step.command == SECOND
    html = page(report)
    assert html.index("Not shown yet") < html.index(SECOND) < html.index("Levels</h2>")
    assert markdown(report).splitlines()[:7] == [
        "## Not shown yet at any level",
        "",
        "Nothing is wrong in what ran. Something is missing.",
        "",
        "Next: Run the property-based tests with a seed that is drawn at random:",
        "",
        f"    {SECOND}",
    ]
    assert message(report) == ("not shown", "lightgrey")


def test_it_is_enough() -> None:
    """Once the second command has been run, nothing is left to do."""
    parsed = asked(shlex.split(SECOND)[1:], {})
    assert (parsed.seed, parsed.narrowed, parsed.paths) == ("random", ("-m",), ("suites/",))
    report = build(runs())
    assert (kind(report), report.steps, explained(report)) == ("conformant", [], "")


def test_red() -> None:
    """Where something is wrong no run helps: the answer says what, and there is no next command for that level."""
    report = build(first(change("collectives/test_a.py::test_one[2", verdict="failed", headline="no")))
    assert (kind(report), answer(report), report.steps) == ("not conformant", "Not conformant at any level", [])
    failed = "COLLECTIVES-ONE-01: 1 failed of 2 tests; first suites/collectives/test_a.py::test_one[2ranks]."
    assert explained(report) == f"1 thing is wrong. {failed}"
    assert message(report) == ("not conformant", "red")


def test_red_above() -> None:
    """Levels below the one at which something is wrong can still be shown."""
    report = build(first(change("tp_extension/test_a.py::test_one[2", verdict="failed", headline="no")))
    answers = [level.answer for level in report.levels]
    assert answers == ["not shown"] * 3 + ["not conformant"] * 2 + ["not shown"]
    assert answer(report) == "Not conformant at L4 (tp_extension)"
    below = "suites/collectives suites/replicate suites/replicate_fsdp"
    assert [step.command for step in report.steps] == [SECOND.replace("suites/", below)]


def test_conformant_and_more_to_show() -> None:
    """A level that is reached is the answer; the next one has its command."""
    whole = written(records("9", drawn=True, of=every_test(["collectives"]), later=1000))
    report = build([*first(), ("b", whole)])
    assert answer(report) == "Conformant at L1 (collectives)"
    assert explained(report) == "L2 is not shown."
    assert report.steps[0].command.startswith("pytest suites/replicate suites/replicate_fsdp suites/tp_extension ")


def test_performance_alone() -> None:
    """P is independent of the others: alone, it is the answer."""
    tests = [msgspec.structs.replace(test, property_based=False) for test in every_test(["perf"])]
    report = build([("a", written(records(of=tests)))])
    assert (report.conformant, answer(report), message(report)) == ("", "Conformant at P (perf)", ("P", "brightgreen"))


# the commands


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (first, [SECOND]),
        (lambda: runs()[1:], ["pytest suites/ -n 2"]),
        (lambda: first(part), ["pytest suites/ -n 2", SECOND]),
        (lambda: first(cut_off), ["pytest suites/ -n 2", SECOND]),
        (lambda: first(header(faults=["gloo_lies"])), ["pytest suites/ -n 2", SECOND]),
        (lambda: of_stacks("collectives"), ["pytest suites/collectives -n 2 --concord-seed random -m property_based"]),
        (
            lambda: of_stacks("replicate"),
            [
                "pytest suites/collectives -n 2",
                "pytest suites/replicate -n 2 --concord-seed random -m property_based",
            ],
        ),
        (
            lambda: first(given("suites", "-n", "2", CONCORD_EXAMPLES="smoke"), header(effort=0.1)),
            ["env -u CONCORD_EXAMPLES pytest suites/ -n 2", f"env -u CONCORD_EXAMPLES {SECOND}"],
        ),
        (
            lambda: first(given("suites", PYTEST_ADDOPTS="-k sync -n 2"), part),
            ["env -u PYTEST_ADDOPTS pytest suites/ -n 2", f"env -u PYTEST_ADDOPTS {SECOND}"],
        ),
        (
            lambda: first(header(profile="")),
            ["concord probe --backend gloo --device cpu -o mine.toml"],
        ),
    ],
)  # fmt: skip
def test_commands(files: Callable[[], Files], says: list[str]) -> None:
    """Each run that is missing is a command, in the order in which to run them."""
    found = commands(files())
    assert found[-len(says) :] == says


def test_unlike() -> None:
    """Runs of two suites can't be put together, so both are run again."""
    second = records("7", drawn=True, later=1000)
    second[0].suite_hash = "6" * 64
    steps = build([*first(), ("b", written(second))]).steps
    assert [step.command for step in steps] == ["pytest suites/ -n 2", SECOND]
    assert steps[0].do == "All runs have to be of one suite, profile and subject. Run all tests with the default seed:"


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        ([], []),
        (["suites/", "-n", "gpus", "--profile", "./mine.toml"], ["-n", "gpus", "--profile", "./mine.toml"]),
        (["--profile=mine", "-n4"], ["-n", "4", "--profile", "mine"]),
        (["-n", "2", "--ranks-per-device", "2", "--subject", "reference"],
         ["-n", "2", "--subject", "reference", "--ranks-per-device", "2"]),
        (["--launcher", "agents=a:1,b:1", "--agents-key", "/k", "--spread"],
         ["--launcher", "agents=a:1,b:1", "--agents-key", "/k", "--spread"]),
        (["-k", "sync", "-x", "--deselect", "a", "-p", "evil", "-o", "a=b", "--maxfail", "1", "-v"], []),
        (["--concord-seed", "random", "-m", "property_based"], []),
        (["--profile", "***", "--agents-key=***"], []),
        (["--profile", "a b"], []),
        (["--profile"], []),
        (["--profile", "$(reboot)", "-n", "`reboot`"], []),
        (["--profile", "mine.toml;reboot", "--suite", "a\nreboot", "--subject", "<b>"], []),
        (["--profile", "x\u202e"], []),
        (["--profile", "x" * 2000], []),
        (["@/etc/passwd"], []),
    ],
    ids=ascii,
)  # fmt: skip
def test_options(arguments: list[str], kept: list[str]) -> None:
    """The next run has the options that say on what the last one ran, and no others; none is code for a shell."""
    (command,) = commands(first(given("suites", *arguments)))
    assert command.split(" ") == ["pytest", "suites/", *kept, "--concord-seed", "random", "-m", "property_based"]
    assert shlex.split(command) == command.split(" ")


def few(cause: Any) -> Callable[[list[Any]], None]:
    return change("[3ranks", verdict="unsupported", cause=cause, reason=f"unsupported: {cause}", **CLEAN)


@pytest.mark.parametrize(
    ("cause", "do"),
    [
        (TooFewDevices(3, 3, "gpu", 2), "Run it on a machine with at least 3 gpu devices; this one has 2:"),
        (
            SizeNotClaimed("made-up", (1, 2), 3),
            "Claim worlds of 2 and 3 ranks (world_sizes) in the profile, if the backend has that, and run it again:",
        ),
        (
            NoFittingSize((3,), (2,)),
            "Claim worlds of 2 and 3 ranks (world_sizes) in the profile, if the backend has that, and run it again:",
        ),
        (
            NotClaimed(what="feature wind of x", profile="made-up"),
            "Claim feature wind of x in the profile, if the backend has that, and run it again:",
        ),
        (
            None,
            f"{WITHOUT_3} Mend that, and run it again:",
        ),
    ],
)
def test_less(cause: Any, do: str) -> None:
    """Where all was run and less is shown than the level takes, the next step says what to change."""
    report = build(runs(few(cause), change("collectives/test_a.py::test_one[3", cause=cause)))
    assert kind(report) == "partial"
    (step,) = report.steps
    assert (step.do, step.command) == (do, "pytest suites/ -n 2")


def test_nothing_run() -> None:
    """Without a test there is nothing to go on from."""
    report = build([("a", written(records(of=[])))])
    assert (kind(report), report.steps) == ("not shown", [])


def test_wrong_bundle(tmp_path: Path) -> None:
    """A bundle that can't be trusted gets no command: its reader has not run it, and a run would not help."""
    found = {**bundle.made(first()).files, "report.html": b"x"}
    file = tmp_path / "x.zip"
    file.write_bytes(packed({**found, MANIFEST: manifest_of(found, CONCORD)}))
    report = verify(file, CONCORD, checkout(), STARTED + 86400).report
    assert report is not None
    assert (report.steps, explained(report)) == ([], "Nothing counts as long as the runs have problems.")


@pytest.mark.parametrize("text", ["<script>alert(1)</script>", "`x`\n# h\n", "\x1b[31m", "\u202e"], ids=ascii)
def test_hostile(text: str) -> None:
    """Whatever a run says of itself, the next step is text."""
    claimed = NotClaimed(what=text, profile=text)
    report = build(
        runs(few(claimed), change("collectives/test_a.py::test_one[3", cause=claimed), given("suites", text))
    )
    (step,) = report.steps
    assert text in step.do
    assert text not in markdown(report)
    assert "`" in text or text not in page(report).partition("</style>")[2]  # which means nothing in HTML


# the terminal


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    red = records()
    change("collectives", verdict="failed")(red)
    for name, data in (*runs(), ("red", written(red))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.jsonl").write_bytes(data)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str) -> tuple[int, list[str]]:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output.splitlines()


def test_terminal(folder: Path) -> None:
    """The terminal begins with the answer and the next command."""
    code, lines = run("report", "first", "--json", "r.json")
    assert code == 0
    assert lines[1:5] == [
        "Not shown yet at any level, profile made-up",
        "  Nothing is wrong in what ran. Something is missing.",
        "  next: Run the property-based tests with a seed that is drawn at random:",
        f"    {SECOND}",
    ]


@pytest.mark.parametrize(
    ("names", "code", "said"),
    [
        (["first", "second"], 0, ""),
        (["first"], 1, "concord: --require L1: L1 is not shown"),
        (["red"], 1, "concord: --require L1: L1 is not conformant"),
    ],
)
def test_require(folder: Path, names: list[str], code: int, said: str) -> None:
    """--require exits with 1 unless the level is reached, and says which of the other answers it is."""
    found, lines = run("report", *names, "--require", "L1", "--json", "r.json")
    assert found == code
    assert [line for line in lines if line.startswith("concord: ")] == ([said] if said else [])
