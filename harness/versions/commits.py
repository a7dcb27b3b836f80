"""Sources of a commit: a worktree of git in which another commit of the same repository is checked out."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from harness.safe_io.shown import one_line

_LONGEST = 300.0
_OF_GIT = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")
"""Variables with which a hook of git points at its own repository."""


class NoCommit(ValueError):
    """The error for a commit that can't be checked out; it says why."""


def repository(folder: Path) -> Path:
    """Return the top folder of the repository that a folder is in.  Errors: :class:`NoCommit`."""
    return Path(_git(folder, "rev-parse", "--show-toplevel"))


def commit_of(root: Path, name: str) -> str:
    """Return the full id of a commit, a branch or a tag.  Errors: :class:`NoCommit`."""
    return _git(root, "rev-parse", "--verify", "--end-of-options", f"{name}^{{commit}}")


def between(root: Path, good: str, bad: str) -> list[tuple[str, str]]:
    """Return the commits from ``good`` to ``bad`` along first parents, both included, each with its subject line.

    Errors: :class:`NoCommit` if ``good`` is not one of them.
    """
    first, last = commit_of(root, good), commit_of(root, bad)
    lines = _git(root, "log", "--first-parent", "--reverse", "--format=%H %s", f"{first}..{last}").splitlines()
    found = [(commit, one_line(subject)[:100]) for commit, _, subject in (line.partition(" ") for line in lines)]
    if not found or _git(root, "rev-parse", "--verify", f"{found[0][0]}^1") != first:
        raise NoCommit(f"{good} is no ancestor of {bad} along first parents, or the same commit")
    return [(first, one_line(_git(root, "log", "-1", "--format=%s", first))[:100]), *found]


def working_tree(root: Path, without: Path) -> str:
    """Describe the sources in the working tree: the commit, and a digest of what was changed since.

    ``without``: a folder of results, whose files are no sources.  Errors: :class:`NoCommit`.
    """
    head = commit_of(root, "HEAD")
    places = ["--", ".", *([f":(exclude){without.relative_to(root)}"] if without.is_relative_to(root) else [])]
    others = _git(root, "ls-files", "--others", "--exclude-standard", *places)
    changed = _git(root, "diff", "HEAD", *places) + others
    digest = hashlib.sha256(changed.encode(errors="replace")).hexdigest()[:8]
    return f"{head[:12]} with changes {digest}" if changed else head[:12]


@contextlib.contextmanager
def checked_out(root: Path, commit: str, folder: Path) -> Iterator[Path]:
    """Check a commit out into a new folder, and yield it; it is removed afterwards.  Errors: :class:`NoCommit`."""
    with contextlib.suppress(NoCommit):  # of a call that was killed
        _git(root, "worktree", "remove", "--force", str(folder))
    folder.parent.mkdir(parents=True, exist_ok=True)
    _git(root, "worktree", "add", "--detach", "--force", str(folder), commit)
    try:
        yield folder
    finally:
        with contextlib.suppress(NoCommit):
            _git(root, "worktree", "remove", "--force", str(folder))


def _git(folder: Path, *words: str) -> str:
    variables = {name: value for name, value in os.environ.items() if name not in _OF_GIT}
    try:
        done = subprocess.run(
            ["git", *words],  # noqa: S607 - git is where the user's PATH says
            cwd=folder,
            env=variables,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LONGEST,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        raise NoCommit(f"git {words[0]}: {one_line(str(e))}") from e
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2] or f"exit status {done.returncode}"
        raise NoCommit(f"{folder}: git {words[0]}: {one_line(last)}")
    return done.stdout.strip()
