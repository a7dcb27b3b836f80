"""``concord replay``: a stored program again."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.commands.main import app
from harness.programs.stored import dumps
from harness.specs.program import Activation, Branch, Layout, Linear, Model, Norm, Optimizer, Program, Step
from tests.programs.hostile import CANARY, PAYLOADS, PROGRAMS

HEALTHY = Program(Model((3,), (Linear(4),)))
LIVE = Program(Model((3,), (Linear(3), Branch(Linear(3), "never"))))
"""A defect of PyTorch: the gradients of the first step are not averaged (pytorch/pytorch#128949)."""


def concord(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command as a user has it."""
    command = [sys.executable, "-c", "from harness.commands.main import main; main()", *arguments]
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
    assert "ranks 0 and 1 differ: micro-batch 0: gradient of linear0.weight: different bits" in ended.stdout


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
    status, output = replayed(str(tmp_path / "program.json"))
    assert (status, output.count("\n")) == (2, 1)
    assert message in output


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
    status, output = replayed(stored(HEALTHY, tmp_path), *options)
    assert status == 2
    assert message in output


def replayed(*arguments: str) -> tuple[int, str]:
    """The command in this process: its status, and what it printed, which is shown on a terminal as it is."""
    ended = CliRunner().invoke(app, ["replay", *arguments])
    assert ended.exception is None or isinstance(ended.exception, SystemExit), ended.exception
    assert "Traceback" not in ended.output
    assert not {c for c in ended.output if unicodedata.category(c) in ("Cc", "Cf") and c != "\n"}
    return ended.exit_code, ended.output


@pytest.mark.parametrize("options", [[], ["--source"]])
@pytest.mark.parametrize("payload", PAYLOADS[:6])
def test_payload(payload: str, options: list[str], tmp_path: Path) -> None:
    """A payload in the name of an option, or anywhere else, ends in one line before any source is made."""
    there = tmp_path / "there"
    payload = payload.replace(f"__import__('builtins').__setattr__('{CANARY}', 1)", f"open({str(there)!r}, 'w')")
    whole = json.loads(dumps(PROGRAMS["replicate"]))
    layout = whole["program"]["layout"]
    places: list[dict[str, object]] = [
        {**layout, "options": [[payload, True]]},
        {**layout, "options": [["hook", payload]]},
        {**layout, "wrapped": [payload]},
        {**layout, "stack": payload},
        {**layout, payload: 1},
    ]
    for other in places:
        file = tmp_path / "program.json"
        file.write_text(json.dumps({**whole, "program": {**whole["program"], "layout": other}}))
        status, said = replayed(str(file), *options)
        assert status == 2
        assert said.startswith(f"concord: {file}: ")
        assert said.count("\n") == 1
    assert not there.exists()


def _folder(path: Path) -> None:
    path.mkdir()


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(100 << 20)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _loop(path: Path) -> None:
    path.symlink_to(path)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_folder, "a folder, not a file"),
        (_pipe, "a pipe, not a file"),
        (_socket, "a socket, not a file"),
        (_device, "a device, not a file"),
        (_loop, "Too many levels of symbolic links"),
        (_huge, "larger than 1 MiB"),
        (lambda path: path.write_bytes(dumps(HEALTHY).encode() + b"\xff"), "this is no program: "),
        (lambda path: path.write_text("[" * 900_000), "this is no program: "),
        (lambda path: path.write_text(dumps(HEALTHY).replace(": 4", ": 4.0")), "Expected `int`, got `float`"),
        (lambda path: path.write_text(dumps(HEALTHY).replace(": 4", ": NaN")), "this is no program: "),
    ],
    ids=["folder", "pipe", "socket", "device", "loop", "huge", "no UTF-8", "nesting", "float", "NaN"],
)
def test_what_is_no_file_of_a_program(
    make: Callable[[Path], object], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What would block, never end, or be too large is not read; one line says so."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "\x1b[31mred.json"
    make(Path(file.name))
    status, said = replayed(str(file))
    assert (status, said.count("\n")) == (2, 1)
    assert said.startswith(f"concord: {tmp_path}/\\x1b[31mred.json: ")
    assert message in said


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (Program(Model((3,), (Activation(),))), "ValueError: optimizer got an empty parameter list"),
        (
            Program(Model((3,), (Norm("batch"),)), steps=(Step(rows=(1,)),)),
            "ValueError: Expected more than 1 value",
        ),
        (Program(Model((3,), (Linear(3, frozen=True),))), "RuntimeError: element 0 of tensors does not require grad"),
    ],
)
def test_no_device_can_train_it(program: Program, message: str, tmp_path: Path) -> None:
    """Of what torch refuses on one device, its reason is said in one line."""
    status, said = replayed(stored(program, tmp_path))
    assert (status, said.count("\n")) == (2, 1)
    assert f"one device can't train it: {message}" in said


def test_overflow(tmp_path: Path) -> None:
    """Of a program whose numbers overflow nothing is said: it is neither the same nor not."""
    wild = Program(HEALTHY.model, optimizer=Optimizer(rate=1e308))
    status, output = replayed(stored(wild, tmp_path))
    assert status == 2
    assert "may overflow in float64" in output


@pytest.mark.nightly
def test_subject(tmp_path: Path) -> None:
    """It runs on the stacks that it is told: the reference refuses what torch does wrong."""
    ended = concord("replay", stored(LIVE, tmp_path), "--subject", "reference")
    assert ended.returncode == 1
    assert "replicate of reference on 2 ranks (gloo on cpu)" in ended.stdout
    assert "harness/reference/replicate.py" in ended.stdout
