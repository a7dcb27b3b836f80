"""``concord challenge`` and ``concord verify --challenge``: a seed that nobody can have tried out before."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from invented import STARTED, Change, checkout, records, written
from typer.testing import CliRunner

from harness.commands.main import app
from harness.results import Challenge, ChallengeError, RunHeader
from harness.results.challenge import LARGEST, SLACK, decode, encode, new
from reports import bundle
from reports.bundle import MANIFEST, manifest_of, packed
from reports.challenge import told
from reports.verify import Checked, verify

NOW = STARTED + 86400
MADE = Challenge(nonce="ab" * 32, made=int(STARTED) + 900, audience="a customer, of the made-up backend")
"""Made after the first run, and 100 s before the second began."""
OTHER = msgspec.structs.replace(MADE, nonce="cd" * 32)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(bundle, "page", lambda report: "no page")
    return tmp_path / "x.zip"


def answering(made_earlier: Challenge = MADE, **fields: Any) -> Change:
    """Makes a run one that answers a challenge, but for some fields of its first line."""

    def apply(made: list[Any]) -> None:
        header: RunHeader = made[0]
        header.arguments = ["suites", "-n", "2", "--concord-challenge", "mine.challenge"]
        header.seed, header.seed_drawn, header.challenge = made_earlier.seed, True, made_earlier
        for name, value in fields.items():
            setattr(header, name, value)

    return apply


def bundled(path: Path, change: Change | None = None, first: Change | None = None) -> Path:
    """Write a bundle of a run with the default seed and one with a drawn seed, which is changed."""
    files = []
    for name, made, apply in (
        ("first", records(), first),
        ("second", records("123", drawn=True, later=1000), change),
    ):
        if apply is not None:
            apply(made)
        files.append((name, written(made)))
    found = bundle.made(files).files
    path.write_bytes(packed({**found, MANIFEST: manifest_of(found, "0.1.0")}))
    return path


def checked(path: Path, challenge: Challenge | None = MADE) -> Checked:
    return verify(path, "0.1.0", checkout(), NOW, challenge=challenge)


def test_answered(path: Path) -> None:
    """A run whose seed follows from the challenge, and that began later, is what it says, and is a random one."""
    found = checked(bundled(path, answering()))
    assert (found.problems, found.unchecked, found.notes) == ((), (), ())
    assert found.report is not None
    assert found.report.conformant == "L5"
    first, second = told(found.runs, MADE)
    assert first.startswith("runs/1.jsonl: has the seed default, of which it says nothing; it began 15 min 00 s before")
    assert second.startswith(f"runs/2.jsonl: answers it with the seed {MADE.seed}; it began 1 min 40 s after the chall")
    assert second.endswith("and ended 1 min 40 s later")


def test_nobody_asked(path: Path) -> None:
    """Whoever verifies without the challenge sees at least that the seed follows from the one in the results."""
    assert checked(bundled(path, answering()), None).problems == ()


def test_seed() -> None:
    """The seed can be computed with sha256sum, as the documentation says."""
    text = f"{MADE.nonce} {MADE.made} {MADE.audience}".encode()
    assert MADE.seed == str(int(hashlib.sha256(text).hexdigest()[:8], 16))
    assert OTHER.seed != MADE.seed
    assert msgspec.structs.replace(MADE, made=MADE.made + 1).seed != MADE.seed
    assert msgspec.structs.replace(MADE, audience="").seed != MADE.seed


FORGED: dict[str, tuple[Change | None, str]] = {
    "no-answer": (None, "no run answers the challenge that was made on 2027-01-15"),
    "another-challenge": (answering(OTHER), "no run answers the challenge that was made on 2027-01-15"),
    "chosen-seed": (answering(seed="123"), f"its seed is 123, but from its challenge follows {MADE.seed}"),
    "not-drawn": (answering(seed_drawn=False), f"its seed is {MADE.seed}, but from its challenge follows {MADE.seed}"),
    "before-it": (
        answering(msgspec.structs.replace(MADE, made=int(STARTED) + 1000 + SLACK + 1)),
        "it began before its challenge was made",
    ),
    "not-asked-for": (
        answering(arguments=["suites", "-n", "2", "--concord-seed", "random"]),
        "it has a challenge, but its arguments do not ask for one",
    ),
    "not-recorded": (
        answering(challenge=None),
        "--concord-challenge is among its arguments, but it has no challenge",
    ),
    "two-seeds": (
        answering(arguments=["suites", "-n", "2", "--concord-challenge", "x", "--concord-seed", "5"]),
        "--concord-seed is among its arguments beside --concord-challenge",
    ),
    "a-seed-of-hypothesis": (
        answering(arguments=["suites", "-n", "2", "--concord-challenge", "x", "--hypothesis-seed=5"]),
        "--hypothesis-seed is among its arguments beside --concord-challenge",
    ),
}


@pytest.mark.parametrize(("change", "says"), FORGED.values(), ids=FORGED)
def test_forged(path: Path, change: Change | None, says: str) -> None:
    """A seed of one's own choice is found, and no level is conformant."""
    found = checked(bundled(path, change))
    assert any(says in problem for problem in found.problems), found.problems
    assert found.report is not None
    assert found.report.conformant == ""


def test_a_clock_that_is_a_little_slow(path: Path) -> None:
    """A minute is what clocks of two machines may differ by."""
    late = msgspec.structs.replace(MADE, made=int(STARTED) + 1000 + SLACK)
    assert checked(bundled(path, answering(late)), late).problems == ()


def test_a_run_beside_it(path: Path) -> None:
    """A run that answers, beside one with a seed of its maker's own, does not vouch for that one."""

    def drawn(made: list[Any]) -> None:
        made[0].arguments = [*made[0].arguments, "--concord-seed", "random"]
        made[0].seed, made[0].seed_drawn = "7", True

    problems = checked(bundled(path, answering(), drawn)).problems
    assert "runs/1.jsonl: its seed 7 was drawn by whoever ran it, not by the challenge" in problems
    problems = checked(bundled(path, answering(), answering(OTHER))).problems
    assert any(line.startswith("runs/1.jsonl: answers another challenge, made on") for line in problems)


def command(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


def test_commands(tmp_path: Path, path: Path) -> None:
    """A challenge is made, differs from every other, and is what a bundle is held against."""
    file = tmp_path / "mine.challenge"
    assert command("challenge", "-o", str(file), "--for", MADE.audience)[0] == 0
    one = decode(file.read_bytes())
    two = json.loads(command("challenge")[1])
    assert (one.audience, len(one.nonce)) == (MADE.audience, 64)
    assert one.nonce != two["nonce"]
    code, said = command("verify", str(bundled(path, answering())), "--no-suite", "--challenge", str(file))
    assert (code, "WRONG     no run answers the challenge" in said) == (1, True)
    file.write_bytes(encode(MADE))
    code, said = command("verify", str(path), "--no-suite", "--challenge", str(file))
    assert f"challenge runs/2.jsonl: answers it with the seed {MADE.seed}" in said
    assert "no run answers" not in said


HOSTILE: dict[str, bytes] = {
    "empty": b"",
    "garbage": b"\0\xff\x1b[31m",
    "deep": b"[" * 4000,
    "huge": b" " * (LARGEST + 1),
    "list": b"[]",
    "another-file": b'{"schema":"concord.report","version":1}',
    "newer": b'{"schema":"concord.challenge","version":2,"nonce":"' + b"a" * 64 + b'","made":1}',
    "short": b'{"nonce":"abc","made":1}',
    "newline": b'{"nonce":"' + b"a" * 63 + b'\\n","made":1}',
    "upper": b'{"nonce":"' + b"A" * 64 + b'","made":1}',
    "no-time": b'{"nonce":"' + b"a" * 64 + b'"}',
    "year-9999": b'{"nonce":"' + b"a" * 64 + b'","made":253370764800}',
    "negative": b'{"nonce":"' + b"a" * 64 + b'","made":-1}',
    "more": b'{"nonce":"' + b"a" * 64 + b'","made":1,"seed":"7"}',
    "escapes": b'{"nonce":"' + b"a" * 64 + b'","made":1,"audience":"\\u001b[31m"}',
    "half": b'{"nonce":"' + b"a" * 64 + b'","made":1,"audience":"\\ud800"}',
    "lines": b'{"nonce":"' + b"a" * 64 + b'","made":1,"audience":"a\\nb"}',
    "long": b'{"nonce":"' + b"a" * 64 + b'","made":1,"audience":"' + b"x" * 201 + b'"}',
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_no_challenge(tmp_path: Path, path: Path, data: bytes) -> None:
    """What is no challenge is one line, and nothing is checked against it."""
    with pytest.raises(ChallengeError, match="not a challenge"):
        decode(data)
    (tmp_path / "x").write_bytes(data)
    code, said = command("verify", str(bundled(path)), "--challenge", str(tmp_path / "x"))
    assert (code, len(said.strip().splitlines()), "\x1b" in said) == (2, 1, False), said


@pytest.mark.parametrize("audience", ["a\nb", "\x1b[31m", "x" * 201, "\u202e"])
def test_no_audience(audience: str) -> None:
    """For whom a challenge is, is one line that can be read."""
    with pytest.raises(ChallengeError, match="one line of at most 200 visible"):
        new(audience, 0)
    assert command("challenge", "--for", audience)[0] == 2


def test_what_cannot_be_written(tmp_path: Path) -> None:
    """A folder in place of the file is one line."""
    code, said = command("challenge", "-o", str(tmp_path))
    assert (code, "Is a directory" in said) == (2, True)


@pytest.mark.parametrize("make", [lambda at: at / "none", lambda at: at], ids=["none", "folder"])
def test_no_file(tmp_path: Path, path: Path, make: Callable[[Path], Path]) -> None:
    """A challenge that is not there is one line."""
    code, said = command("verify", str(bundled(path)), "--challenge", str(make(tmp_path)))
    assert (code, len(said.strip().splitlines())) == (2, 1)
