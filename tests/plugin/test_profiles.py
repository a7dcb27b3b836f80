"""Profiles in sessions: what a run takes from one, and what its waivers do."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from xml.etree import ElementTree

import pytest
from sessions import Folder, Session

from harness import results

pytestmark = pytest.mark.slow

SUITE = """
    import os

    import pytest

    def well(rank):
        pass

    def badly(rank):
        assert rank.index == 7

    @pytest.mark.world(2, 3)
    def test_known(world):
        world.run(badly)

    def test_dies(world):
        world.run(lambda rank: os._exit(3))

    def test_dies_unexpectedly(world):
        world.run(lambda rank: os._exit(3))

    @pytest.fixture
    def broken():
        raise RuntimeError("broken")

    def test_otherwise(world):
        world.run(badly)

    def test_known_set_up(world, broken):
        pass

    def test_known_without_ranks():
        assert 1 == 2

    def test_mended(world):
        world.run(well)

    def test_long_known(world):
        world.run(badly)

    def test_now_and_then_well(world):
        world.run(well)

    def test_now_and_then_badly(world):
        world.run(badly)

    @pytest.mark.world(4)
    def test_too_large(world):
        world.run(well)

    def test_other_torch(world):
        world.run(well)
"""


def entry(tests: str, *lines: str, kind: str = "waiver", expires: str = "2999-12-31") -> str:
    """An entry of a profile, of six lines and those given."""
    rest = "".join(f"{line}\n" for line in lines)
    return (
        f'[[{kind}]]\ntests = ["{tests}"]\nreason = "about {tests}"\nlink = "unreported"\nexpires = {expires}\n{rest}\n'
    )


HEAD = 'name = "cpu-gloo"\nbackend = "gloo"\ndevice = "cpu"\nworld_sizes = [2, 3]\n'
PROFILE = (
    HEAD
    + entry("suites/*::test_known*", 'shows = ["2 failed first", "3 failed first", "1 == 2", "broken"]')
    + entry("suites/*::test_dies[2ranks]", 'verdicts = ["crashed"]')
    + entry("suites/*::test_dies_un*", 'verdicts = ["failed", "hung"]')
    + entry("suites/*::test_otherwise*", 'shows = ["rank.index == 8"]')
    + entry("suites/*::test_mended*")
    + entry("suites/*::test_long_known*", expires="2020-12-31")
    + entry("suites/*::test_now*", 'verdicts = ["failed", "passed"]', kind="intermittent")
    + entry("suites/*::test_too_large*")
    + entry("suites/*::test_gone*")
    + entry("suites/*::test_other*", 'torch = "<2.11"')
)
WHERE = "fixtures/profiles/cpu-gloo.toml"
ELSEWHERE = 'owner = "gloo"\nbackends = ["gloo"]\n' + entry("suites/*::test_not_here*", 'id = "x"', kind="defect")
"""Known defects of which no test is there."""
BAD = {
    "test_dies_unexpectedly[2ranks]": "crashed",
    "test_long_known[2ranks]": "failed",
    "test_otherwise[2ranks]": "failed",
}
WAIVED = {
    "test_known[2ranks]",
    "test_known[3ranks]",
    "test_dies[2ranks]",
    "test_known_set_up[2ranks]",
    "test_known_without_ranks",
    "test_now_and_then_badly[2ranks]",
}
PASSED = {"test_mended[2ranks]", "test_now_and_then_well[2ranks]", "test_other_torch[2ranks]"}


def line_of(glob: str) -> int:
    """The line where the entry of a glob begins."""
    return PROFILE.split("\n").index(f'tests = ["{glob}"]')


@pytest.fixture(scope="module")
def folder(make_folder: Callable[[dict[str, str]], Folder]) -> Folder:
    other = 'name = "cuda-nccl"\nbackend = "nccl"\ndevice = "cuda"\n' + entry("*")
    return make_folder(
        {
            "suites/collectives/test_it.py": SUITE,
            WHERE: PROFILE,
            "fixtures/profiles/cuda-nccl.toml": other,
            "fixtures/defects/gloo.toml": ELSEWHERE,
        }
    )


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("-n0",), id="alone"),
        pytest.param(("-n2",), id="with workers", marks=pytest.mark.nightly),
    ],
)
def session(folder: Folder, request: pytest.FixtureRequest) -> Session:
    out = f"out{request.param[0]}"
    return folder.run("suites", *request.param, "-rx", "--concord-results", out, f"--junitxml={out}.xml")


def run_of(session: Session) -> results.Run:
    """The results of one of the sessions, which write them side by side."""
    (path,) = session.folder.glob(f"out{'-n2' if 'workers' in session.out else '-n0'}/*/results.jsonl")
    return results.read(path)


class TestWaivers:
    def test_outcomes(self, session: Session) -> None:
        """A waived failure is expected, whatever phase it is in; nothing else is."""
        expected = {"failed": len(BAD), "passed": len(PASSED), "xfailed": len(WAIVED), "skipped": 1, "stale": 2}
        assert (session.counts, session.code) == (expected, 1)

    def test_evidence(self, session: Session) -> None:
        """A waived failure keeps what it said, and what its ranks said."""
        tests = {name.split("::")[1]: test for name, test in run_of(session).tests.items()}
        known = tests["test_known[2ranks]"]
        assert "of 2 failed first: AssertionError: assert " in known.headline
        assert [(r.rank, r.kind) for r in known.ranks] == [(0, "raised"), (1, "raised")]
        assert "assert 1 == 2" in tests["test_known_without_ranks"].headline

    def test_profile_of_the_run(self, session: Session) -> None:
        """The results say which profile the run went by, with a hash of its text and of the known defects'."""
        header = run_of(session).header
        both = hashlib.sha256(f"{PROFILE}\0{ELSEWHERE}".encode()).hexdigest()
        assert (header.profile, header.profile_hash) == ("cpu-gloo", both)

    def test_verdicts(self, session: Session) -> None:
        """The results file has the verdict and the reason of each test, and the exit status of the run."""
        run = run_of(session)
        tests = {nodeid.split("::")[1]: test for nodeid, test in run.tests.items()}
        assert {name for name, test in tests.items() if test.verdict == "waived"} == WAIVED
        assert {name for name, test in tests.items() if test.verdict == "passed"} == PASSED
        assert {name: test.verdict for name, test in tests.items() if name in BAD} == BAD
        assert tests["test_known[2ranks]"].reason == "about suites/*::test_known* (cpu-gloo, unreported)"
        unsupported = "unsupported: profile cpu-gloo claims worlds of 2, 3 ranks, not of 4"
        assert tests["test_too_large[4ranks]"].reason == unsupported
        assert (run.complete, run.exit_status) == (True, 1)

    def test_summary(self, session: Session) -> None:
        """The summary groups waived tests by waiver, with reason and link."""
        names = ", ".join(
            f"suites/collectives/test_it.py::{name} failed" for name in sorted(WAIVED) if name.startswith("test_known")
        )
        session.lines.fnmatch_lines(
            [
                "*- waivers -*",
                f"{WHERE}:5: about suites/[*]::test_known[*] (cpu-gloo, unreported, until 2999-12-31)",
                "    " + names.replace("[", "[[]"),
                f"{WHERE}:12: about suites/[*]::test_dies[[]2ranks] (cpu-gloo, unreported, until 2999-12-31)",
                "    suites/collectives/test_it.py::test_dies[[]2ranks] crashed",
                "*: about suites/[*]::test_now[*] (cpu-gloo, intermittent, unreported, until 2999-12-31)",
                "*waived tests by owner: cpu-gloo 6",
            ]
        )

    @pytest.mark.parametrize(
        ("glob", "said"),
        [
            ("suites/*::test_dies_un*", "covers only failed, hung: {}::test_dies_unexpectedly[2ranks] crashed"),
            (
                "suites/*::test_otherwise*",
                "covers only failed, crashed, hung with 'rank.index == 8' in the report: {}::test_otherwise[2ranks]",
            ),
            (
                "suites/*::test_long_known*",
                "expired on 2020-12-31: {}::test_long_known[2ranks] failed; look again at: ",
            ),
            ("suites/*::test_mended*", "stale: passed: {}::test_mended[2ranks]; take it out, or make it narrower"),
            ("suites/*::test_gone*", "stale: there is no test 'suites/*::test_gone*'"),
        ],
    )
    def test_what_is_wrong_with_waivers(self, session: Session, glob: str, said: str) -> None:
        """A waiver that does not help is told in one line that names its own."""
        line = f"{WHERE}:{line_of(glob)}: {said.format('suites/collectives/test_it.py')}"
        assert [x for x in session.out.split("\n") if x.startswith(line)] != []

    def test_nothing_else(self, session: Session) -> None:
        """Nothing is said of a waiver whose test could not run, nor of one for another torch."""
        _, _, said = session.out.partition("- waivers -")
        said, _, _ = said.partition("short test summary")
        assert [word for word in ("too_large", "other_torch", "Traceback") if word in said] == []

    def test_shown_by_pytest(self, session: Session) -> None:
        """-rx shows why a test is waived."""
        expected = (
            "XFAIL suites/collectives/test_it.py::test_dies[[]2ranks] - about suites/[*]::test_dies[[]2ranks] (cpu-*"
        )
        session.lines.fnmatch_lines([expected])

    def test_junit(self, session: Session) -> None:
        """JUnit XML has waived tests as skipped, with the waiver's place."""
        name = "out-n2.xml" if "workers" in session.out else "out-n0.xml"
        tree = ElementTree.parse(session.folder / name)
        (case,) = (case for case in tree.iter("testcase") if case.get("name") == "test_dies[2ranks]")
        assert [child.tag for child in case if child.tag in ("skipped", "failure")] == ["skipped"]
        properties = {p.get("name"): p.get("value") for p in case.iter("property")}
        assert (properties["concord.waived"], properties["concord.verdict"]) == (f"{WHERE}:12", "crashed")
        assert (properties["concord.owner"], "concord.defect" in properties) == ("cpu-gloo", False)


OWNED = """
    def badly(rank):
        assert rank.index == 7

    def test_theirs(world):
        world.run(badly)

    def test_mine(world):
        world.run(badly)

    def test_absent(world):
        world.run(lambda rank: None)
"""
THEIRS = (
    'owner = "pytorch"\n'
    + entry("suites/*::test_theirs*", 'id = "their_bug"', kind="defect")
    + entry("suites/*::test_absent*", 'id = "gone_bug"', kind="defect")
    + entry("suites/*::test_elsewhere*", 'id = "other_bug"', 'devices = ["!cpu"]', kind="defect")
)
VENDOR = HEAD.replace("cpu-gloo", "vendor") + entry("suites/*::test_mine*")


@pytest.fixture(scope="module")
def owned(make_folder: Callable[[dict[str, str]], Folder]) -> Folder:
    """A suite in which a test fails for a defect of PyTorch and another for one of the vendor's."""
    folder = make_folder({"suites/collectives/test_it.py": OWNED, "vendor.toml": VENDOR})
    folder.write("strict.toml", VENDOR.replace("vendor", "strict") + '[defects]\nkeep = ["pytorch"]\n')
    folder.write("without.toml", VENDOR + '[defects]\nwithout = ["pytorch/their_bug", "pytorch/gone_bug"]\n')
    folder.write("wrong.toml", VENDOR + '[defects]\nwithout = ["pytorch/ther_bug"]\n')
    folder.write("fixtures/defects/pytorch.toml", THEIRS)
    return folder


@pytest.fixture(scope="module", params=[("-n0",), ("-n2",)], ids=["alone", "with workers"])
def of_vendor(owned: Folder, request: pytest.FixtureRequest) -> Session:
    out = f"out{request.param[0]}"
    options = ("--concord-results", out, f"--junitxml={out}.xml", "-rx")
    return owned.run("suites", "--profile", "vendor.toml", *request.param, *options)


class TestKnownDefects:
    def test_green(self, of_vendor: Session) -> None:
        """A defect of PyTorch is waived without a word, and one that does not show fails no vendor's run."""
        assert (of_vendor.counts, of_vendor.code) == ({"xfailed": 2, "passed": 1}, 0)

    def test_summary(self, of_vendor: Session) -> None:
        """The summary has the owner of each waived test, a count by owner, and what did not show."""
        of_vendor.lines.fnmatch_lines(
            [
                "fixtures/defects/pytorch.toml:2: about * (pytorch/their_bug, unreported, until 2999-12-31)",
                "    suites/collectives/test_it.py::test_theirs[[]2ranks] failed",
                "vendor.toml:5: about * (vendor, unreported, until 2999-12-31)",
                "    suites/collectives/test_it.py::test_mine[[]2ranks] failed",
                "waived tests by owner: pytorch 1, vendor 1",
                "1 known defect of pytorch did not show: gone_bug",
            ]
        )

    def test_results(self, of_vendor: Session) -> None:
        """Results have the text of the defects, and the owner and the id of each waiver."""
        profile = run_of(of_vendor).profile
        assert profile is not None
        assert list(profile.texts) == ["vendor.toml", "fixtures/defects/pytorch.toml"]
        assert [(w.owner, w.defect) for w in profile.waivers] == [
            ("pytorch", "their_bug"),
            ("pytorch", "gone_bug"),
            ("vendor", ""),
        ]

    def test_junit(self, of_vendor: Session) -> None:
        """JUnit XML has owner and defect as properties of the waived test."""
        name = "out-n2.xml" if "workers" in of_vendor.out else "out-n0.xml"
        owners = {}
        for case in ElementTree.parse(of_vendor.folder / name).iter("testcase"):
            properties = {p.get("name"): p.get("value") for p in case.iter("property")}
            owners[case.get("name")] = (properties.get("concord.owner"), properties.get("concord.defect"))
        assert owners == {
            "test_theirs[2ranks]": ("pytorch", "their_bug"),
            "test_mine[2ranks]": ("vendor", None),
            "test_absent[2ranks]": (None, None),
        }

    def test_kept(self, owned: Folder) -> None:
        """A profile that keeps the owner fails where a defect does not show."""
        session = owned.run("suites", "--profile", "strict.toml")
        assert (session.counts, session.code) == ({"xfailed": 2, "passed": 1, "stale": 1}, 1)
        stale = (
            "fixtures/defects/pytorch.toml:9: stale: passed: suites/collectives/test_it.py::test_absent[[]2ranks]; *"
        )
        session.lines.fnmatch_lines([stale])

    def test_left_out(self, owned: Folder) -> None:
        """A defect that the profile leaves out is waived no more, and nothing is said of it."""
        session = owned.run("suites", "--profile", "without.toml")
        assert (session.counts, session.code) == ({"xfailed": 1, "passed": 1, "failed": 1}, 1)
        assert "known defect" not in session.out

    def test_mistake(self, owned: Folder) -> None:
        """A defect that there is not ends the session before it begins, with the nearest one."""
        session = owned.run("suites", "--profile", "wrong.toml")
        near = "there is no 'pytorch/ther_bug'; did you mean pytorch/their_bug?"
        assert session.code == 4
        assert f"ERROR: profile: wrong.toml:12: defects.without: {near}" in session.err + session.out


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("suites", "-k", "known and not long"), id="keyword"),
        pytest.param(("suites", "-n2", "-k", "known and not long"), id="with workers", marks=pytest.mark.nightly),
        pytest.param(("suites/collectives/test_it.py::test_known",), id="node id"),
    ],
)
def test_part_of_a_suite(folder: Folder, arguments: tuple[str, ...]) -> None:
    """A run of waived tests alone is green, and says nothing of waivers for tests that it left out."""
    session = folder.run(*arguments)
    assert session.code == 0
    assert set(session.counts) == {"xfailed"}
    assert "stale" not in session.out


@pytest.mark.nightly
def test_last_failed(make_folder: Callable[[dict[str, str]], Folder]) -> None:
    """--lf runs again what is bad, and not what is waived."""
    folder = make_folder({"suites/collectives/test_it.py": SUITE, WHERE: PROFILE})
    folder.run("suites", "-k", "known")
    session = folder.run("suites", "--lf")
    assert session.counts == {"failed": 1}
    assert "stale" not in session.out


@pytest.mark.nightly
def test_exitfirst(folder: Folder) -> None:
    """-x goes on past waived failures, and does not judge tests that did not run."""
    session = folder.run("suites", "-x", "--deselect", "suites/collectives/test_it.py::test_dies_unexpectedly")
    assert session.counts == {"failed": 1, "xfailed": 5, "passed": 1, "stale": 1}
    session = folder.run("suites", "-x", "-k", "known")
    assert session.counts == {"failed": 1, "xfailed": 4}


def test_none(folder: Folder) -> None:
    """--profile none: nothing is waived, any size is claimed."""
    session = folder.run("suites", "--profile", "none", "-k", "(known and 2ranks and not set_up) or too_large")
    assert (session.counts, session.code) == ({"failed": 2, "passed": 1}, 1)
    session.lines.fnmatch_lines(["concord: no profile"])
    assert "waivers" not in session.out


def test_collect_only(folder: Folder) -> None:
    """--collect-only reads profiles, and imports no torch to choose one."""
    folder.write(
        "conftest.py",
        """
        import sys

        def pytest_unconfigure():
            print("torch" if "torch" in sys.modules else "no torch")
        """,
    )
    try:
        session = folder.run("suites", "--collect-only", "-q", fresh=True)
    finally:
        (folder.path / "conftest.py").unlink()
    assert (session.out.splitlines()[-1], session.code) == ("no torch", 0)


CLAIMS = """
    import os

    import pytest

    def test_env(world):
        assert world.run(lambda rank: os.environ["COLOUR"]) == ["green", "green"]

    @pytest.mark.world(2, env={"COLOUR": "red"})
    def test_mark_wins(world):
        assert world.run(lambda rank: (os.environ["COLOUR"], os.environ["SIZE"])) == [("red", "small")] * 2

    pids = []

    @pytest.mark.parametrize("turn", [1, 2])
    def test_warm(world, turn):
        assert world.spec.timeout == 7
        world.run(lambda rank: None)
        pids.append(world.pids)
        assert pids[0] == world.pids

    @pytest.mark.world(5)
    def test_size(world):
        world.run(lambda rank: None)

    @pytest.mark.world(5, backend="fake", imports=["torch.testing._internal.distributed.fake_pg"])
    def test_other_backend(world):
        assert world.spec.env == ()
        pytest.skip("no need to run")
"""
MINE = """
    name = "mine"
    backend = "gloo"
    device = "cpu"
    world_sizes = [1, 2]
    warm = true
    timeout = 7
    env = { COLOUR = "green", SIZE = "small" }
"""


def test_claims(make_folder: Callable[[dict[str, str]], Folder]) -> None:
    """A run takes environment, time limit, warmth and sizes from a profile that is named by its path."""
    folder = make_folder({"test_it.py": CLAIMS, "vendor/mine.toml": MINE})
    session = folder.run("--profile", "vendor/mine.toml", "-rs")
    assert session.counts == {"passed": 4, "skipped": 2}
    session.lines.fnmatch_lines(
        [
            "concord: profile mine (vendor/mine.toml)",
            "SKIPPED * unsupported: profile mine claims worlds of 1, 2 ranks, not of 5",
            "SKIPPED * no need to run",
        ]
    )


def test_missing_module(make_folder: Callable[[dict[str, str]], Folder]) -> None:
    """A run whose profile imports a module that is not there stops at once; one beside the tests may be."""
    text = MINE + 'imports = ["colours.all", "torch"]'
    folder = make_folder({"suites/test_it.py": CLAIMS, "mine.toml": text})
    session = folder.run("suites", "--profile", "mine.toml")
    assert session.code == 4
    expected = "profile mine (mine.toml): imports: there is no module colours in this environment: install its package"
    assert expected in session.out + session.err
    (folder.path / "suites/colours").mkdir()
    (folder.path / "suites/colours/all.py").touch()
    assert folder.run("suites", "--profile", "mine.toml", "-k", "test_size").counts == {"skipped": 1}


def test_options_win(make_folder: Callable[[dict[str, str]], Folder]) -> None:
    """Options on the command line come before the profile."""
    text = """
        def test_spec(world):
            assert (world.spec.timeout, world.spec.backend, world.spec.device) == (33, "gloo", "cpu")
            world.run(lambda rank: None)
    """
    other = MINE.replace('"gloo"', '"nccl"')
    folder = make_folder({"test_it.py": text, "mine.toml": MINE, "other.toml": other})
    assert folder.run("--profile", "mine.toml", "--world-timeout", "33").counts == {"passed": 1}
    arguments = ("--profile", "./other.toml", "--world-timeout", "33", "--world-backend", "gloo")
    assert folder.run(*arguments).counts == {"passed": 1}


class TestMistakes:
    @pytest.mark.parametrize(
        ("arguments", "expected"),
        [
            (("--profile", "cpu-glo"), "--profile 'cpu-glo': no profile of that name; did you mean cpu-gloo? there *"),
            (("--profile", "x/y.toml"), "profile: x/y.toml: No such file or directory"),
            (("--profile", "suites/"), "profile: suites: a folder, not a file"),
            (
                ("--profile", "wrong.toml"),
                "profile: wrong.toml:13: [[][[]waiver]] reson: no such key; did you mean reason[?]",
            ),
            (("--profile", "wrong.toml", "-n2"), "profile: wrong.toml:13: [[][[]waiver]] reson: no such key; *"),
            (("--profile", "cuda-nccl"), "--profile: no cuda device: torch * sees no accelerator on this machine"),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
    )
    def test_option(self, folder: Folder, arguments: tuple[str, ...], expected: str) -> None:
        """A mistake ends the session before it begins, with one line that says what and where."""
        folder.write("wrong.toml", HEAD + entry("a") + entry("b").replace("reason", "reson"))
        session = folder.run("suites", *arguments)
        assert session.code == 4
        text = "\n".join(line for line in (session.err + session.out).split("\n") if line.startswith("ERROR"))
        pytest.LineMatcher(text.split("\n")).fnmatch_lines([f"ERROR: {expected}"])
        assert "Traceback" not in session.out + session.err

    def test_shipped(self, make_folder: Callable[[dict[str, str]], Folder]) -> None:
        """A mistake in a shipped profile ends a session as well, and --profile none is a way past it."""
        text = "def test_it():\n    pass\n"
        folder = make_folder({"test_it.py": text, WHERE: HEAD + "waiver = 3\nwarm = 3\n"})
        session = folder.run()
        assert session.code == 4
        pytest.LineMatcher(session.err.split("\n")).fnmatch_lines(
            [
                "ERROR: profile:",
                f"{WHERE}:5: [[][[]waiver]]: begin each with [[][[]waiver]], in two brackets",
                f"{WHERE}:6: warm: true or false, without quotes, not 3",
            ]
        )
        assert folder.run("--profile", "none").counts == {"passed": 1}
