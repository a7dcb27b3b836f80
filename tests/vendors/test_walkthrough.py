"""The walk-through for vendors does what it says, from a fresh clone; and what reads it is tested."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest
from environments import ROOT
from walkthrough import BadPage, Block, blocks_of, commands

PAGE = ROOT / "docs" / "vendors.md"
LONGEST = 600.0
"""Seconds for the whole page, on two cores."""


def test_blocks_keep_their_order_language_and_section() -> None:
    """Two blocks, of which one holds a fence of its own."""
    page = "# Title\n\n```sh\none\n```\n## Next\n````md\n```sh\ninner\n```\n````\n"
    assert blocks_of(page) == [Block("sh", "one\n", 3, "Title"), Block("md", "```sh\ninner\n```\n", 7, "Next")]


def test_a_block_that_never_ends_is_named() -> None:
    """A page that was cut off."""
    with pytest.raises(BadPage, match="line 3: the block never ends"):
        blocks_of("text\n\n```sh\nrm x\n")


@pytest.mark.parametrize("garbage", ["", "\0\r\n\x1b[31m", "``` `` ```", "# # #\n", "é" * 10_000])
def test_garbage_has_no_blocks(garbage: str) -> None:
    """Pages that are none."""
    assert blocks_of(garbage) == []


def test_commands_are_joined_and_comments_left_out() -> None:
    """A command on two lines; only blocks of sh are executed."""
    block = Block("sh", "# why\na \\\n  b\n\nc\n", 1, "")
    assert commands(block) == ["a    b", "c"]
    assert block.executed
    assert not Block("toml", "a = 1\n", 1, "").executed


def test_the_page_names_files_that_are_there() -> None:
    """What comes after --profile, and what is installed."""
    words = [word for block in blocks_of(PAGE.read_text()) for line in commands(block) for word in line.split()]
    named = [word for word in words if word.startswith(("fixtures/", "suites/"))]
    assert named
    assert [word for word in named if not (ROOT / word).exists()] == []


def test_the_page_shows_the_entry_points_of_the_package() -> None:
    """The TOML on the page is in the package's own pyproject.toml."""
    (shown,) = [block.text.strip() for block in blocks_of(PAGE.read_text()) if block.language == "toml"]
    assert shown in (ROOT / "fixtures/vendors/shm/pyproject.toml").read_text()


def here(command: str) -> str:
    """The clone is made of this repository."""
    return f"git clone -q {ROOT} concord && cd concord" if command.startswith("git clone") else command


@pytest.mark.nightly
@pytest.mark.timeout(LONGEST + 300)
def test_the_walk_through(tmp_path: Path) -> None:
    """Every block of commands in one shell, one after another."""
    script = ["set -euo pipefail"]
    for block in blocks_of(PAGE.read_text()):
        if block.executed:
            script += [f"echo '== line {block.line}'", *map(here, commands(block))]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "PYTHONPATH", "COV_"))}
    began = time.monotonic()
    done = subprocess.run(
        ["bash", "-c", "\n".join(script)], cwd=tmp_path, env=kept, capture_output=True, text=True, timeout=LONGEST + 240
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert time.monotonic() - began < LONGEST
