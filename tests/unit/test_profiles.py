"""Profiles: what is read from a good file, and what is said of a bad one."""

from __future__ import annotations

import datetime
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st

from harness.devices import Inventory
from harness.plugin.profiles import Profiles
from harness.plugin.waivers import Conditions, listed, review
from harness.profiles import KEYS, Condition, Mistake, Platform, Profile, ProfileError, Waiver, parse, read
from harness.profiles.recorded import as_recorded
from harness.profiles.shelf import Shelf
from harness.profiles.toml_lines import lines_of

ROOT = Path(__file__).parents[2]

HEAD = 'name = "cpu-gloo"\nbackend = "gloo"\ndevice = "cpu"\n'
WAIVER = """[[waiver]]
tests = ["suites/*"]
reason = "wrong sums"
link = "https://example.com/1"
expires = 2027-06-30
"""
NOW_AND_THEN = WAIVER.replace("waiver", "intermittent") + 'verdicts = ["passed", "hung"]\n'


def mistakes(text: str) -> list[str]:
    """What is said of a bad file, a line each."""
    with pytest.raises(ProfileError) as caught:
        parse(text, "p.toml")
    return str(caught.value).split("\n")


def mistakes_if_any(text: str) -> tuple[Mistake, ...]:
    """What is wrong with a file that may be a good one."""
    try:
        parse(text, "p.toml")
    except ProfileError as e:
        return e.mistakes
    return ()


def mistake(text: str) -> str:
    """What is said of a file with one mistake."""
    (found,) = mistakes(text)
    return found


class TestGoodFiles:
    @pytest.mark.parametrize("path", sorted((ROOT / "fixtures/profiles").glob("*.toml")), ids=lambda path: path.stem)
    def test_shipped(self, path: Path) -> None:
        """Every shipped profile can be read, and is called as its file is."""
        assert Shelf(ROOT).read(path).name == path.stem

    def test_head(self) -> None:
        """Three keys are enough; the rest has defaults."""
        assert parse(HEAD, "p.toml") == Profile("cpu-gloo", "gloo", "cpu", file="p.toml")

    def test_every_key(self) -> None:
        """Every key of the head arrives."""
        text = HEAD + (
            'about = "gloo ✓"\nworld_sizes = [1, 4]\nranks_per_device = 8\nwarm = true\ntimeout = 5\n'
            'imports = ["a.b"]\n[env]\nB = "2"\nA = ""\n'
        )
        found = parse(text, "p.toml")
        assert (found.about, found.world_sizes, found.ranks_per_device) == ("gloo ✓", (1, 4), 8)
        assert (found.warm, found.timeout, found.imports) == (True, 5.0, ("a.b",))
        assert found.env == (("A", ""), ("B", "2"))

    def test_waivers(self) -> None:
        """Waivers arrive in the order of the file, each with its place."""
        first, second = parse(HEAD + NOW_AND_THEN + WAIVER + 'torch = ">=2.11"\n', "p.toml").waivers
        assert first == Waiver(
            ("suites/*",),
            "wrong sums",
            "https://example.com/1",
            datetime.date(2027, 6, 30),
            ("passed", "hung"),
            intermittent=True,
            place="p.toml:4",
            owner="cpu-gloo",
        )
        assert (second.place, second.when.torch, second.intermittent) == ("p.toml:10", ">=2.11", False)
        assert second.verdicts == ("failed", "crashed", "hung")

    def test_windows_lines(self) -> None:
        """Lines may end as they do on Windows."""
        assert parse((HEAD + WAIVER).replace("\n", "\r\n"), "p.toml").waivers[0].place == "p.toml:4"

    def test_every_key_is_documented(self) -> None:
        """docs/profiles.md names every key."""
        text = (ROOT / "docs/profiles.md").read_text()
        named = [key for keys in KEYS.values() for key in keys]
        assert [key for key in named if f"`{key}`" not in text and f"\n[[{key}]]\n" not in text] == []


class TestChoice:
    """Of the shipped profiles, a run that names none has the one for its backend, its device and its torch."""

    @pytest.fixture(params=["cuda", "xpu", "npu"])
    def kind(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
        """A type of device of which this machine seems to have one, with the backend that its package registers."""
        found = Inventory(request.param, (f"{request.param}:0",), (f"{request.param}-0",))
        monkeypatch.setattr("harness.devices.inventory", lambda *_: found)
        monkeypatch.setitem(dist.Backend.default_device_backend_map, "npu", "hccl")
        return found.kind

    @pytest.mark.parametrize("platform", ["cuda", "hip"])
    def test_by_torch(self, kind: str, platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """A build for HIP calls its devices as one for CUDA does, and does not get the profile of NVIDIA's."""
        for name in ("cuda", "hip"):
            monkeypatch.setattr(torch.version, name, "1.0" if name == platform else None)
        expected = {"xpu": "xpu-xccl", "npu": "npu-hccl", "cuda": "rocm-nccl" if platform == "hip" else "cuda-nccl"}
        chosen = self.profiles().chosen()
        assert chosen is not None
        assert chosen.name == expected[kind]

    @pytest.mark.parametrize(("platform", "expected"), [("cuda", "cuda-gloo"), ("hip", None)])
    def test_by_backend(self, platform: str, expected: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
        """No profile is about gloo on AMD's devices, so a run on them has none."""
        monkeypatch.setattr("harness.devices.inventory", lambda *_: Inventory("cuda", ("cuda:0",), ("cuda-0",)))
        for name in ("cuda", "hip"):
            monkeypatch.setattr(torch.version, name, "1.0" if name == platform else None)
        chosen = self.profiles(world_backend="gloo").chosen()
        assert (chosen.name if chosen is not None else None) == expected

    def profiles(self, **options: str) -> Profiles:
        """The profiles of a session with such options."""
        flags = SimpleNamespace(help=False, version=False)
        config: Any = SimpleNamespace(rootpath=ROOT, getoption=options.get, option=flags)
        return Profiles(config)


class TestNeverRun:
    def test_shipped(self) -> None:
        """The shipped profiles say that nobody of us has run them, but for those that CI or docs/gpu.md is about."""
        every = [Shelf(ROOT).read(path) for path in sorted((ROOT / "fixtures/profiles").glob("*.toml"))]
        run = {"cpu-gloo", "sim", "cuda-nccl", "cuda-gloo"}
        assert {profile.name for profile in every if not profile.never_run} == run
        assert {profile.name for profile in every if "never run by us" not in profile.about} == run

    def test_not_inherited(self) -> None:
        """Whoever inherits from a profile that its author never ran may well run the own one."""
        below = HEAD + "never_run = true\n"
        over = parse('name = "p"\ninherits = "cpu-gloo"\n', "p.toml", lambda name, file: (f"{name}.toml", below))
        assert (parse(below, "p.toml").never_run, over.never_run) == (True, False)

    def test_recorded(self) -> None:
        """A run records it."""
        profile = parse(HEAD + "never_run = true\n", "p.toml")
        assert as_recorded(profile, {"p.toml": HEAD}, Platform(), "torch").never_run


class TestMistakes:
    @pytest.mark.parametrize(
        ("line", "expected"),
        [
            ("nam = 1", "nam: no such key; did you mean name?"),
            ("WORLD_SIZES = [1]", "WORLD_SIZES: no such key; did you mean world_sizes?"),
            ("waivers = []", "waivers: no such key; did you mean waiver?"),
            ("x = 1", "x: no such key; known are name, backend, device, about, world_sizes, ranks_per_device, warm, "),
            ("about = 3", "about: a text in quotes, not 3"),
            ('about = " "', "about: is empty"),
            ('about = "a\\u001b[31m"', "about: a text on one line, without '\\x1b'"),
            ('about = "a\\nb"', "about: a text on one line, without '\\n'"),
            ('about = "\\u202e"', "about: a text on one line, without '\\u202e'"),
            ("world_sizes = 2", "world_sizes: a list in brackets, not 2"),
            ("world_sizes = []", "world_sizes: is empty"),
            ("world_sizes = [1, 0]", "world_sizes: a whole number from 1, not 0"),
            ("world_sizes = [2, 2]", "world_sizes: 2 is there twice"),
            ("world_sizes = [true]", "world_sizes: a whole number from 1, not True"),
            ("world_sizes = [1.0]", "world_sizes: a whole number from 1, not 1.0"),
            ("ranks_per_device = -1", "ranks_per_device: a whole number from 1, not -1"),
            ("benchmark_world_sizes = [2, 0]", "benchmark_world_sizes: a whole number from 1, not 0"),
            ("link_bandwidth = 0", "link_bandwidth: a number of GB/s above 0, at most 1000000, not 0"),
            ("largest_message = 7", "largest_message: a whole number of bytes from 8, at most 1099511627776, not 7"),
            (f"ranks_per_device = 0x{'f' * 100}", "ranks_per_device: a whole number from 1, not "),
            ('warm = "true"', "warm: true or false, without quotes, not 'true'"),
            ("timeout = 0", "timeout: a number of seconds above 0, at most 86400, not 0"),
            ("timeout = nan", "timeout: a number of seconds above 0, at most 86400, not nan"),
            ("timeout = inf", "timeout: a number of seconds above 0, at most 86400, not inf"),
            ("timeout = true", "timeout: a number of seconds above 0, at most 86400, not True"),
            ('imports = "os"', "imports: a list in brackets, not 'os'"),
            ('imports = ["os; x"]', "imports: the name of a module, not 'os; x'"),
            ("env = 3", "env: a table of names and values, begun with [env], not 3"),
            ("env.A = 3", "env.A: a text in quotes, not 3"),
            ('env."A=B" = "x"', "env.'A=B': not the name of an environment variable"),
            ('env."" = "x"', "env.'': not the name of an environment variable"),
            ('env.A = "a\\u0000"', "env.A: a text in quotes, not 'a\\x00'"),
            ('env.HUB_TOKEN = "hunter2"', "env.HUB_TOKEN: a credential, and profiles are published: set it where "),
            ('env.STORE = "redis://:hunter2@h/0"', "env.STORE: a credential, and profiles are published: "),
            ('env.STORE = "x8Jk2aQ9vLm3Zt7Rb1Yc"', "env.STORE: a credential, and profiles are published: "),
            ("waiver = 3", "[[waiver]]: begin each with [[waiver]], in two brackets"),
            ("waiver = [3]", "[[waiver]]: begin each with [[waiver]], in two brackets"),
            ("[waiver]", "[[waiver]]: begin each with [[waiver]], in two brackets"),
            ('"\\u001b" = 1', "'\\x1b': no such key; known are "),
            (f"{'k' * 120} = 1", "'kkkkkkkkkkkk...kkkkkkkkkkkkk': no such key; known are "),
        ],
        ids=lambda text: ascii(text)[:40],
    )
    def test_head(self, line: str, expected: str) -> None:
        """A mistake in the head is told with file, line and key, and with the nearest right word."""
        assert mistake(f"{HEAD}# a comment\n{line}\n").startswith(f"p.toml:5: {expected}")

    @pytest.mark.parametrize(
        ("line", "expected"),
        [
            ("tests = 3", "tests: a list in brackets, not 3"),
            ("tests = []", "tests: is empty"),
            ('tests = [""]', "tests: is empty"),
            ('tests = ["a", "a"]', "tests: 'a' is there twice"),
            ('reason = ""', "reason: is empty"),
            ('link = "see the tracker"', "link: a URL, or \"unreported\", not 'see the tracker'"),
            ('link = "javascript:alert(1)"', "link: a URL, or \"unreported\", not 'javascript:alert(1)'"),
            ('link = "https://u:p@h/1"', "link: it has a credential in it, and profiles are published"),
            ('link = "https://"', "link: a URL, or \"unreported\", not 'https://'"),
            ('expires = "2027-06-30"', "expires: a date without quotes and without a time, as in 2027-06-30, not '20"),
            ("expires = 2027-06-30T10:00:00", "expires: a date without quotes and without a time, as in 2027-06-30"),
            ("expires = false", "expires: a date without quotes and without a time, as in 2027-06-30, not False"),
            ('verdicts = "failed"', "verdicts: a list in brackets, not 'failed'"),
            ('verdicts = ["fialed"]', "verdicts: 'fialed' is not a verdict that it can cover; did you mean failed?"),
            ('verdicts = ["passed"]', "verdicts: 'passed' is not a verdict that it can cover; "),
            ("verdicts = [[]]", "verdicts: [] is not a verdict that it can cover; write some of failed, crashed, hung"),
            ('shows = "text"', "shows: a list in brackets, not 'text'"),
            ('shows = [""]', "shows: "),
            ("shows = [1]", "shows: a text in quotes, not 1"),
            ('torch = "2.11"', "torch: a condition on versions, as in \">=2.11,<2.14\", not '2.11'"),
            ("torch = 2.11", "torch: a text in quotes, not 2.11"),
            ('reasons = "x"', "reasons: no such key; did you mean reason?"),
            (
                "world_sizes = [1]",
                "world_sizes: no such key; known are tests, reason, link, expires, verdicts, shows, subjects, torch",
            ),
        ],
        ids=lambda text: ascii(text)[:40],
    )
    def test_waiver(self, line: str, expected: str) -> None:
        """A mistake in a waiver is told with its own line."""
        key = line.split(" ")[0]
        kept = [other for other in WAIVER.splitlines() if not other.startswith(f"{key} ")]
        text = "\n".join([HEAD.rstrip(), *WAIVER.splitlines(), *kept, line])
        assert mistake(text).startswith(f"p.toml:{text.count(chr(10)) + 1}: [[waiver]] {expected}")

    @pytest.mark.parametrize("key", ["tests", "reason", "link", "expires"])
    def test_incomplete_waiver(self, key: str) -> None:
        """What a waiver must have and has not is told with the line where it begins, and with an example."""
        kept = "\n".join(line for line in WAIVER.splitlines() if not line.startswith(key))
        assert mistake(f"{HEAD}{WAIVER}{kept}").startswith(f"p.toml:9: [[waiver]] {key}: is missing; write {key} = ")

    @pytest.mark.parametrize(
        ("verdicts", "expected"),
        [
            ('["hung"]', "without passed: a test that never passes has a [[waiver]]"),
            ('["passed"]', "passed alone: name what it comes to now and then (failed, crashed, hung)"),
        ],
    )
    def test_intermittent(self, verdicts: str, expected: str) -> None:
        """A known intermittent names passed, and something else."""
        text = HEAD + WAIVER.replace("waiver", "intermittent") + f"verdicts = {verdicts}"
        assert mistake(text) == f"p.toml:9: [[intermittent]] verdicts: {expected}"

    def test_all_at_once(self) -> None:
        """All mistakes are told at once, in the order of the file."""
        found = mistakes(f"warm = 3\n{WAIVER}{WAIVER.replace('reason', 'reson')}\n[env]\nA = 1\n")
        assert [line.split(": ")[0] for line in found] == [f"p.toml:{i}" for i in (1, 1, 1, 1, 9, 14)]

    def test_misspelt_is_not_missing(self) -> None:
        """A key that is only misspelt is not reported as missing as well."""
        assert mistake(HEAD.replace("backend", "bakend")) == "p.toml:2: bakend: no such key; did you mean backend?"

    def test_nothing(self) -> None:
        """An empty file lacks three keys."""
        assert mistakes("") == [
            'p.toml:1: name: is missing; write name = "my-profile"',
            'p.toml:1: backend: is missing; write backend = "my_backend"',
            'p.toml:1: device: is missing; write device = "cpu"',
        ]


class TestFilesThatAreNone:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("a = 1\nb = \n", "p.toml:2: not TOML: Invalid value"),
            ("a = 1\na = 2\n", "p.toml:2: not TOML: Cannot overwrite a value"),
            ('a = """\n\n', "p.toml:1: not TOML: a string in it does not end"),
            ("[[waiver]\n", "p.toml:1: not TOML: "),
            ("a = " + "[" * 5000, "p.toml:1: nested more than 8 deep"),
            ("\n" + "a." * 20_000 + "a = 1", "p.toml:2: a key of more than 8 parts"),
            ("a = [" + "1," * 60_001 + "]", "p.toml:1: more than 60,000 values in lists"),
            ("".join(f"a{i}=1\n" for i in range(12_001)), "p.toml:12001: more than 12,000 keys and tables"),
            ("\n" * 40_001, "p.toml:40001: more than 40,000 lines"),
            (f"a = {'9' * 5000}", "p.toml:1: a key or a value of 5,000 characters without quotes"),
            ("a = 2027-13-45", "p.toml:1: not TOML: "),
            ("\0", "p.toml:1: not TOML: "),
        ],
        ids=lambda text: ascii(text)[:30],
    )
    def test_not_toml(self, text: str, expected: str) -> None:
        """What is no TOML is told with its line."""
        assert mistake(text).startswith(expected)

    @pytest.mark.parametrize(
        ("data", "expected"),
        [
            (b'name = "a"\nx = "\xff"\n', ":2: not UTF-8: byte 0xff"),
            (b"\xef\xbb\xbfname = 1", ":1: not TOML: "),
            (b"#" * ((512 << 10) + 1), ": larger than 512 KiB"),
        ],
        ids=["latin", "bom", "large"],
    )
    def test_bytes(self, tmp_path: Path, data: bytes, expected: str) -> None:
        """A file of something else is refused."""
        path = tmp_path / "p.toml"
        path.write_bytes(data)
        with pytest.raises(ProfileError) as caught:
            read(path)
        assert str(caught.value).startswith(f"{path}{expected}")

    def test_many_mistakes(self) -> None:
        """Of very many mistakes the first are said, and how many more there are; that takes no time to speak of."""
        with pytest.raises(ProfileError) as caught:
            parse("".join(f"worldsize{i} = 1\n" for i in range(5_000)), "p.toml")
        lines = str(caught.value).split("\n")
        assert (len(lines), lines[-1]) == (51, "p.toml: and 4,953 more mistakes")

    def test_no_file(self, tmp_path: Path) -> None:
        """A path where there is no file is told without a line."""
        for path, why in (
            (tmp_path / "x.toml", "No such file or directory"),
            (tmp_path, "a folder, not a file"),
        ):
            with pytest.raises(ProfileError) as caught:
                read(path, "shown.toml")
            assert str(caught.value) == f"shown.toml: {why}"

    @given(st.text(max_size=60) | st.binary(max_size=60).map(lambda data: data.decode("latin-1")))
    @example('waiver = [{tests = ["a"]}]')
    @example("waiver.a = 1")
    @example("[waiver.x]\n[[intermittent.y]]")
    @example("[[waiver]]\n[waiver.reason]\n[[waiver.link]]\n[[waiver.link.a]]\n")
    def test_garbage(self, text: str) -> None:
        """Whatever is in a file, it is a ProfileError with lines that are there, on lines of their own."""
        for broken in (text, HEAD + text, HEAD + WAIVER + text):
            found = mistakes_if_any(broken)
            assert all(1 <= m.line <= broken.count("\n") + 1 for m in found)
            assert all("\n" not in str(m) for m in found)

    @given(st.randoms(use_true_random=False))
    def test_damaged(self, chance: random.Random) -> None:
        """A good file with a few bytes changed is read or refused."""
        text = list(HEAD + WAIVER + NOW_AND_THEN)
        for _ in range(chance.randint(1, 4)):
            text[chance.randrange(len(text))] = chance.choice("\"'[]{}=\n\\#.,0a")
        found = mistakes_if_any("".join(text))
        assert list(found) == sorted(found, key=lambda m: m.line)

    def test_mistake(self) -> None:
        """A mistake about a file as such has no line."""
        assert [str(Mistake("f", 0, "", "w")), str(Mistake("f", 2, "k", "w"))] == ["f: w", "f:2: k: w"]


class TestLinesOf:
    def test_everything(self) -> None:
        """Strings and lists over several lines, dotted and quoted keys, comments, tables in tables."""
        text = '''# [[waiver]]
a.b = """
[[waiver]]
x = 1 \\""" # """
c = [ # ]
  "]",
  { d = "}" }]
[[waiver]]  # = [
"r = s" = \'\'\'
[[waiver]]\'\'\'\'
  [waiver.e]
  f = 1
[[waiver]]
g = "#"
[ "h" . i ]
j = 1'''
        assert lines_of(text) == {
            ("a",): 2,
            ("a", "b"): 2,
            ("c",): 5,
            ("waiver",): 8,
            ("waiver", 0): 8,
            ("waiver", 0, "r = s"): 9,
            ("waiver", 0, "e"): 11,
            ("waiver", 0, "e", "f"): 12,
            ("waiver", 1): 13,
            ("waiver", 1, "g"): 14,
            ("h", "i"): 15,
            ("h", "i", "j"): 16,
        }


TODAY = datetime.date(2027, 1, 1)
NOW = Conditions(TODAY, Platform("2.13.0+cpu"))


def waiver(*tests: str, line: int = 1, expires: datetime.date = TODAY, **other: object) -> Waiver:
    values: dict[str, Any] = {"place": f"p:{line}", "owner": "mine", **other}
    return Waiver(tests or ("*",), "wrong", "unreported", expires, **values)


def profile(*waivers: Waiver) -> Profile:
    return Profile("p", "gloo", "cpu", waivers=waivers)


class TestWaiver:
    @pytest.mark.parametrize(
        ("glob", "nodeid", "expected"),
        [
            ("a.py::t", "a.py::t", True),
            ("a.py::t", "a.py::t[1]", False),
            ("a.py::t[*]", "a.py::t[1-[x]]", True),
            ("a.py::t[12]", "a.py::t1", False),
            ("a.py::t[12]", "a.py::t[12]", True),
            ("a.py::t[[]*", "a.py::t[1]", False),
            ("*::t*", "x/y/a.py::t[1]", True),
            ("*::T*", "x/y/a.py::t[1]", False),
            ("a.py::t[?rank]", "a.py::t[2rank]", True),
            ("a.py::t[!a]", "a.py::t[!a]", True),
            ("(", "(", True),
            ("*", "a\nb", True),
        ],
    )
    def test_globs(self, glob: str, nodeid: str, expected: bool) -> None:
        """A glob is about the whole of an id; brackets mean themselves."""
        assert waiver(glob).matches(nodeid) == expected

    @pytest.mark.parametrize(
        ("condition", "version", "expected"),
        [
            ("", "2.13.0", True),
            (">=2.11,<2.14", "2.13.0+cpu", True),
            (">=2.11,<2.14", "2.14.0", False),
            (">=2.11", "2.14.0.dev20261101+cu130", True),
            (">=2.11,<2.14", "2.14.0a0+git1234", False),
            (">=2.11", "what a vendor calls it", True),
        ],
    )
    def test_torch(self, condition: str, version: str, expected: bool) -> None:
        """Nightly and local builds count as the versions that they are."""
        assert Condition(torch=condition).holds(Platform(version)) == expected

    @pytest.mark.parametrize(("days", "expected"), [(0, False), (-1, True)])
    def test_expiry(self, days: int, expected: bool) -> None:
        """A waiver counts to the end of its day."""
        assert waiver(expires=TODAY + datetime.timedelta(days)).has_expired(TODAY) == expected


class TestSubjects:
    @pytest.mark.parametrize(
        ("subject", "subjects", "expected"),
        [
            ("torch", ("torch",), True),
            ("reference", ("torch",), False),
            ("reference", ("torch", "reference"), True),
            ("torch", ("reference",), False),
        ],
    )
    def test_covering(self, subject: str, subjects: tuple[str, ...], expected: bool) -> None:
        """A waiver counts for the subjects that it names."""
        conditions = Conditions(TODAY, Platform("2.13.0"), subject)
        found = conditions.covering(profile(waiver(subjects=subjects)), "t", "failed")
        assert (found is not None) == expected

    def test_default(self) -> None:
        """It is about torch alone where it names none."""
        assert waiver().subjects == ("torch",)

    def test_of_another(self) -> None:
        """One about another subject is not stale where its test passes, or is not there."""
        found = review(
            profile(waiver("gone"), waiver("t")),
            {"t": "passed"},
            {},
            Conditions(TODAY, Platform("2"), "mine"),
            whole=True,
        )
        assert found.stale == ()


class TestCovering:
    def test_first_that_covers(self) -> None:
        """Of several waivers, the first that is about the test, the verdict, torch and today counts."""
        candidates = (
            waiver("other"),
            waiver(verdicts=("hung",), line=2),
            waiver(expires=TODAY - datetime.timedelta(1), line=3),
            waiver(when=Condition(torch="<2.13"), line=4),
            waiver(line=5),
            waiver(line=6),
        )
        found = NOW.covering(profile(*candidates), "t", "failed")
        assert found is not None
        assert found.place == "p:5"

    def test_none(self) -> None:
        """A test that no waiver is about has none."""
        assert NOW.covering(profile(waiver("x")), "t", "failed") is None

    @pytest.mark.parametrize(
        ("report", "expected"),
        [("E  no shard is left", True), ("a rank has\nno row", True), ("E  no rank is left", False), ("", False)],
    )
    def test_other_failure(self, report: str, expected: bool) -> None:
        """A waiver that says what the failure looks like covers no other failure."""
        known = waiver(shows=("no shard", "has\nno"))
        assert (NOW.covering(profile(known), "t", "failed", report) is not None) == expected
        assert NOW.covering(profile(known, waiver()), "t", "failed", report) is not None

    def test_note_of_another_failure(self) -> None:
        """A run says which failures a waiver covers if a test fails otherwise."""
        found = review(profile(waiver(shows=("no [shard]",))), {"a": "failed"}, {}, NOW, whole=True)
        assert found.notes == ("p:1: covers only failed, crashed, hung with 'no [shard]' in the report: a failed",)


class TestReview:
    def test_waived(self) -> None:
        """Waived tests are grouped by waiver."""
        used = {"b": ("p:1", "hung"), "a": ("p:1", "failed")}
        found = review(profile(waiver()), {"a": "waived", "b": "waived"}, used, NOW, whole=True)
        assert found.waived == (
            "p:1: wrong (mine, unreported, until 2027-01-01)",
            "    a failed, b hung",
            "waived tests by owner: mine 2",
        )
        assert (found.notes, found.stale) == ((), ())

    def test_stale(self) -> None:
        """A waiver whose test passes is stale."""
        found = review(profile(waiver()), {"a": "passed", "b": "waived"}, {"b": ("p:1", "failed")}, NOW, whole=False)
        assert found.stale == ("p:1: stale: passed: a; take it out, or make it narrower",)

    def test_stale_and_expired(self) -> None:
        """A waiver whose time is over and whose test passes is stale too."""
        old = waiver(expires=TODAY - datetime.timedelta(1))
        assert len(review(profile(old), {"a": "passed"}, {}, NOW, whole=False).stale) == 1

    @pytest.mark.parametrize("verdict", ["unsupported", "not-run"])
    def test_not_run(self, verdict: str) -> None:
        """A test that did not run says nothing of its waiver."""
        found = review(profile(waiver()), {"a": verdict}, {}, NOW, whole=True)
        assert (found.waived, found.notes, found.stale) == ((), (), ())

    def test_intermittent(self) -> None:
        """A test that may pass makes no waiver stale by passing."""
        both = profile(waiver(), waiver(intermittent=True, verdicts=("passed", "hung"), line=2))
        assert review(both, {"a": "passed"}, {}, NOW, whole=True).stale == ()

    @pytest.mark.parametrize("whole", [True, False])
    def test_no_such_test(self, whole: bool) -> None:
        """A glob that is about no test is stale if every suite was collected."""
        found = review(profile(waiver("a", "x[1]")), {"a": "waived"}, {}, NOW, whole=whole)
        assert found.stale == (("p:1: stale: there is no test 'x[1]'",) if whole else ())

    def test_other_torch(self) -> None:
        """A waiver for another torch is neither used nor stale."""
        found = review(profile(waiver("a", "x", when=Condition(torch="<2.13"))), {"a": "passed"}, {}, NOW, whole=True)
        assert found.stale == ()

    def test_expired(self) -> None:
        """What an expired waiver no longer covers is told with it."""
        old = waiver(expires=TODAY - datetime.timedelta(1))
        found = review(profile(old), {"a": "failed"}, {}, NOW, whole=True)
        assert found.notes == ("p:1: expired on 2026-12-31: a failed; look again at: wrong (unreported)",)

    def test_other_verdict(self) -> None:
        """A test that ends in a way that its waiver does not cover is told with it."""
        found = review(profile(waiver(verdicts=("failed",))), {"a": "hung"}, {}, NOW, whole=True)
        assert found.notes == ("p:1: covers only failed: a hung",)


@pytest.mark.parametrize(
    ("count", "everything", "expected"),
    [(2, False, "0, 1"), (7, False, "0, 1, 2, 3, 4, and 2 more"), (7, True, "0, 1, 2, 3, 4, 5, 6")],
)
def test_listed(count: int, everything: bool, expected: str) -> None:
    """A list of names is cut unless all are asked for."""
    assert listed([str(i) for i in range(count)], everything) == expected
