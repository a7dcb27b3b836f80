"""No credentials get out of a run: neither into its results and what is made of them, nor onto the terminal."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sessions import Folder

from harness import results
from reports.build import build, load
from reports.markdown import markdown
from reports.page import page

pytestmark = pytest.mark.slow


def test_credentials_stay_in_the_process(make_folder: Callable[[dict[str, str]], Folder]) -> None:
    """Results, page, JUnit file and terminal have no credentials of environment, command line, or tests' failures."""
    secrets = {
        "CONCORD_HISTORY": "postgresql://bob:hunter2@db/perf",
        "MPI_PWD": "Tr0ub4dor&3",
        "TORCH_HUB_PAT": "ghp_x8Jk2aQ9vLm3Zt7Rb1Yc5Wd0",
        "ALERTS": "https://hooks.slack.com/services/T01234567/B01234567/aBc1dEf2gHi3jKl4mNo5pQr6",
        "PYTEST_ADDOPTS": "-o cache_dir=https://ann:s3cr3t99@h/x -p no:cacheprovider",
    }
    text = """
        import os
        import pytest

        @pytest.mark.parametrize("token", [os.environ["TORCH_HUB_PAT"]])
        def test_leaks(token):
            print(dict(os.environ))
            raise RuntimeError(f"{os.environ} password=never-heard-of postgresql://carl:swordfish1@db/x")
    """
    folder = make_folder({"suites/collectives/test_leaks.py": text})
    session = folder.run("--concord-results", "out", "--junitxml=junit.xml", env=secrets)
    (path,) = session.folder.glob("out/*/results.jsonl")
    made = build([load(path)])
    texts = path.read_text() + page(made) + markdown(made, largest=1 << 20)
    leaks = ["hunter2", "Tr0ub4dor", "ghp_x8", "aBc1dEf2", "s3cr3t99", "never-heard-of", "swordfish1"]
    assert [leak for leak in leaks if leak in texts] == []
    texts = session.out + session.err + (session.folder / "junit.xml").read_text()
    texts = texts.replace(f"test_leaks[{secrets['TORCH_HUB_PAT']}]", "")  # names of tests are as pytest made them
    assert [leak for leak in leaks if leak in texts] == []
    assert "RuntimeError: environ({" in session.out
    assert results.read(path).counts()["failed"] == 1
