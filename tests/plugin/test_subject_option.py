"""--subject: whose implementation of the stacks runs, and who says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from sessions import Folder, Session

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

TESTS = """
    import pytest

    from harness.stacks.replicate import replicate
    from harness.stacks.registry import stack

    def made_by(rank):
        import torch.distributed._composable.replicate
        from torch.distributed._composable import replicate as imported
        assert replicate is stack("replicate").apply.__globals__["replicate"] is imported
        return replicate.__module__

    @pytest.mark.world(2)
    def test_whose(world):
        assert world.run(made_by) == ["torch.distributed._composable.replicate"] * 2

    def test_not_in_the_controller():
        assert replicate.__module__ == "torch.distributed._composable.replicate"
"""

OF_NO_STACK = """
    import pytest

    @pytest.mark.world(1)
    def test_it(world):
        world.run(lambda rank: None)
"""

PACKAGE = """
    from harness.faults import in_modules
    from harness.stacks import replicate as torchs

    def put():
        def replicate(module, **options):
            raise ZeroDivisionError
        in_modules((torchs.replicate, replicate))
"""

PROFILE = """
    name = "cpu-gloo"
    backend = "gloo"
    device = "cpu"

    [[waiver]]
    tests = ["*test_whose*"]
    reason = "it is ours"
    link = "unreported"
    expires = 2999-01-01
"""


@pytest.fixture(scope="module")
def folder(make_folder: Callable[[dict[str, str]], Folder]) -> Folder:
    return make_folder(
        {
            "suites/replicate/test_it.py": TESTS,
            "suites/collectives/test_other.py": OF_NO_STACK,
            "test_none.py": OF_NO_STACK,
            "mine.py": PACKAGE,
            "mine-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n",
            "mine-1.0.dist-info/entry_points.txt": "[concord.subjects]\nmine.replicate = mine:put\n",
            "wrong-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: wrong\nVersion: 1.0\n",
            "waived.toml": PROFILE,
            "both.toml": f'{PROFILE.rstrip()}\n    subjects = ["torch", "reference"]\n',
        }
    )


def run(folder: Folder, *arguments: str) -> Session:
    """A session in which the folder's packages are installed."""
    return folder.run(*arguments, env={"PYTHONPATH": f"{folder.path}:{ROOT}"})


@pytest.fixture(scope="module")
def reference(folder: Folder) -> Session:
    return run(folder, "--subject", "reference", "--concord-results", "out", "-rs")


def test_default(folder: Folder) -> None:
    """Without the option, PyTorch's own is there, and nothing is said."""
    session = run(folder)
    assert session.counts == {"passed": 4}
    assert "subject" not in session.out


def test_reference_is_in_every_rank(reference: Session) -> None:
    """Ranks have ours under every name, and the process of pytest does not."""
    assert reference.counts == {"failed": 1, "passed": 2, "skipped": 1}
    assert "harness.reference.replicate" in reference.out


def test_head_says_it(reference: Session) -> None:
    """The head, the table and the results file name the subject."""
    reference.lines.fnmatch_lines(["concord: subject reference, in the place of torch's stacks"])
    reference.lines.fnmatch_lines(["*verdicts by stack, subject reference*"])
    assert reference.results.header.subject == "reference"


def test_other_stacks(reference: Session) -> None:
    """A stack that the subject has not is not run on PyTorch's in its name."""
    reference.lines.fnmatch_lines(["SKIPPED *unsupported: subject reference has no collectives; it implements *"])


@pytest.mark.nightly
def test_workers(folder: Folder) -> None:
    """Workers of pytest-xdist have the same subject."""
    assert run(folder, "--subject", "reference", "-n1").counts == {"failed": 1, "passed": 2, "skipped": 1}


def test_of_a_package(folder: Folder) -> None:
    """An installed package brings its own along."""
    session = run(folder, "--subject", "mine", "-k", "whose")
    assert session.counts == {"failed": 1}
    assert "'mine'" in session.out


def test_unknown(folder: Folder) -> None:
    """A name that there is not is one error, which lists those that there are."""
    session = run(folder, "--subject", "yours")
    assert session.code == pytest.ExitCode.USAGE_ERROR
    assert session.err.strip() == "ERROR: --subject yours: no such subject; there are torch, reference, mine"


@pytest.mark.nightly
def test_wrongly_registered(folder: Folder) -> None:
    """An entry point that names no stack is told, with what it has to be called, and is in nobody else's way."""
    folder.write("wrong-1.0.dist-info/entry_points.txt", "[concord.subjects]\nwrong = mine:put\n")
    asked, other = run(folder, "--subject", "wrong"), run(folder, "--subject", "mine", "-k", "not_in_the_controller")
    folder.write("wrong-1.0.dist-info/entry_points.txt", "")
    line = "entry point 'wrong' of concord.subjects (wrong 1.0): call it wrong.STACK, with a stack of collectives, "
    assert asked.code == pytest.ExitCode.USAGE_ERROR
    assert f"ERROR: --subject wrong: {line}" in asked.err
    assert f"concord: broken plug-in: {line}" in other.out
    assert other.counts == {"passed": 1}


@pytest.mark.nightly
@pytest.mark.parametrize(("profile", "verdict"), [("waived", "failed"), ("both", "xfailed")])
def test_waivers(folder: Folder, profile: str, verdict: str) -> None:
    """Waivers are about PyTorch's, unless they say of whose they are."""
    session = run(folder, "--subject", "reference", "--profile", f"./{profile}.toml", "-k", "whose")
    assert session.counts == {verdict: 1}
