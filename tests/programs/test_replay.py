"""``concord replay``: a stored program again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from harness.programs.spec import Branch, Layout, Linear, Model, Optimizer, Program
from harness.programs.stored import dumps

HEALTHY = Program(Model((3,), (Linear(4),)))
LIVE = Program(Model((3,), (Linear(3), Branch(Linear(3), "never"))))
"""A defect of PyTorch: the gradients of the first step are not averaged (pytorch/pytorch#128949)."""


def concord(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command as a user has it."""
    command = [sys.executable, "-c", "from harness.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[2])


def stored(program: Program, folder: Path) -> str:
    file = folder / "program.json"
    file.write_text(dumps(program))
    return str(file)


def test_healthy(tmp_path: Path) -> None:
    """It says what is compared, how, and that it is the same."""
    ended = concord("replay", stored(HEALTHY, tmp_path), "--times", "2")
    assert ended.returncode == 0, ended.stderr
    assert "replicate on 2 ranks (gloo on cpu), compared bit for bit" in ended.stdout
    assert "run 2 of 2: the same: 6 tensors on every rank" in ended.stdout


def test_defect(tmp_path: Path) -> None:
    """It says what differs, and exits with 1."""
    ended = concord("replay", stored(LIVE, tmp_path))
    assert ended.returncode == 1
    assert "ranks 0 and 1 differ: micro-batch 0: gradient of linear0.weight: other bits" in ended.stdout


def test_source(tmp_path: Path) -> None:
    """It prints the program as Python, and nothing else."""
    ended = concord("replay", "--source", stored(Program(HEALTHY.model, Layout("replicate_fsdp")), tmp_path))
    assert ended.returncode == 0
    compile(ended.stdout, "program", "exec")
    assert "on_replicate_fsdp(party, model, [''])" in ended.stdout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "program.json: No such file or directory"),
        ("", "this is no program"),
        ('{"program": {"model": {"inputs": [3], "layers": [{"type": "Cube"}]}}, "version": 1}', "Invalid value 'Cube'"),
        (dumps(Program(Model((3,), (Linear(4), Branch(Linear(5)))))), "the body of branch makes (5,) of (4,)"),
    ],
)
def test_bad_input(text: str | None, message: str, tmp_path: Path) -> None:
    """One line that says what is wrong where, and status 2."""
    if text is not None:
        (tmp_path / "program.json").write_text(text)
    ended = concord("replay", str(tmp_path / "program.json"))
    assert ended.returncode == 2
    assert message in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--timeout", "0"], "--timeout"),
        (["--device", "nonsense"], "no nonsense device"),
        (["--backend", "nonsense"], "torch has no backend 'nonsense' here"),
        (["--profile", "nonsense"], "nonsense"),
        (["--subject", "nonsense"], "no such subject; there are torch, reference"),
    ],
)
def test_bad_options(options: list[str], message: str, tmp_path: Path) -> None:
    """What can't be run as asked says so before any rank starts, with status 2."""
    ended = concord("replay", stored(HEALTHY, tmp_path), *options)
    assert ended.returncode == 2
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr


def test_overflow(tmp_path: Path) -> None:
    """Of a program whose numbers overflow nothing is said: it is neither the same nor not."""
    wild = Program(HEALTHY.model, optimizer=Optimizer(rate=1e308))
    ended = concord("replay", stored(wild, tmp_path))
    assert ended.returncode == 2
    assert "may overflow in float64" in ended.stderr


def test_subject(tmp_path: Path) -> None:
    """It runs on the stacks that it is told: the reference refuses what torch does wrong."""
    ended = concord("replay", stored(LIVE, tmp_path), "--subject", "reference")
    assert ended.returncode == 1
    assert "replicate of reference on 2 ranks (gloo on cpu)" in ended.stdout
    assert "harness/reference/replicate.py" in ended.stdout
