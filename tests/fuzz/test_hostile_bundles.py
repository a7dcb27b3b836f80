"""Bundles that were made to bring `concord verify` down: each is one clear line, soon, and in little memory."""

from __future__ import annotations

import functools
import hashlib
import random
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from invented import FILE, PROFILE, STARTED, change, every_test, records, runs, written
from measured import Worker

from harness.results import Collected, ProfileText, RankEvidence, RequirementText, TestResult, WaiverEntry
from reports.build import build
from reports.bundle import MANIFEST, made, manifest_of, packed
from reports.model import ReportError
from reports.verify import verify

Files = dict[str, bytes]
BEGIN = b'{"record":"run",'


def check(data: bytes) -> str:
    """What `concord verify` says of a bundle: its problems, a line each."""
    with tempfile.NamedTemporaryFile(suffix=".zip") as file:
        file.write(data)
        file.flush()
        return "\n".join(verify(Path(file.name), "0.1.0", None, STARTED + 86400).problems) or "no problem"


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker(check, (ReportError,)) as made:
        yield made


@functools.cache
def _honest() -> Files:
    return made(runs()).files


def with_file(name: str, data: bytes) -> bytes:
    """An honest bundle in which one file is another, with the manifest that belongs to it.

    A run gets so much noise that it is not too well packed, or nothing would ever be parsed.
    """
    if data.startswith(BEGIN):
        data = (
            BEGIN + b'"noise":"%s",' % random.Random(0).randbytes(len(data) // 200).hex().encode() + data[len(BEGIN) :]
        )
    found = {**_honest(), name: data}
    return packed({**found, MANIFEST: manifest_of(found, "0.1.0")})


MANY = [f"A-{number}" for number in range(30_000)]
"""Ids of requirements."""


def of_runs(*changes: Callable[[list[Any]], None]) -> bytes:
    """A bundle whose first run was changed; what should follow from it is an honest one's."""
    made = records()
    for each in changes:
        each(made)
    return with_file("runs/1.jsonl", written(made))


def header(**fields: Any) -> Callable[[list[Any]], None]:
    def apply(made: list[Any]) -> None:
        for key, value in fields.items():
            setattr(made[0], key, value)

    return apply


def end(**fields: Any) -> Callable[[list[Any]], None]:
    def apply(made: list[Any]) -> None:
        for key, value in fields.items():
            setattr(made[-1], key, value)

    return apply


def profile(text: str) -> Callable[[list[Any]], None]:
    """Another text of the profile, with its hash."""

    def apply(made: list[Any]) -> None:
        made[0].profile_hash = hashlib.sha256(text.encode()).hexdigest()
        for record in made:
            if isinstance(record, ProfileText):
                record.texts = {FILE: text}

    return apply


def replaced(old: bytes, new: bytes) -> bytes:
    data = _honest()["runs/1.jsonl"]
    assert old in data
    return with_file("runs/1.jsonl", data.replace(old, new))


def declared(size: int, actual: int) -> bytes:
    """A bundle whose manifest is NUL, and has another size in the zip file's headers than it has."""
    stream = zlib.compressobj(9, zlib.DEFLATED, -15)
    body = stream.compress(bytes(actual)) + stream.flush()
    local = struct.pack("<4s5H3I2H", b"PK\3\4", 20, 0, 8, 0, 33, 0, len(body), size, len(MANIFEST), 0)
    listed = struct.pack(
        "<4s6H3I5H2I",
        b"PK\1\2",
        0x314,
        20,
        0,
        8,
        0,
        33,
        0,
        len(body),
        size,
        len(MANIFEST),
        0,
        0,
        0,
        0,
        0o100644 << 16,
        0,
    )
    name = MANIFEST.encode()
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 1, 1, len(listed) + len(name), len(local) + len(name) + len(body), 0)
    return local + name + body + listed + name + end


def many_tests(count: int, **fields: Any) -> bytes:
    tests = [TestResult(nodeid=f"a{i}", verdict="passed", finished=STARTED + 50, **fields) for i in range(count)]
    return with_file("runs/1.jsonl", written(records(of=tests)))


def requirements_of_all(tests: int, each: int) -> bytes:
    """Tests that all prove all requirements: a page that has every test under each of them."""
    names = [f"A-{i}" for i in range(each)]
    made = records(of=[TestResult(nodeid=f"t{i}", verdict="failed", requirements=names) for i in range(tests)])
    made[3:3] = [RequirementText(id=name, sentence="x", level="L1") for name in names]
    return with_file("runs/1.jsonl", written(made))


def globs(tests: int, count: int) -> bytes:
    """Waived tests by a waiver with many globs, none of which matches at once."""
    every = [f"*a*b{'c' * 50}{i}*" for i in range(count)]
    names = [f"suites/replicate/test_{'ab' * 200}.py::t{i}" for i in range(tests)]
    waiver = WaiverEntry(place="x:1", tests=every, reason="", link="", expires="2030-01-01", verdicts=["failed"])
    made = records(
        of=[
            TestResult(nodeid=n, verdict="waived", stack="replicate", waiver="x:1", bare="failed", seconds=0)
            for n in names
        ]
    )
    for record in made:
        if isinstance(record, ProfileText):
            record.waivers = [waiver]
    return with_file("runs/1.jsonl", written(made))


def one_failure(**fields: Any) -> Callable[[list[Any]], None]:
    return change("dynamo/test_a.py::test_one[2", verdict="failed", **fields)


LONG = "9" * 5000
HOSTILE: dict[str, tuple[Callable[[], bytes], str]] = {
    # times and numbers
    "a run that starts at 1e300": (lambda: of_runs(header(started=1e300)), "runs/1.jsonl, line 1: "),
    "a run that starts before 1970": (lambda: of_runs(header(started=-1e12)), "runs/1.jsonl, line 1: "),
    "a run that ends at 1e300": (lambda: of_runs(end(finished=1e300)), "runs/1.jsonl, line 41: "),
    "a test that ends at 1e300": (lambda: of_runs(change("dynamo", finished=1e300)), "runs/1.jsonl, line "),
    "a test of 1e300 s": (lambda: of_runs(change("dynamo", seconds=1e300)), "runs/1.jsonl, line "),
    "a time of infinity": (
        lambda: replaced(f'"started":{STARTED}'.encode(), b'"started":1e999'),
        "runs/1.jsonl, line 1: a number",
    ),
    "a world of 1e18 ranks": (lambda: of_runs(change("dynamo", size=10**18)), "runs/1.jsonl, line "),
    "an integer of 5,000 digits": (
        lambda: replaced(b'"exit_status":0', b'"exit_status":' + LONG.encode()),
        "a number that is none of Concord's: 9999",
    ),
    "an exit status of 2**70": (lambda: replaced(b'"exit_status":0', b'"exit_status":%d' % 2**70), "a number"),
    "an effort of 1e308": (lambda: replaced(b'"effort":1.0', b'"effort":1e308'), "runs/1.jsonl, line 1: a number"),
    # names
    "a run called by 5,000 digits": (lambda: with_file(f"runs/{LONG}.jsonl", b""), "a bundle has no file of the name"),
    "a run called by 15 digits": (lambda: with_file(f"runs/{'9' * 15}.jsonl", b"x"), "nothing in the runs makes"),
    # TOML
    "a TOML integer of 5,000 digits": (
        lambda: of_runs(profile(PROFILE + f"timeout = {LONG}\n")),
        "a key or a value of 5,000",
    ),
    "a hexadecimal TOML integer of 100,000 digits": (
        lambda: of_runs(profile(PROFILE.replace('"known to be wrong"', "0x" + "f" * 100_000))),
        "profiles/made-up.toml:8: a key or a value of 100,002",
    ),
    "a dotted key of 20,000 parts": (lambda: of_runs(profile("a." * 20_000 + "a = 1\n")), "a key of more than 8 parts"),
    "a dotted header of 20,000 parts": (
        lambda: of_runs(profile("[" + "a." * 20_000 + "a]\n")),
        "a key of more than 8 parts",
    ),
    "a dotted key with spaces and quotes": (
        lambda: of_runs(profile("""'a' . "b" .\t""" * 10_000 + "a = 1\n")),
        "a key of more than 8 parts",
    ),
    "TOML nested 100,000 deep": (lambda: of_runs(profile("a = " + "[" * 100_000)), "nested more than 8 deep"),
    "TOML of inline tables": (lambda: of_runs(profile("a = " + "{a=" * 100_000)), "nested more than 8 deep"),
    "100,000 keys": (
        lambda: of_runs(profile("".join(f"a{i}=1\n" for i in range(100_000)))),
        "profiles of more than 512 KiB",
    ),
    "40,000 keys": (lambda: of_runs(profile("".join(f"a{i}=1\n" for i in range(39_999)))), "more than 12,000 keys"),
    "240,000 values": (lambda: of_runs(profile("a=[" + "1," * 240_000 + "]")), "more than 60,000 values"),
    "half a million empty lines": (lambda: of_runs(profile("\n" * 500_000)), "more than 40,000 lines"),
    "strings that never end": (lambda: of_runs(profile('a = """' + '\\"""' * 100_000)), "does not end"),
    # sizes and counts
    "511 MiB of NUL": (lambda: declared(511 << 20, 1 << 20), "511 MiB unpacked"),
    "64 MiB of NUL, said to be 80 KiB": (lambda: declared(80 << 10, 64 << 20), "is not as long as the zip file says"),
    "47 MiB of NUL": (lambda: with_file("report.html", bytes(47 << 20)), "is packed 1"),
    "4.8 million empty strings": (
        lambda: with_file("runs/1.jsonl", b'{"record":"collected","tests":[' + b'"",' * 4_800_000 + b'""]}\n'),
        "",
    ),
    "a million empty strings": (
        lambda: replaced(b'"arguments":["suites","-n","2"]', b'"arguments":[' + b'"",' * 999_999 + b'""]'),
        "more values than",
    ),
    "4.8 million empty strings in report.json": (
        lambda: with_file("report.json", b'{"problems":[' + b'"",' * 4_800_000 + b'""]}'),
        "",
    ),
    "8 million empty lines": (lambda: with_file("runs/1.jsonl", b"\n" * (8 << 20)), ""),
    "2 million empty lines": (
        lambda: with_file("runs/1.jsonl", _honest()["runs/1.jsonl"] + b" \r\n" * 700_000),
        "",
    ),
    "100,000 tests": (lambda: many_tests(100_000), ""),
    "19,000 tests": (lambda: many_tests(19_000), ""),
    "a hundred thousand collected": (
        lambda: of_runs(lambda made: made.insert(1, Collected([f"{i}" for i in range(100_000)]))),
        "more tests than",
    ),
    "30,000 requirements": (
        lambda: of_runs(
            lambda made: made.__setitem__(slice(1, 1), [RequirementText(id=i, sentence="s") for i in MANY])
        ),
        "more than 10,000 requirements",
    ),
    "30,000 requirements of a test": (
        lambda: of_runs(lambda made: setattr(made[-2], "requirements", MANY)),
        "more than 10,000 requirements",
    ),
    "JSON nested 100,000 deep": (lambda: with_file("runs/1.jsonl", b"[" * 60_000), "nested more than 32 deep"),
    "unknown JSON nested 100,000 deep": (
        lambda: replaced(b'"effort":1.0', b'"x":' + b'{"a":' * 99_999 + b"1" + b"}" * 99_999),
        "nested more than 32 deep",
    ),
    "a string that never ends": (
        lambda: with_file("runs/1.jsonl", b'{"record":"run","x":"' + b'\\"' * 2_000_000),
        "does not end",
    ),
    "a manifest of 100,000 files": (
        lambda: packed({MANIFEST: b'{"concord":"1","files":{' + b'"a":"",' * 99_999 + b'"a":""}}'}),
        "",
    ),
    # what becomes more on the page and in the report
    "300 tests of 300 requirements": (lambda: requirements_of_all(300, 300), "more tests of requirements"),
    "3,000 tests of 300 requirements": (lambda: requirements_of_all(3000, 300), ""),
    "200 waived tests and 2,000 globs": (lambda: globs(200, 2000), ""),
    "2,000 waived tests and 10,000 globs": (lambda: globs(2000, 10_000), ""),
    "12 MiB of ampersands": (lambda: of_runs(one_failure(headline="&" * (12 << 20))), ""),
    "12 MiB of half surrogates": (
        lambda: of_runs(one_failure(text="\u202e" * (4 << 20), headline="\U0001f600" + "x" * (8 << 20))),
        "",
    ),
    "evidence of 2,000 ranks": (
        lambda: of_runs(one_failure(ranks=[RankEvidence(rank=i, kind="x", text="&" * 5000) for i in range(2000)])),
        "",
    ),
    "100,000 ranks": (
        lambda: of_runs(one_failure(ranks=[RankEvidence(rank=i, kind="") for i in range(100_000)])),
        "",
    ),
    "an environment of 10 MiB that differs": (
        lambda: of_runs(header(environment={"torch": "x" * (10 << 20)})),
        "",
    ),
    "a name of 1 MiB with 50 requirements": (
        lambda: with_file(
            "runs/1.jsonl",
            written(
                records(
                    of=[*every_test(), TestResult(nodeid="n" * (1 << 20), verdict="failed", requirements=["a"] * 50)]
                )
            ),
        ),
        "",
    ),
    "3,000 failures of 20 requirements": (lambda: requirements_of_all(3000, 20), "more tests of requirements"),
    "60 runs": (
        lambda: packed({**_honest(), MANIFEST: b"", **{f"runs/{i}.jsonl": b"x" for i in range(1, 61)}}),
        "",
    ),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_bundle(worker: Worker, what: str) -> None:
    """A hostile bundle is answered in one clear line, within 5 seconds of CPU and 300 MiB of memory."""
    make, says = HOSTILE[what]
    cost = worker.cost(make())
    assert cost.wrong == ""
    assert says in cost.said


def test_honest_bundle(worker: Worker) -> None:
    """An honest bundle is not held for a hostile one."""
    found = _honest()
    assert worker.cost(packed({**found, MANIFEST: manifest_of(found, "0.1.0")})).said == "no problem"


def test_every_stage_is_reached() -> None:
    """The helpers make what they say: a run with another profile is read, and its report is made."""
    made = records()
    profile(PROFILE + "# more\n")(made)
    assert msgspec.json.encode(build([("a", written(made))]))
