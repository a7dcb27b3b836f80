"""Sources of a commit: which one a name means, what a working tree is, and a worktree that is removed again."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from harness.versions.commits import NoCommit, checked_out, commit_of, repository, working_tree


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.invalid", "-c", "commit.gpgsign=false")
    return subprocess.run(
        ["git", *identity, *words], cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with two commits of one file."""
    found = tmp_path / "repository"
    found.mkdir()
    git(found, "init", "-q", "-b", "main")
    for text in ("one", "two"):
        (found / "file").write_text(text)
        git(found, "add", "file")
        git(found, "commit", "-q", "-m", text)
    return found


def test_a_commit_is_checked_out_and_removed(root: Path, tmp_path: Path) -> None:
    """The worktree has the commit's files, the repository keeps its own, and nothing is left."""
    commit = commit_of(root, "main~1")
    with checked_out(root, commit, tmp_path / "deep" / "tree") as tree:
        assert (tree / "file").read_text() == "one"
        assert (root / "file").read_text() == "two"
    assert not tree.exists()
    assert git(root, "worktree", "list").count("\n") == 0


def test_a_worktree_that_was_left(root: Path, tmp_path: Path) -> None:
    """One that a killed call left, with changes in it, is replaced."""
    commit = commit_of(root, "main~1")
    git(root, "worktree", "add", "--detach", str(tmp_path / "tree"), "main")
    (tmp_path / "tree" / "file").write_text("changed")
    with checked_out(root, commit, tmp_path / "tree") as tree:
        assert (tree / "file").read_text() == "one"


def test_a_folder_of_somebody_else_is_kept(root: Path, tmp_path: Path) -> None:
    """A folder that is no worktree is not removed."""
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "mine").write_text("")
    with pytest.raises(NoCommit, match="worktree"), checked_out(root, commit_of(root, "main"), tmp_path / "tree"):
        pass
    assert (tmp_path / "tree" / "mine").exists()


def test_names(root: Path) -> None:
    """Branches, ids and HEAD are commits; options of git are not."""
    assert commit_of(root, "main") == commit_of(root, "HEAD") == git(root, "rev-parse", "HEAD")
    for name in ("nothing", "--all", "main:file", "-x", ""):
        with pytest.raises(NoCommit, match="git rev-parse"):
            commit_of(root, name)


def test_working_tree(root: Path, tmp_path: Path) -> None:
    """A change of a file changes the description; results do not."""
    clean = working_tree(root, root / "out")
    assert clean == commit_of(root, "HEAD")[:12]
    (root / "out").mkdir()
    (root / "out" / "result").write_text("")
    assert working_tree(root, root / "out") == clean
    (root / "file").write_text("three")
    changed = working_tree(root, root / "out")
    assert changed.startswith(f"{clean} with changes ")
    (root / "new").write_text("")
    assert working_tree(root, tmp_path / "elsewhere") != changed


def test_no_repository(tmp_path: Path) -> None:
    """It is said."""
    with pytest.raises(NoCommit, match="not a git repository"):
        repository(tmp_path)
