"""Sessions under a profile of an installed package: what is not claimed is not run, and who brings what along."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from sessions import Folder, Session

from harness.oracles.collectives import Case
from harness.results import NotClaimed, TorchLacks

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

TESTS = """
    import pytest
    import torch
    from hypothesis import HealthCheck, given, settings

    from harness import requirement
    from harness.oracles.collectives import Case
    from harness.programs.options import dtypes_of
    from harness.programs.strategies import programs
    from harness.stacks.collectives import assert_right, claimed

    DTYPES = [torch.float32, torch.int8]

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_dtype(world, dtype):
        assert_right(world, [Case("all_reduce", dtype=dtype)])

    @pytest.mark.parametrize("op", ["SUM", "MAX"])
    def test_op(world, op):
        assert_right(world, [Case("all_reduce", op)])

    @requirement("COLL-OBJECT-99", "It is.", source="torch.distributed.all_gather_object")
    def test_feature(world):
        raise AssertionError("no rank should have been asked")

    @requirement("COLL-X-99", "It is.", source="torch.distributed.gather")
    def test_source(world):
        raise AssertionError("no rank should have been asked")

    @pytest.mark.needs(collective="all_reduce", dtype="int8")
    def test_said(world):
        raise AssertionError("no rank should have been asked")

    @pytest.mark.needs(torch="torch.distributed.sail")
    def test_of_another_torch(world):
        raise AssertionError("no rank should have been asked")

    @pytest.mark.needs(torch="torch.distributed.all_reduce(async_op)")
    def test_of_this_torch(world):
        world.run(lambda rank: None)

    def test_left_out(world):
        assert claimed(DTYPES) == [torch.float32]
        assert_right(world, [Case("all_reduce", dtype=dtype) for dtype in DTYPES])

    def test_nothing_left(world):
        assert_right(world, [Case("all_reduce", dtype=torch.int8)])

    def test_no_form_left(world):
        assert_right(world, [Case("all_reduce", form=form) for form in ("functional", "coalesced", "async")])

    def test_refused_though_claimed(world):
        assert_right(world, [Case("broadcast", dtype=torch.uint64)])

    @settings(max_examples=20, database=None, suppress_health_check=[HealthCheck.filter_too_much])
    @given(program=programs("replicate", (2,)))
    def test_programs(world, program):
        assert dtypes_of(program) <= {"float32", "uint64"}
        assert "hook" not in dict(program.layout.options)
        world.run(lambda rank: None)
"""

PROFILE = """
    name = "mine"
    backend = "mine"
    device = "cpu"

    [collectives]
    dtypes = ["float32", "uint64"]
    ops = ["SUM"]

    [[collectives.except]]
    collectives = ["gather"]
    reason = "not made yet"

    [features]
    collectives = []
    replicate = []
"""

BACKEND = """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    def made(store, rank, size, timeout):
        return distributed_c10d.ProcessGroupGloo(store, rank, size, timeout=timeout)

    dist.Backend.register_backend("mine", made, devices=["cpu"])
"""

POINTS = """
    [concord.backends]
    mine = vendor.group
    [concord.profiles]
    mine = vendor
    lost = vendor.nowhere
    [concord.suites]
    theirs = vendor.conformance
    wrong = not a module
    [concord.requirements]
    mine = vendor.said:ALL
    broken = vendor.said:NONE
    [concord.subjects]
    wrong = vendor:put
"""

SAID = """
    from harness.requirements import Requirement
    ALL = [Requirement("MINE-A-01", "It is.", "us")]
"""


@pytest.fixture(scope="module")
def folder(make_folder: Callable[[dict[str, str]], Folder]) -> Folder:
    return make_folder(
        {
            "suites/collectives/test_it.py": TESTS,
            "site/vendor/__init__.py": "",
            "site/vendor-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: vendor\nVersion: 1.0\n",
            "site/vendor-1.0.dist-info/entry_points.txt": POINTS,
            "site/vendor/mine.toml": PROFILE,
            "site/vendor/group.py": BACKEND,
            "site/vendor/said.py": SAID,
            "site/vendor/conformance/__init__.py": "",
            "site/vendor/conformance/suites/collectives/test_theirs.py": """
                def test_theirs(world):
                    assert world.run(lambda rank: rank.backend) == ["mine", "mine"]
            """,
        }
    )


def run(folder: Folder, *arguments: str) -> Session:
    """A session in which the folder's package is installed."""
    return folder.run(*arguments, env={"PYTHONPATH": f"{folder.path / 'site'}:{ROOT}"})


@pytest.fixture(scope="module")
def session(folder: Folder) -> Session:
    arguments = ("--profile", "mine", "--suite", "theirs", "suites", "-rsf", "--concord-results", "out")
    return run(folder, *arguments)


def test_verdicts(session: Session) -> None:
    """Tests of what is not claimed are unsupported, others run; what is claimed and refused is a failure."""
    verdicts = {name.split("::")[-1]: result.verdict for name, result in session.results.tests.items()}
    assert verdicts == {
        "test_dtype[2ranks-torch.float32]": "passed",
        "test_dtype[2ranks-torch.int8]": "unsupported",
        "test_op[2ranks-SUM]": "passed",
        "test_op[2ranks-MAX]": "unsupported",
        "test_feature[2ranks]": "unsupported",
        "test_source[2ranks]": "unsupported",
        "test_said[2ranks]": "unsupported",
        "test_of_another_torch[2ranks]": "unsupported",
        "test_of_this_torch[2ranks]": "passed",
        "test_left_out[2ranks]": "passed",
        "test_nothing_left[2ranks]": "unsupported",
        "test_no_form_left[2ranks]": "unsupported",
        "test_refused_though_claimed[2ranks]": "failed",
        "test_programs[2ranks]": "passed",
        "test_theirs[2ranks]": "passed",
    }, session.out


@pytest.mark.parametrize(
    "why",
    ["int8", "with MAX", "feature objects of collectives", "gather", "all_reduce of int8"],
)
def test_why(session: Session, why: str) -> None:
    """A test that is not run says what is not claimed, and by which profile."""
    assert f"unsupported: not claimed: {why} (profile mine)" in session.out


def test_causes(session: Session) -> None:
    """What is not claimed is in the results as data, whether the plug-in or the test itself has found it."""
    tests = {name.split("::")[-1]: result for name, result in session.results.tests.items()}
    int8 = functools.partial(NotClaimed, profile="mine", collective="all_reduce", dtypes=("int8",))
    objects, functional = "feature objects of collectives", "feature functional of collectives"
    assert {name: test.cause for name, test in tests.items() if test.cause is not None} == {
        "test_dtype[2ranks-torch.int8]": NotClaimed(what="int8", profile="mine", dtypes=("int8",)),
        "test_op[2ranks-MAX]": NotClaimed(what="with MAX", profile="mine", op="MAX"),
        "test_feature[2ranks]": NotClaimed(what=objects, profile="mine", stack="collectives", feature="objects"),
        "test_source[2ranks]": NotClaimed(what="gather", profile="mine", collective="gather"),
        "test_said[2ranks]": int8(what="all_reduce of int8"),
        "test_of_another_torch[2ranks]": TorchLacks("torch.distributed.sail"),
        "test_nothing_left[2ranks]": int8(what=str(Case("all_reduce", dtype=torch.int8)), op="SUM"),
        "test_no_form_left[2ranks]": NotClaimed(
            what=functional, profile="mine", stack="collectives", feature="functional"
        ),
    }
    assert [test for test in tests.values() if test.cause and test.reason != f"unsupported: {test.cause}"] == []


def test_broken_ones(session: Session) -> None:
    """What is broken is a line each, and in nobody's way."""
    found = [line.partition("plug-in: ")[2] for line in session.out.split("\n") if "broken plug-in" in line]
    assert [line.replace("(vendor 1.0): ", "").removeprefix("entry point ")[:75] for line in sorted(found)] == [
        "'broken' of concord.requirements AttributeError: module 'vendor.said' has n",
        "'wrong' of concord.subjects call it wrong.STACK, with a stack of collective",
        "'wrong' of concord.suites 'not a module' is not the name of a module",
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--suite", "their"), "--suite their: no such suite; did you mean theirs? there are: theirs"),
        (
            ("--profile", "min"),
            "--profile 'min': no profile of that name; did you mean mine? there are: ",
        ),
        (("--profile", "lost"), "--profile 'lost': entry point 'lost' of concord.profiles (vendor 1.0): there is no "),
    ],
)
def test_unknown(folder: Folder, arguments: tuple[str, ...], said: str) -> None:
    """A name that there is not is one error, with the nearest; a broken package's is told with its package."""
    ended = run(folder, *arguments, "--collect-only")
    assert ended.code == pytest.ExitCode.USAGE_ERROR
    assert f"ERROR: {said}" in ended.err
    assert "Traceback" not in ended.err
