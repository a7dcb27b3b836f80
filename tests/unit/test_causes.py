"""Causes of unsupported tests and reasons for omitted ones: their sentences, their limits, and files of old."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import msgspec
import pytest

import harness
from harness.plugin.suite_facts import _by_function, _cause
from harness.redaction import Redactor
from harness.results import (
    CAUSES,
    VERSION,
    Cause,
    Deselected,
    GivenWorld,
    HostLacks,
    HostsLack,
    LeftOut,
    MaybeLeftOut,
    NoBackend,
    NoDevice,
    NoFittingSize,
    NoStack,
    NotClaimed,
    NotCollected,
    OnlySome,
    OptionGiven,
    ResultsError,
    RunEnd,
    RunHeader,
    SizeNotClaimed,
    TestResult,
    TooFewDevices,
    TooFewHosts,
    TooLittleMemory,
    TorchLacks,
    Writer,
    cause_of,
    parse,
    read,
)
from harness.results.causes import LONGEST

SENTENCES: list[tuple[Cause, str]] = [
    (
        NotClaimed(what="the stack dynamo", profile="p", stack="dynamo"),
        "not claimed: the stack dynamo (profile p)",
    ),
    (
        NotClaimed(what="feature ddp of dynamo", profile="p", stack="dynamo", feature="ddp"),
        "not claimed: feature ddp of dynamo (profile p)",
    ),
    (
        NotClaimed(what="reduce of int8 with MAX", profile="p", collective="reduce", dtypes=("int8",), op="MAX"),
        "not claimed: reduce of int8 with MAX (profile p)",
    ),
    (
        NotClaimed(what="reduce(int8[4], SUM)", profile="p", collective="reduce", dtypes=("int8",), op="SUM"),
        "not claimed: reduce(int8[4], SUM) (profile p)",
    ),
    (NotClaimed(what="gather", profile="p", collective="gather"), "not claimed: gather (profile p)"),
    (NotClaimed(what="with MAX", profile="p", op="MAX"), "not claimed: with MAX (profile p)"),
    (
        NotClaimed(what="of float32, int8", profile="p", dtypes=("float32", "int8")),
        "not claimed: of float32, int8 (profile p)",
    ),
    (
        NotClaimed(what="float16 or bfloat16", profile="p", dtypes=("float16", "bfloat16")),
        "not claimed: float16 or bfloat16 (profile p)",
    ),
    (NotClaimed(what="it is Monday"), "not claimed: it is Monday"),
    (SizeNotClaimed("p", (1, 2), 4), "profile p claims worlds of 1, 2 ranks, not of 4"),
    (NoFittingSize((4, 8), (1, 2)), "a world of 4 or 8 ranks is needed, and the test can have worlds of 1, 2 here"),
    (TooFewDevices(4, 2, "x", 1), "a world of 4 ranks needs 2 x devices, and there are 1"),
    (TooFewDevices(4, 4, "x", 4, (3, 1)), "a world of 4 ranks needs 4 x devices, and hosts have 3 and 1"),
    (TooFewHosts(2, 1), "a world on 2 hosts is needed, and ranks start on 1 here"),
    (NoBackend("x"), "torch has no backend 'x' here"),
    (NoStack("mine", "dynamo", ("replicate", "a")), "subject mine has no dynamo; it implements replicate, a"),
    (NoStack("mine", "dynamo", ()), "subject mine has no dynamo; it implements "),
    (NoDevice("x", "importing a: b: c"), "no x device: importing a: b: c"),
    (HostLacks("streams of the device"), "streams of the device: the host has none"),
    (HostsLack("folder that all of them see"), "the hosts have no folder that all of them see"),
    (TorchLacks("dp_mesh_dims"), "this torch has no dp_mesh_dims"),
    (
        TooLittleMemory("the largest bucket", 3 << 30, 5 << 19),
        "the largest bucket is a message of 3,072.0 MiB, and at most 2.5 MiB fit on each rank here",
    ),
]
OLD_SENTENCES = [
    (cause, text)
    for cause, text in SENTENCES
    if not isinstance(cause, NoFittingSize | TooFewHosts | HostsLack | TooLittleMemory)
    and not getattr(cause, "each", ())
]
"""Those that version 4 had."""
LEFT_OUT: list[tuple[LeftOut, str]] = [
    (OptionGiven("--ignore-glob"), "--ignore-glob was given"),
    (OnlySome(("dynamo", "replicate")), "only some files or tests were asked for of dynamo, replicate"),
    (MaybeLeftOut(), "tests were deselected, or a file could not be collected"),
]


def test_every_cause_has_a_sentence() -> None:
    """The list above is complete."""
    assert {type(cause) for cause, _ in SENTENCES} == set(CAUSES)


@pytest.mark.parametrize(("data", "sentence"), [*SENTENCES, *LEFT_OUT], ids=str)
def test_sentence(data: Cause | LeftOut, sentence: str) -> None:
    """Data has the sentence that users read."""
    assert str(data) == sentence


@pytest.mark.parametrize(("data", "sentence"), [(Deselected(), "tests were deselected"), (NotCollected(), "a file")])
def test_the_two_are_told_apart(data: LeftOut, sentence: str) -> None:
    """A deselected test and a file that was not collected are two things."""
    assert str(data).startswith(sentence)


@pytest.mark.parametrize("cause", [cause for cause, _ in SENTENCES], ids=str)
def test_round_trip(tmp_path: Path, cause: Cause) -> None:
    """A cause comes back from a file as it was."""
    writer = Writer(tmp_path / "x.jsonl")
    test = TestResult(nodeid="a", verdict="unsupported", reason=f"unsupported: {cause}", cause=cause)
    for record in (RunHeader(started=1.0), test, RunEnd(2.0, 0, left_out=[data for data, _ in LEFT_OUT])):
        writer.write(record)
    writer.close()
    run = read(writer.path)
    assert run.tests["a"] == test
    assert test.undeclared == isinstance(cause, NotClaimed)
    assert run.end is not None
    assert run.end.left_out == [data for data, _ in LEFT_OUT]


def old(version: int, *records: dict[str, Any]) -> bytes:
    """A file of a version, as JSON."""
    first = {"record": "run", "schema": "concord.results", "version": version, "started": 1.0}
    return b"".join(msgspec.json.encode(record) + b"\n" for record in (first, *records))


def skipped(reason: str, **more: Any) -> dict[str, Any]:
    return {"record": "test", "nodeid": "a", "verdict": "unsupported", "reason": reason, **more}


@pytest.mark.parametrize("version", [1, 2, 3, 4])
@pytest.mark.parametrize(("cause", "sentence"), OLD_SENTENCES, ids=lambda x: str(x) if isinstance(x, str) else "")
def test_cause_in_an_old_file(version: int, cause: Cause, sentence: str) -> None:
    """The sentence of an older file becomes the cause that it states."""
    test = parse(old(version, skipped(f"unsupported: {sentence}")), "x").tests["a"]
    assert (test.cause, test.reason) == (cause, f"unsupported: {sentence}")


@pytest.mark.parametrize(("data", "sentence"), LEFT_OUT, ids=str)
def test_left_out_in_an_old_file(data: LeftOut, sentence: str) -> None:
    """The sentences of an older file's last record become data."""
    run = parse(old(4, {"record": "end", "finished": 2.0, "exit_status": 0, "partial": [sentence]}), "x")
    assert run.end is not None
    assert (run.end.left_out, run.end.exit_status, run.complete) == ([data], 0, True)


@pytest.mark.parametrize("version", [1, 4, 5])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1 rank (gloo on cpu)", GivenWorld(1, "gloo", "cpu")),
        ("16 ranks (nccl on cuda)", GivenWorld(16, "nccl", "cuda")),
        ("", None),
        ("many ranks", None),
        (f"{'9' * 9} ranks (gloo on cpu)", None),
    ],
)
def test_world_in_an_old_file(version: int, text: str, expected: GivenWorld | None) -> None:
    """The text of an older file becomes the world that it names."""
    record = {"record": "test", "nodeid": "a", "verdict": "passed", "world": text}
    assert parse(old(version, record), "x").tests["a"].world == expected


@pytest.mark.parametrize(
    "given", ["2 ranks (gloo on cpu)", [2, "gloo", "cpu"], {"ranks": -1, "backend": "", "device": ""}]
)
def test_text_is_no_world(given: object) -> None:
    """A world that no run writes makes a file unreadable."""
    with pytest.raises(ResultsError, match="line 2"):
        parse(old(VERSION, {"record": "test", "nodeid": "a", "verdict": "passed", "world": given}), "x")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"platform": "Linux-6.1.0-x86_64-with-glibc2.36", "machine": "x86_64"}, {"os": "Linux 6.1.0"}),
        ({"accelerator": "8 of NVIDIA H200, 1 of other"}, {"device": "NVIDIA H200"}),
        ({"platform": "", "accelerator": "can't be asked: x"}, {}),
        ({"platform": "Linux-6.1.0", "os": "said by itself"}, {}),
    ],
)
def test_platform_of_an_old_file(environment: dict[str, str], expected: dict[str, str]) -> None:
    """The operating system and the device of an older file are facts of their own, whichever record has them."""
    header = {"record": "run", "schema": "concord.results", "version": 5, "started": 1.0, "environment": environment}
    end = {"record": "end", "finished": 2.0, "exit_status": 0, "environment": environment}
    for first, last in ((header, {**end, "environment": {}}), ({**header, "environment": {}}, end)):
        run = parse(b"\n".join(map(msgspec.json.encode, (first, last))) + b"\n", "x")
        assert run.header.environment == {**environment, **expected}


def test_causes_of_version_5() -> None:
    """A file of version 5 has its causes as data, and is read as it is."""
    cause, end = TorchLacks("x"), {"record": "end", "finished": 2.0, "exit_status": 0}
    left_out = msgspec.to_builtins([OptionGiven("-k")])
    run = parse(old(5, skipped("", cause=msgspec.to_builtins(cause)), {**end, "left_out": left_out}), "x")
    assert run.tests["a"].cause == cause
    assert run.end is not None
    assert run.end.left_out == [OptionGiven("-k")]


@pytest.mark.parametrize(
    "reason",
    [
        "",
        "not now",
        "unsupported: it is Monday",
        "it is unsupported: this torch has no x",
        "unsupported: torch has no x",
    ]
    + [f"unsupported: a world of {'9' * 9} ranks needs 2 x devices, and there are 1"]
    + ["unsupported: profile p claims worlds of , ranks, not of 4"],
)
def test_other_sentences(reason: str) -> None:
    """A sentence of someone else's, or one with numbers that no run has, has no cause."""
    assert parse(old(4, skipped(reason)), "x").tests["a"].cause is None


def test_old_cause_does_not_count() -> None:
    """A cause or left-out tests in a file from before version 5 are not read, whatever they are."""
    end = {"record": "end", "finished": 2.0, "exit_status": 0, "left_out": [7]}
    run = parse(old(4, skipped("unsupported: x", cause={"cause": "torch-lacks", "what": "x"}), end), "x")
    assert run.tests["a"].cause is None
    assert run.end is not None
    assert run.end.left_out == []


def test_sentence_of_a_new_file_does_not_count() -> None:
    """A sentence alone decides nothing in a file of version 5."""
    end = {"record": "end", "finished": 2.0, "exit_status": 0, "partial": ["-k was given"]}
    run = parse(old(5, skipped("unsupported: not claimed: gather (profile p)"), end), "x")
    assert (run.tests["a"].cause, run.tests["a"].undeclared) == (None, False)
    assert run.end is not None
    assert run.end.left_out == []


@pytest.mark.parametrize(
    "cause",
    [
        {"cause": "monday"},
        {"what": "x"},
        {"cause": "torch-lacks"},
        {"cause": "torch-lacks", "what": 1},
        {"cause": "torch-lacks", "what": "x" * 4001},
        {"cause": "not-claimed", "what": "x", "dtypes": ["x" * 4001]},
        {"cause": "too-few-devices", "size": -1, "need": 1, "kind": "x", "have": 0},
        {"cause": "too-few-devices", "size": 10**7, "need": 1, "kind": "x", "have": 0},
        {"cause": "size-not-claimed", "profile": "p", "claimed": [10**7], "size": 1},
    ],
    ids=lambda cause: str(cause)[:60],
)
def test_bounds(cause: dict[str, Any]) -> None:
    """A cause that no run writes makes a file unreadable."""
    with pytest.raises(ResultsError, match="line 2"):
        parse(old(5, skipped("unsupported: x", cause=cause)), "x")


def test_a_skip_carries_its_cause() -> None:
    """harness.unsupported skips a test with the sentence, and the exception has the cause."""
    with pytest.raises(pytest.skip.Exception) as caught:
        harness.unsupported(TorchLacks("x"))
    assert caught.value.msg == "unsupported: this torch has no x"
    assert cause_of(caught.value) == TorchLacks("x")


def test_what_is_written_can_be_read() -> None:
    """A long text is cut, so that a reader takes it."""
    long = NotClaimed(what="x" * 100_000, dtypes=("y" * 100_000, "z"))
    with pytest.raises(pytest.skip.Exception) as caught:
        harness.unsupported(long)
    cause = cause_of(caught.value)
    assert isinstance(cause, NotClaimed)
    assert [len(text) for text in (cause.what, *cause.dtypes)] == [LONGEST, LONGEST, 1]


@pytest.mark.parametrize("carried", [None, "unsupported: this torch has no x", {"cause": "torch-lacks", "what": "x"}])
def test_other_skips(carried: object) -> None:
    """A skip of someone else's has no cause."""
    skip = pytest.skip.Exception("unsupported: this torch has no x")
    if carried is not None:
        skip.concord_cause = carried  # type: ignore[attr-defined]
    assert cause_of(skip) is None


def test_secrets() -> None:
    """Credentials are removed from every text of a cause, those in tuples as well."""
    cause = NoStack("mine", "password=hunter22", ("password=hunter23",))
    assert "hunter" not in str(Redactor({}).record(msgspec.to_builtins(cause)))


SOURCE = """
import pytest
from harness import unsupported
from harness.results import TorchLacks

def test_of_torch(world):
    if True:
        unsupported(TorchLacks("compass"))

def test_named(world):
    def body(example):
        unsupported(harness.results.TorchLacks(what="compass"))

def test_plain(world):
    pytest.skip("unsupported: no wind")

def test_not_now(world):
    pytest.skip("not now")
"""


def test_suite_facts(tmp_path: Path) -> None:
    """The facts about a test have the causes that it gives by itself as data, and the reasons of plain skips."""
    file = tmp_path / "test_a.py"
    file.write_text(SOURCE)
    found = {name: (gives.causes, gives.reasons) for name, gives in _by_function(file).items() if name != "body"}
    assert found == {
        "test_of_torch": ((TorchLacks("compass"),), ()),
        "test_named": ((TorchLacks("compass"),), ()),
        "test_plain": ((), ("unsupported: no wind",)),
        "test_not_now": ((), ()),
    }


@pytest.mark.parametrize(
    "source", ["TorchLacks(what)", "TorchLacks(3)", "TorchLacks()", "TorchLacks('a', 'b')", "Lacks('a')", "TorchLacks"]
)
def test_no_cause_in_source(source: str) -> None:
    """An expression that is not a cause of literals says nothing."""
    assert _cause(ast.parse(source, mode="eval").body) is None


def test_shipped_suites() -> None:
    """The facts about the shipped suites have the causes that their tests give."""
    folder = Path(__file__).parents[2] / "suites" / "replicate_fsdp" / "modules"
    given = {
        name: gives.causes
        for file in ("application", "selection")
        for name, gives in _by_function(folder / f"test_{file}.py").items()
        if gives.causes
    }
    assert given == {
        "test_refused": (TorchLacks("dp_mesh_dims"),),
        "test_whole_mesh": (TorchLacks("dp_mesh_dims"),),
    }
