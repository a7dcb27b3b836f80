"""Mistakes in ``@pytest.mark.world`` and in options: one clear error, before anything starts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sessions import Folder, Session

pytestmark = pytest.mark.slow

BAD_MARKS = {
    "unknown_argument": ("(2, color=3)", "@pytest.mark.world has no argument 'color'; it has backend, device, env"),
    "size_0": ("(0)", "a world size is a whole number from 1, not 0"),
    "size_text": ("('2')", "a world size is a whole number from 1, not '2'"),
    "size_bool": ("(True)", "a world size is a whole number from 1, not True"),
    "size_twice": ("(2, 3, 2)", "a world size is given twice: (2, 3, 2)"),
    "no_size": ("()", "no world size given: write for example @pytest.mark.world(2)"),
    "timeout_negative": ("(2, timeout=-1)", "timeout=-1: a number of seconds above 0"),
    "timeout_text": ("(2, timeout='5')", "timeout='5': a number of seconds above 0"),
    "env_number": ("(2, env={'A': 1})", "env: 'A': 1: names and values must be strings"),
    "env_list": ("(2, env=['A'])", "env=['A']: a dict of names and values of environment variables"),
    "imports_text": ("(2, imports='os')", "imports='os': a list of names of modules"),
    "backend_number": ("(2, backend=3)", "backend=3: a name"),
    "network_unknown": ("(2, network='mine')", "network='mine': auto, private or host"),
    "keeps_bool": ("(2, keeps=True)", "keeps=True: the reason, in words"),
    "warm_text": ("(2, warm='yes')", "warm='yes': True or False"),
}


@pytest.fixture(scope="module")
def bad_marks(make_folder: Callable[[dict[str, str]], Folder]) -> Session:
    """A session with one file for each mistake."""
    files = {
        f"test_{name}.py": f"""
            import pytest

            @pytest.mark.world{arguments}
            def test_marked(world):
                pass
        """
        for name, (arguments, _) in BAD_MARKS.items()
    }
    return make_folder(files).run("--continue-on-collection-errors")


@pytest.mark.parametrize("name", BAD_MARKS)
def test_bad_mark_is_one_clear_error(bad_marks: Session, name: str) -> None:
    """A mistake in the mark is shown as one line that names the test and what to write instead."""
    shown = bad_marks.section(f"ERROR collecting test_{name}.py").split("\n")
    assert len(shown) == 2
    assert shown[1].startswith(f"test_{name}.py::test_marked: ")
    assert BAD_MARKS[name][1] in shown[1]


def test_bad_marks_are_errors_of_collection(bad_marks: Session) -> None:
    """Nothing is run of a file with a bad mark."""
    assert bad_marks.counts == {"errors": len(BAD_MARKS)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rank-pdb", "1", "-n", "2"], "--rank-pdb 1: a worker of pytest-xdist has no terminal; add -n 0"),
        (["--rank-pdb=-1"], "--rank-pdb -1: a rank's number is 0 or more"),
        (["--ranks-per-device", "0"], "--ranks-per-device 0: at least 1"),
        (["--worlds-per-device=-1"], "--worlds-per-device -1: at least 1"),
        (["--world-timeout=-3"], "--world-timeout -3: a number of seconds above 0"),
        (["-n", "bogus"], "'bogus' is none of: a number, auto, logical, gpus"),
        (["-n", "2", "tests_of_mine"], "file or directory not found: tests_of_mine"),
        (["-n", "2", "test_it.py", "test_at.py::test_nothing[1]"], "not found: test_at.py::test_nothing[1]"),
        (["--world-device", "no_such_device"], "--world-device: no no_such_device device"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else None,
)
def test_bad_option_is_a_usage_error(
    make_folder: Callable[[dict[str, str]], Folder], arguments: list[str], message: str
) -> None:
    """An option that can't work ends the session with pytest's code for wrong usage and one line that says why."""
    session = make_folder({"test_it.py": "def test_nothing(): pass\n"}).run(*arguments)
    assert session.code == pytest.ExitCode.USAGE_ERROR
    assert message in session.err
    assert "Traceback" not in session.err + session.out
