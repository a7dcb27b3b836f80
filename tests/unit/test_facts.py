"""What is told about tests and runs: dtypes, reproducers, what was left out, seeds, suite hash, environment."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.plugin.facts import dtype_of, merge, reproducer_in, selection
from harness.plugin.seeds import Seeds
from harness.provenance import driver_version, environment, suite_files, suite_hash
from harness.reproducers import Written, attach, carried
from harness.results import Challenge, Deselected, LeftOut, MaybeLeftOut, NotCollected, OnlySome, OptionGiven
from harness.results.challenge import encode

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({}, ""),
        ({"dtype": torch.float16}, "float16"),
        ({"dtype": "bfloat16", "op": "SUM"}, "bfloat16"),
        ({"x": torch.float8_e4m3fn}, "float8_e4m3fn"),
        ({"dtype": "torch.int64"}, "int64"),
        ({"a": torch.float16, "b": torch.float32}, ""),
        ({"op": "bool"}, ""),
        ({"dtype": "no dtype"}, ""),
        ({"world": object()}, ""),
        ({"timed": SimpleNamespace(collective="all_reduce", dtype=torch.int8, op="SUM")}, "int8"),
    ],
)
def test_dtype(parameters: dict[str, Any], expected: str) -> None:
    """A test has a dtype if exactly one is among its parameters."""
    assert dtype_of(parameters) == expected


def carrying(*reproducers: Written) -> Exception:
    error = ValueError("no")
    for written in reproducers:
        attach(error, written)
    return error


def test_reproducer(tmp_path: Path) -> None:
    """A failure carries its reproducer, also where Hypothesis has made a group of failures; notes say nothing."""
    file = tmp_path / "in a\nfolder" / "repro_x.py"
    file.parent.mkdir()
    file.write_text("print(1)")
    written = Written(file, f"torchrun --nproc-per-node=2 '{file}'")
    other = Written(tmp_path / "repro_y.py", "torchrun repro_y.py")
    for error in (carrying(written, other), ExceptionGroup("two", [carrying(), carrying(written)])):
        error.add_note("reproducer, which needs only torch: torchrun repro_z.py")
        found = reproducer_in(error)
        assert found is not None
        assert (found.file, found.command, found.text) == ("repro_x.py", written.command, "print(1)")
    assert list(carried(carrying(written, other))) == [written, other]
    file.unlink()
    gone = reproducer_in(carrying(written))
    assert gone is not None
    assert (gone.command, gone.text) == (written.command, "")


def test_no_reproducer() -> None:
    """A failure that carries none has none, whatever its notes and attributes say."""
    error = carrying()
    error.add_note("reproducer, which needs only torch: torchrun repro_z.py")
    assert reproducer_in(error) is None
    error.concord_reproducers = ("torchrun repro_z.py",)  # type: ignore[attr-defined]
    assert reproducer_in(error) is None


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for stack in ("collectives", "replicate"):
        (tmp_path / "suites" / stack).mkdir(parents=True)
        (tmp_path / "suites" / stack / "test_a.py").write_text("1")
    return tmp_path


IDS = ["suites/collectives/test_a.py::test_x", "suites/replicate/test_a.py::test_x"]


@pytest.mark.parametrize(
    ("arguments", "options", "left_out", "whole", "reasons"),
    [
        (["suites"], {}, [], ["collectives", "replicate"], []),
        (["."], {}, [], ["collectives", "replicate"], []),
        (["suites/collectives", "suites/replicate/test_a.py"], {}, [], ["collectives"], [OnlySome(("replicate",))]),
        (["suites/collectives/test_a.py", "suites/replicate"], {}, [], ["replicate"], [OnlySome(("collectives",))]),
        (["suites/collectives/test_a.py::test_x"], {}, [], [], [OnlySome(("collectives", "replicate"))]),
        (["suites"], {"keyword": "x"}, [Deselected()], [], [OptionGiven("-k")]),
        (["suites"], {"keyword": "x"}, [NotCollected()], [], [OptionGiven("-k"), NotCollected()]),
        (["suites"], {"lf": True}, [], [], [OptionGiven("--lf")]),
        (["suites"], {}, [Deselected()], [], [Deselected()]),
        (["suites"], {}, [NotCollected()], [], [NotCollected()]),
        (["suites"], {}, [Deselected(), NotCollected()], [], [Deselected(), NotCollected()]),
        (["suites"], {}, [MaybeLeftOut()], [], [MaybeLeftOut()]),
        (["suites"], {}, [MaybeLeftOut(), NotCollected()], [], [NotCollected()]),
        (["suites"], {"keyword": "x"}, [MaybeLeftOut()], [], [OptionGiven("-k")]),
    ],
    ids=str,
)
def test_selection(
    root: Path,
    arguments: list[str],
    options: dict[str, Any],
    left_out: list[LeftOut],
    whole: list[str],
    reasons: list[LeftOut],
) -> None:
    """A stack is whole if all of its folder was requested and nothing was left out; each other reason is kept apart."""
    config: Any = SimpleNamespace(
        rootpath=root,
        args=arguments,
        invocation_params=SimpleNamespace(dir=root),
        getoption=lambda name, default: options.get(name, default),
    )
    assert selection(config, IDS, left_out) == (whole, reasons)


def seeds(asked: str = "default", **other: Any) -> Seeds:
    manager = SimpleNamespace(hasplugin=lambda name: other.get("thorough", False))
    options = {"concord_seed": asked, "hypothesis_seed": other.get("hypothesis")}
    options["concord_challenge"] = other.get("challenge")
    invocation = SimpleNamespace(dir=other.get("folder", ROOT))
    config: Any = SimpleNamespace(
        getoption=lambda name, default=None: options[name], pluginmanager=manager, invocation_params=invocation
    )
    if "sent" in other:
        config.workerinput = {"concord_seed": other["sent"]}
    return Seeds(config)


def test_seeds() -> None:
    """What a run's seed is, and whether anyone has chosen it."""
    assert (seeds().seed, seeds().drawn) == ("default", False)
    assert (seeds("7").seed, seeds("7").drawn) == ("7", False)
    one, two = seeds("random"), seeds("random")
    assert one.drawn
    assert one.seed != two.seed
    assert (seeds("random", sent="12").seed, seeds("random", sent="12").drawn) == ("12", True)
    assert (seeds(hypothesis=5).seed, seeds(hypothesis=5).drawn) == ("5", False)
    assert seeds(thorough=True).seed == seeds("free").seed == "free"


CHALLENGE = Challenge(nonce="ab" * 32, made=1_800_000_000, audience="a customer")


@pytest.fixture
def challenged(monkeypatch: pytest.MonkeyPatch) -> str:
    """The text of a challenge that was made a moment ago."""
    monkeypatch.setattr("harness.plugin.seeds.time.time", lambda: CHALLENGE.made + 1.0)
    return encode(CHALLENGE).decode()


def test_challenge(challenged: str, tmp_path: Path) -> None:
    """A challenge, as a text or in a file, gives the seed, which counts as drawn."""
    (tmp_path / "mine").write_text(challenged)
    for made in (seeds(challenge=challenged), seeds(challenge="mine", folder=tmp_path)):
        assert (made.seed, made.drawn, made.challenge) == (CHALLENGE.seed, True, CHALLENGE)
        assert made.pytest_report_header() == f"concord: seed {CHALLENGE.seed}, from the challenge for a customer"
    assert seeds(challenge="none", sent="5").seed == "5"  # a worker of pytest-xdist reads no file


@pytest.mark.parametrize(
    ("asked", "other", "says"),
    [
        ("random", {}, "--concord-challenge and --concord-seed random: a challenge gives the seed"),
        ("7", {"hypothesis": 5}, "--concord-challenge and --concord-seed 7"),
        ("default", {"hypothesis": 5}, "--concord-challenge and --hypothesis-seed 5"),
        ("default", {"thorough": True}, "--concord-challenge and a thorough run"),
    ],
)
def test_challenge_and_another_seed(challenged: str, asked: str, other: dict[str, Any], says: str) -> None:
    """Nobody chooses a seed beside the challenge's."""
    with pytest.raises(pytest.UsageError, match=says):
        seeds(asked, challenge=challenged, **other)


@pytest.mark.parametrize("bad", ["none", "{", "{}", "[1]", "a\0b", '{"nonce": "x"}'])
def test_bad_challenge(challenged: str, tmp_path: Path, bad: str) -> None:
    """What is no challenge ends the session before it begins, with one line."""
    with pytest.raises(pytest.UsageError, match="--concord-challenge: ") as caught:
        seeds(challenge=bad, folder=tmp_path)
    assert "\n" not in str(caught.value)


def test_challenge_of_tomorrow(challenged: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock by which the run would begin before its challenge was made is noticed before the run."""
    monkeypatch.setattr("harness.plugin.seeds.time.time", lambda: CHALLENGE.made - 100.0)
    with pytest.raises(pytest.UsageError, match="made 100 s from now by this machine's clock; set the clock"):
        seeds(challenge=challenged)


def test_challenge_in_a_variable(challenged: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A challenge that results would not show, because it seems to be a credential, is refused before the run."""
    secret = msgspec.structs.replace(CHALLENGE, nonce="0123456789abcdef" * 4)  # it is remembered for good
    monkeypatch.setenv("THE_CHALLENGE", secret.nonce)
    with pytest.raises(pytest.UsageError, match="a part of it is in a variable that results do not show"):
        seeds(challenge=encode(secret).decode())


@pytest.mark.parametrize("bad", ["", "-1", "1.5", "randm", str(2**32), "\N{SUPERSCRIPT TWO}"], ids=ascii)
def test_bad_seed(bad: str) -> None:
    """What is no seed is refused, with what there is."""
    with pytest.raises(pytest.UsageError, match="default, random, free, or a whole number"):
        seeds(bad)


def test_two_seeds() -> None:
    """Hypothesis's own option beside ours is one too many."""
    with pytest.raises(pytest.UsageError, match="give one of them"):
        seeds("3", hypothesis=3)


def drawn_under(seed: str, nodeid: str = IDS[0]) -> list[int]:
    drawn: list[int] = []

    @settings(max_examples=5, database=None, derandomize=False)  # what CI runs is derandomized by default
    @given(st.integers(0, 10**9))
    def test(x: int) -> None:
        drawn.append(x)

    marks: list[str] = []
    item: Any = SimpleNamespace(obj=test, nodeid=nodeid, add_marker=marks.append)
    seeds(seed).pytest_collection_modifyitems([item])
    assert marks == (["property_based"] if nodeid.startswith("suites/") else [])
    test()
    return drawn


@pytest.mark.parametrize("seed", ["default", "7"])
def test_same_examples_again(seed: str) -> None:
    """A seed draws the same examples in every run."""
    assert drawn_under(seed) == drawn_under(seed)


def test_other_seed_other_examples() -> None:
    """Another seed draws others."""
    assert len({tuple(drawn_under(seed)) for seed in ("default", "7", "8")}) == 3


def test_others_are_left_alone() -> None:
    """A property that is not of a suite draws as its author wants."""
    assert drawn_under("7", "tests/test_a.py::test") != drawn_under("7", "tests/test_a.py::test")


def test_suite_hash(root: Path) -> None:
    """It changes with a file of a suite, its name, and a shared fixture; not with notes, profiles or samples."""
    before = suite_hash(root)
    for name in ("suites/README.md", "fixtures/profiles/x.toml", "fixtures/vendor/x.py", "suites/.cache/x.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x")
    assert suite_hash(root) == before
    seen = {before}
    for name in ("suites/collectives/test_a.py", "suites/collectives/test_b.py", "fixtures/models.py"):
        (root / name).write_text("2")
        seen.add(suite_hash(root))
    assert len(seen) == 4


def test_suite_hash_is_that_of_sha256sum(root: Path) -> None:
    """It is the hash of what ``sha256sum`` writes for the files, in the order of their names."""
    lines = [f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {name}\n" for name, p in suite_files(root).items()]
    assert hashlib.sha256("".join(lines).encode()).hexdigest() == suite_hash(root)
    names = list(suite_files(root))
    assert names == sorted(names)
    assert "harness/oracles/collectives.py" in names
    assert not [name for name in names if name.startswith(("harness/audit", "harness/commands"))]


def test_no_suite(tmp_path: Path) -> None:
    """A folder without suites has no hash."""
    assert suite_hash(tmp_path) == ""


def test_environment() -> None:
    """Versions, machine, and variables that matter; no other variable, and no secret."""
    given = {"NCCL_DEBUG": "INFO", "CUDA_VISIBLE_DEVICES": "0", "HOME": "/x", "TORCH_API_KEY": "s", "NCCL_TOKEN": "s"}
    found = environment(given)
    assert {"python", "platform", "cpu", "cores", "torch", "torch commit"} <= set(found)
    variables = {k.removeprefix("variable "): v for k, v in found.items() if k.startswith("variable ")}
    assert variables == {"NCCL_DEBUG": "INFO", "CUDA_VISIBLE_DEVICES": "0"}


def test_merge() -> None:
    """What processes of a run know of their ranks is kept part by part; of other facts, the last is."""
    known: dict[str, str] = {}
    merge(known, {"torch": "2.13.0", "rank network": "private", "rank interfaces": "host 2: eth0"})
    merge(known, {"torch": "2.14.0", "rank network": "host: asked for; private"})
    merge(known, {"rank interfaces": "host 1: eth0; host 2: eth0"})
    assert known == {
        "torch": "2.14.0",
        "rank network": "host: asked for; private",
        "rank interfaces": "host 1: eth0; host 2: eth0",
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (root@build)\n"
            "GCC version:  gcc version 13.3.0 (Ubuntu 13.3.0-6)\n",
            "580.159.04",
            id="open",
        ),
        pytest.param(
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n",
            "535.104.05",
            id="proprietary",
        ),
        pytest.param("NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  590.1  \n", "590.1", id="two-numbers"),
        pytest.param("something else 1.2\n", "", id="none"),
        pytest.param("", "", id="empty"),
    ],
)
def test_version_of_a_driver(text: str, expected: str) -> None:
    """The number of an architecture is no version."""
    assert driver_version(text) == expected
