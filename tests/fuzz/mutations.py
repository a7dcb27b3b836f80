"""Hostile inputs at random, with structure: each is an honest one that was changed in one or a few of its layers.

What lies above a change is made anew (digests, counts, the manifest, the zip file), so that the change gets as deep as
it can.  Everything follows from one :class:`random.Random`, so an input comes back from its seed.
"""

from __future__ import annotations

import functools
import hashlib
import json
import random
from collections.abc import Callable
from typing import Any

import msgspec
from invented import FILE, PROFILE, STARTED, every_test, records, written

from harness.bench.history.nights import dumps as night_of
from harness.bench.records import Fingerprint, Measurement, Night, Series
from harness.results import OptionGiven
from reports.archive import packed
from reports.bundle import MANIFEST, made, manifest_of

KINDS = (b"bundle ", b"profile", b"report ", b"night  ")
"""What an input begins with: what it is to be."""

NUMBERS = (
    *("0", "-0", "-1", "1e300", "-1e300", "1e308", "1e999", "-1e999", "1e-999", "NaN", "Infinity", "0.1e1", "1e99"),
    *("9" * 18, "9" * 19, "9" * 20, "9" * 5000, "-" + "9" * 5000, "0." + "9" * 5000, "1e" + "9" * 50, "7258118401"),
    *(str(2**31), str(2**63), str(2**64), str(-(2**63) - 1), "00", "1_0", "0x10", "+1", "1.", ".5", "true", "null"),
)
TEXTS = (
    *("", "\0", "\u202e", "\ufeff", "\U0001f600", "<script>alert(1)</script>", "&" * 500, "'\"", "{{ 7 * 7 }}", "%s%n"),
    *("../../etc/passwd", "*" * 300, "[" * 300, "?*" * 150, "runs/" + "9" * 5000 + ".jsonl", "9" * 5000, "a\nb\r\nc"),
    *("\x1b[2J\x1b]0;x\x07", "suites/dynamo/test_a.py::test_one[2ranks]", "passed", "waived", "hung", "L5", FILE),
    *("javascript:alert(1)", "https://[", "https://x/" + "a" * 3000, "2027-06-30", "9999-99-99", "unsupported: "),
)
COUNTS = (0, 1, 2, 10, 100, 1000, 10_000, 100_000, 1_000_000)
LARGEST = 20 << 20
"""Bytes that one change adds at most: what is looked for is small inputs that cost much."""
WEIGHTS = (4, 4, 4, 4, 4, 4, 2, 1, 0.2)


def hostile(seed: str) -> bytes:
    """An input: its kind, and what is to be checked."""
    r = random.Random(seed)
    kind = r.choices(KINDS, (14, 2, 2, 2))[0]
    if kind == KINDS[0]:
        return kind + bundle(r)
    if kind == KINDS[1]:
        return kind + toml(r).encode(errors="surrogatepass")
    if kind == KINDS[2]:
        return kind + json_text(r, honest()["report.json"])
    return kind + lines(r, night())


# bundles


@functools.cache
def honest() -> dict[str, bytes]:
    """A small bundle of two runs, without its manifest."""
    tests = every_test(("collectives", "replicate"))
    runs = [("a", written(records(of=tests))), ("b", written(records("12", drawn=True, of=tests, later=1000)))]
    return made(runs).files


def bundle(r: random.Random) -> bytes:
    """A bundle with something wrong in one or two of its layers."""
    files = dict(honest())
    signed = True
    for _ in range(r.choice((1, 1, 1, 2))):
        layer = r.choices(
            ("run", "amplified", "profile", "report", "member", "manifest", "zip"), (8, 3, 4, 2, 3, 1, 3)
        )[0]
        if layer == "run":
            name = r.choice(("runs/1.jsonl", "runs/2.jsonl"))
            files[name] = lines(r, files.get(name, b""))
        elif layer == "amplified":
            files["runs/1.jsonl"] = amplified(r)
        elif layer == "profile":
            files["runs/1.jsonl"] = with_profile(toml(r))
        elif layer == "report":
            name = r.choice(("report.json", "suite.json", "environment.json"))
            files[name] = json_text(r, files.get(name, b"{}"))
        elif layer == "member":
            files = members(r, files)
        elif layer == "manifest":
            files[MANIFEST] = json_text(r, manifest_of(files, "0.1.0"))
            signed = False
        else:
            files.setdefault(MANIFEST, manifest_of(files, "0.1.0"))
            return zipped(r, packed(files))
    if signed or MANIFEST not in files:
        files[MANIFEST] = manifest_of(files, "0.1.0")
    return packed(files)


def members(r: random.Random, files: dict[str, bytes]) -> dict[str, bytes]:
    """Files that come, go, or are others."""
    name = r.choice(sorted(files))
    what = r.randrange(6)
    if what == 0:
        return {n: d for n, d in files.items() if n != name}
    if what == 1:
        return {**files, name: r.randbytes(r.choice((0, 1, 1000, 100_000)))}
    if what == 2:
        return {**files, name: bytes([r.randrange(256)]) * count(r)}
    if what == 3:
        return {**files, **{f"runs/{i}.jsonl": files.get("runs/1.jsonl", b"") for i in range(min(count(r), 2000))}}
    other = r.choice(("runs/03.jsonl", "runs/9999.jsonl", "a" * 150, "x/" * 60 + "x", "RUNS/1.jsonl", *TEXTS))
    if what == 4:
        return {**files, ascii(other)[1:-1][:60_000] or "x": files[name]}
    return {(f"runs/{count(r)}.jsonl" if n == name else n): d for n, d in files.items()}


def zipped(r: random.Random, data: bytes) -> bytes:
    """A zip file with bytes of its own changed, mostly in its headers."""
    found = bytearray(data)
    for _ in range(r.choice((1, 1, 2, 5))):
        heads = [i for magic in (b"PK\1\2", b"PK\3\4", b"PK\5\6") for i in _all(found, magic)] or [0]
        at = r.choice(heads) + r.randrange(60) if r.random() < 0.8 else r.randrange(len(found) + 1)
        what = r.randrange(6)
        if what == 0:
            found[at : at + 1] = r.randbytes(1)
        elif what == 1:
            size = r.choice((2, 4))
            found[at : at + size] = r.choice((b"\0", b"\xff", b"\x7f", b"\1")) * size
        elif what == 2:
            found[at:at] = r.randbytes(r.randrange(1, 40))
        elif what == 3:
            del found[at : at + r.randrange(1, 40)]
        elif what == 4:
            found += r.choice((b"\0", bytes(found), b"PK\5\6" + bytes(18), r.randbytes(50)))
        else:
            del found[r.randrange(len(found) + 1) :]
        if not found:
            break
    return bytes(found)


def _all(data: bytearray, what: bytes) -> list[int]:
    found, at = [], data.find(what)
    while at >= 0:
        found.append(at)
        at = data.find(what, at + 1)
    return found


# JSON


def lines(r: random.Random, data: bytes) -> bytes:
    """JSON lines of which some are changed, with the digest in the last that belongs to them, mostly."""
    found = data.split(b"\n")[:-1]
    for _ in range(r.choice((1, 1, 1, 2, 4))):
        if not found:
            break
        at = r.randrange(len(found))
        what = r.choices(range(6), (10, 1, 1, 1, 1, 1))[0]
        if what == 0:
            found[at] = json_text(r, found[at])
        elif what == 1:
            del found[at]
        elif what == 2:
            found[at:at] = [found[at]] * min(count(r), 5000, LARGEST // (1 + len(found[at])))
        elif what == 3:
            found[at] = found[at][: r.randrange(len(found[at]) + 1)]
        elif what == 4:
            found[at:at] = [r.choice((b"", b" ", b"\r", b"{}", b"[]", b"null", b"\xff"))] * count(r)
        else:
            found.insert(at, found.pop(r.randrange(len(found))))
    if found and r.random() < 0.8 and b'"digest":"' in found[-1]:
        digest = hashlib.sha256(b"".join(line + b"\n" for line in found[:-1])).hexdigest().encode()
        begin = found[-1].index(b'"digest":"') + 10
        found[-1] = found[-1][:begin] + digest + found[-1][begin + 64 :]
    return b"\n".join(found) + r.choice((b"\n", b"\n", b"\n", b""))


def json_text(r: random.Random, data: bytes) -> bytes:
    """A JSON text with one or some of its values changed, each to something that its place may have or not."""
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):  # changed once before
        return data
    raw: list[bytes] = []
    holder = [tree]
    for _ in range(r.choice((1, 1, 2, 3))):
        places = list(_places(holder))
        where, key = r.choice(places)
        where[key] = changed(r, where[key], raw)
        if isinstance(where, dict) and r.random() < 0.1:
            where[r.choice(TEXTS)] = where.pop(key)
    text = json.dumps(holder[0], separators=(",", ":"), ensure_ascii=r.random() < 0.5)
    found = text.encode(errors="surrogatepass")
    for i, each in enumerate(raw):
        found = found.replace(b'"@%d@"' % i, each)
    return found


def _places(value: Any) -> Any:
    stack = [value]
    while stack:
        found = stack.pop()
        for key in list(found) if isinstance(found, dict) else range(len(found)):
            yield found, key
            if isinstance(found[key], dict | list):
                stack.append(found[key])


def changed(r: random.Random, value: Any, raw: list[bytes]) -> Any:
    """Something else than a value; ``raw``: JSON that Python would not write, which takes the place of ``"@N@"``."""

    def written_as(text: bytes) -> str:
        raw.append(text)
        return f"@{len(raw) - 1}@"

    what = r.randrange(9)
    if what <= 2 and isinstance(value, int | float) and not isinstance(value, bool):
        return written_as(r.choice(NUMBERS).encode())
    if what == 0:
        return r.choice(TEXTS)
    if what == 1:
        return r.choice(TEXTS) * r.choice((1, 10, 1000))
    if what == 2:
        return written_as(r.choice(NUMBERS).encode())
    if what == 3:
        n = count(r)
        return written_as(r.choice((b"[", b'{"a":')) * n + r.choice((b"", b"1" + b"]" * n)))
    if what == 4:
        item = r.choice((b'""', b"{}", b"[]", b"0", b'"\\u0000"', b'"abc"', b"null"))
        return written_as(b"[" + b",".join([item] * count(r)) + b"]")
    if what == 5 and isinstance(value, list) and value:
        return value * min(count(r), 3000)
    if what == 6 and isinstance(value, dict):
        return {**value, **{f"k{i}": r.choice(("", 0, "x" * 50)) for i in range(min(count(r), 20_000))}}
    if what == 7:
        return r.choice(({}, [], None, True, "", 0))
    if isinstance(value, str):
        at = r.randrange(len(value) + 1)
        return value[:at] + r.choice(TEXTS) + value[at:]
    return written_as(
        b'"' + r.choice((b"\\", b"\\u", b"\\ud800", b"\\ud800\\ud800", b"\xff", b"\\x", b"a")) * min(count(r), 10_000)
    )


def amplified(r: random.Random) -> bytes:
    """A run with much of something, of which a report or a page may have even more."""
    tests = [msgspec.structs.replace(t) for t in every_test(("collectives", "replicate"))]
    bad = tests[0]
    bad.verdict, bad.headline = r.choice(("failed", "hung", "crashed")), text(r)
    many = min(count(r), 60_000)
    what = r.randrange(8)
    if what == 0:
        tests += [msgspec.structs.replace(bad, nodeid=f"{i}{text(r) if many < 300 else ''}") for i in range(many)]
    elif what == 1:
        bad.ranks = bad.ranks + [
            msgspec.structs.replace(e, text=text(r), output=text(r)) for e in evidence(min(many, 5000))
        ]
    elif what == 2:
        bad.requirements = [f"A-{i}" for i in range(many)]
    elif what == 3:
        bad.ranks = [msgspec.structs.replace(e, collectives=["x"] * many) for e in evidence(3)]
    elif what == 4:
        bad.nodeid, bad.requirements = "n" * many, [f"A-{i}" for i in range(r.choice((1, 10, 100)))]
    elif what == 5:
        for test in tests:
            test.text, test.reason, test.requirements = text(r) * 10, text(r), [*test.requirements, *("BC" * 9)]
            test.verdict = "failed"
    made = records(of=tests)
    if what == 6:
        made[0].environment = {f"k{i}": text(r) if many < 1000 else "v" for i in range(many)}
        made[-1].left_out = [OptionGiven(text(r))] * min(many, 50)
    elif what == 7:
        for record in made:
            if type(record).__name__ == "ProfileText":
                globs = ["*".join(r.choice("ab") * 5 for _ in range(9)) + str(i) for i in range(many)]
                record.waivers[0].tests = globs
                record.waivers *= r.choice((1, 10))
        for test in tests:
            test.verdict, test.waiver, test.bare = "waived", f"{FILE}:5", "failed"
    return written(made)


def evidence(ranks: int) -> list[Any]:
    """What ranks say of a failure."""
    from harness.results import RankEvidence

    return [RankEvidence(rank=i, kind="raised", what="x", text="t", stack="s", output="o") for i in range(ranks)]


def text(r: random.Random) -> str:
    """A text of any length, of characters that pages write as one or several."""
    return r.choice(("a", "&", "\0", "\u202e", "\U0001f600", "<b>\n", "\x7f")) * min(count(r), 100_000)


def count(r: random.Random) -> int:
    """How many: mostly few, now and then very many."""
    most = r.choices(COUNTS, WEIGHTS)[0]
    return r.choice((most, most, r.randrange(most + 1)))


# TOML


def with_profile(found: str) -> bytes:
    """A run that goes by a profile with this text."""
    made = records(of=every_test(("collectives", "replicate")))
    made[0].profile_hash = hashlib.sha256(found.encode(errors="surrogatepass")).hexdigest()
    for record in made:
        if type(record).__name__ == "ProfileText":
            record.texts = {FILE: found.encode(errors="replace").decode()}
    return written(made)


def toml(r: random.Random) -> str:
    """A text near TOML: an honest profile with a piece put in, or statements out of the grammar."""
    if r.random() < 0.5:
        text_ = PROFILE
        for _ in range(r.choice((1, 1, 2, 5))):
            at = r.randrange(len(text_) + 1)
            text_ = text_[:at] + piece(r) + text_[at + r.choice((0, 0, 1, 20)) :]
        return text_
    return r.choice((PROFILE, "")) + "".join(statement(r) for _ in range(min(count(r), 3000)))


def statement(r: random.Random) -> str:
    """A header or a key with its value."""
    what = r.randrange(4)
    if what == 0:
        return f"[{key(r)}]\n"
    if what == 1:
        return f"[[{r.choice(('waiver', 'intermittent', key(r)))}]]\n"
    return f"{key(r)} = {value(r, 0)}\n"


def key(r: random.Random) -> str:
    known = (
        "name",
        "waiver",
        "tests",
        "reason",
        "tolerance",
        "world_sizes",
        "a",
        '"b c"',
        "''",
        f"k{r.randrange(1000)}",
    )
    return ".".join(r.choice(known) for _ in range(r.choice((1, 1, 1, 2, 3, 8, 9))))


def value(r: random.Random, depth: int) -> str:
    """A value, or what is nearly one."""
    what = r.randrange(8)
    if what == 0:
        return r.choice(("inf", "nan", "0x" + "f" * 100, "1979-05-27T07:32:00Z", "2027-06-30", "0001-01-01", *NUMBERS))
    if what <= 2:
        quote = r.choice(('"', "'", '"""', "'''"))
        return quote + r.choice(TEXTS) + quote
    if depth < 12 and what <= 4:
        return "[" + ", ".join(value(r, depth + 1) for _ in range(r.randrange(5))) + "]"
    if depth < 12 and what == 5:
        return "{" + ", ".join(f"{key(r)} = {value(r, depth + 1)}" for _ in range(r.randrange(4))) + "}"
    return r.choice(('["suites/*"]', "1", "1.5", "true", "[1, 2]", '"failed"'))


def piece(r: random.Random) -> str:
    """Something to put anywhere."""
    made: tuple[Callable[[], str], ...] = (
        lambda: statement(r),
        lambda: (
            r.choice(("[", "{", "a.", '"', "'", '"""', "'''", "\n", "#", "=", ",", "\\", " ", "\t", "\r")) * count(r)
        ),
        lambda: (
            r.choice(('"\\"', '\\"""', "''' '", "[[a]]\n", "a=1\n", "[a]\n", "{a=", "[a.", "1,", "'a' . ")) * count(r)
        ),
        lambda: r.choice(NUMBERS),
        lambda: r.choice(TEXTS) * r.choice((1, 1, 100)),
    )
    return r.choice(made)()


# nights


@functools.cache
def night() -> bytes:
    """A small file of a night."""
    return night_of(
        Night(
            id="n",
            started=STARTED,
            fingerprint=Fingerprint(machine=(("cpu", "x"),)),
            measurements=[
                Measurement(
                    series=Series(operation="all_reduce", bytes=8, world=2, variant=(("a", "b"),)),
                    samples=[[[0.1, 0.2]]],
                ),
                Measurement(
                    series=Series(operation="step.x", metric="bytes"), samples=[[[1.0]], [[2.0]]], started=STARTED
                ),
            ],
        )
    )
