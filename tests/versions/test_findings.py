"""Findings by version: how a script ended is told apart, the page is made of data, and known defects agree with it."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.commands.main import app
from harness.profiles.model import Platform
from harness.profiles.reading import parse_defects
from harness.versions import findings
from harness.versions.environments import EnvironmentProblem
from harness.versions.findings import GONE, THERE, Ranks, Version, outcome, page, state
from harness.versions.scripts import Script

ROOT = Path(__file__).parents[2]
REPORT = "rank 0: expected 1, observed 2\n"
RAISED = 'Traceback (most recent call last):\n  File "x.py", line 1, in <module>\ntorch.x.OddError: no\n'


@pytest.mark.parametrize(
    ("statuses", "outputs", "expected"),
    [
        ([0, 0], ["", ""], GONE),
        ([0, 0], [REPORT, REPORT], GONE),
        ([1, 1], [REPORT, REPORT], "wrong result"),
        ([0, 1], ["", REPORT], "wrong result"),
        ([1, 0], ["", REPORT], "wrong result"),
        ([1, 1], [RAISED, REPORT], "wrong result"),
        ([1, 1], [RAISED, ""], "raises OddError"),
        ([1, 1], [f"[rank0]: {RAISED}", ""], "raises OddError"),
        ([1, 1], [RAISED + REPORT, ""], "wrong result"),
        ([1, -11], [REPORT, ""], "dies by signal 11"),
        ([None, None], ["", ""], "hangs"),
        ([0, None], ["", ""], "hangs"),
        ([1, None], [REPORT, ""], "hangs"),
        ([-6, None], ["", ""], "dies by signal 6"),
        ([0, 3], ["", ""], "exits with 3"),
    ],
)
def test_outcome(statuses: Sequence[int | None], outputs: Sequence[str], expected: str) -> None:
    """A crash says more than a hang, a hang more than a result, and a result more than an error."""
    assert outcome(statuses, outputs) == expected


SCRIPTS = {
    "fine": "print('rank 0: expected 1, observed 1')",
    "wrong": "print(f'rank {dist.get_rank()}: expected 1, observed 2'); sys.exit(dist.get_rank())",
    "raises": "raise ValueError('x') if dist.get_rank() else SystemExit(0)",
    "dies": "os.kill(os.getpid(), 9) if dist.get_rank() else None",
    "hangs": "threading.Event().wait() if dist.get_rank() else None",
    "fresh": "sys.exit('torch.distributed.fsdp' in sys.modules)",
    "forked": "sys.exit('torch.distributed.fsdp' not in sys.modules)",
    "leaves": "subprocess.Popen(['sleep', '1000']) if dist.get_rank() else None",
}
ENDS = {
    "fine": GONE,
    "wrong": "wrong result",
    "raises": "raises ValueError",
    "dies": "dies by signal 9",
    "hangs": "hangs",
    "fresh": GONE,
    "forked": GONE,
    "leaves": GONE,
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose findings end in every way."""
    folder = tmp_path / findings.FOLDER
    folder.mkdir(parents=True)
    for name, body in SCRIPTS.items():
        text = f"""
            # Seen with torch 1.0
            # Run:  torchrun --standalone --nproc-per-node=2 {name}.py
            # Python: {"fresh" if name == "fresh" else "any"}
            import os, subprocess, sys, threading
            import torch.distributed as dist
            dist.init_process_group("gloo")
            dist.barrier()  # or a rank that leaves at once breaks the connection that another still makes
            {body}
        """
        (folder / f"{name}.py").write_text(textwrap.dedent(text))
    (folder / "accelerator_x.py").write_text("# --nproc-per-node=2\n")
    (folder / "no_script.py").write_text("# a module\n")
    return tmp_path


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_scripts_run(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts run on real ranks of gloo, and each ends as it does, whatever the one before it did."""
    monkeypatch.setattr(findings, "SECONDS", 20.0)
    chosen = findings.scripts(checkout)
    assert [script.name for script in chosen] == sorted(SCRIPTS)
    ended = {script.name: how for script, how, _, _ in findings.tried(Path(sys.executable), checkout, chosen)}
    assert ended == ENDS


def test_python_without_torch(checkout: Path) -> None:
    """A Python in which no script can run is refused with its own words."""
    false = checkout / "python"
    false.write_text("#!/bin/sh\necho 'no module named torch' >&2\nexit 1\n")
    false.chmod(0o755)
    with pytest.raises(EnvironmentProblem, match="no module named torch"):
        Ranks(false, checkout)


@pytest.mark.timeout(300)
def test_command(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command keeps what it has seen beside what was known, and writes the page."""
    monkeypatch.chdir(checkout)
    findings.write(checkout, {"1.0": Version("1.0", "3.11", {"fine": "fails"})})
    ended = CliRunner().invoke(app, ["findings", "fine", "wrong"])
    assert ended.exit_code == 0, ended.output
    known = findings.read(checkout)
    assert known["1.0"].outcomes == {"fine": "fails"}
    (other,) = set(known) - {"1.0"}
    assert known[other].outcomes == {"fine": GONE, "wrong": "wrong result"}
    assert (checkout / findings.PAGE).read_text() == page(known, findings.scripts(checkout))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(["nonsense"], "no such script: nonsense"), (["--env", "nowhere"], "nowhere: neither a virtual environment")],
)
def test_bad_input(checkout: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], says: str) -> None:
    """A mistake gives one clear error."""
    monkeypatch.chdir(checkout)
    ended = CliRunner().invoke(app, ["findings", *arguments])
    assert (ended.exit_code, says in ended.output) == (2, True)


def test_not_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere than in a checkout there are no scripts, which the command says."""
    monkeypatch.chdir(tmp_path)
    ended = CliRunner().invoke(app, ["findings"])
    assert (ended.exit_code, "run it in a checkout" in ended.output) == (2, True)


def test_states() -> None:
    """A script that ends otherwise than with the version that it was written for is not taken for the defect."""
    known = {
        "2.11.0": Version("2.11.0", "3.11", {"a": GONE, "b": "wrong result", "c": "raises TypeError"}),
        "2.13.0": Version("2.13.0", "3.11", {"a": "hangs", "b": "wrong result", "c": "wrong result", "d": GONE}),
    }
    scripts = [Script(Path(f"{name}.py"), 2, "2.13.0") for name in "abcd"]
    assert [state(script, "2.11.0", known) for script in scripts] == [GONE, THERE, "raises TypeError", ""]
    assert [state(script, "2.13.0", known) for script in scripts] == [THERE, THERE, THERE, GONE]
    assert state(Script(Path("c.py"), 2, "2.11.0"), "2.11.0", known) == THERE
    assert "| 2.11.0 | 3.11 | 3 | 1 | 1 | 1 |" in page(known, scripts)


@pytest.fixture(scope="module")
def known() -> Iterator[dict[str, Version]]:
    """What is known of each version."""
    return findings.read(ROOT)  # type: ignore[return-value]


def test_page(known: dict[str, Version]) -> None:
    """docs/findings-by-version.md is made of the data."""
    assert (ROOT / findings.PAGE).read_text() == page(known, findings.scripts(ROOT))


def test_every_script_was_tried(known: dict[str, Version]) -> None:
    """Every script on the host has an outcome in every version, and shows its defect in the one it was written for."""
    scripts = findings.scripts(ROOT)
    names = {script.name for script in scripts}
    assert [version for version, each in known.items() if names ^ set(each.outcomes)] == []
    assert [script.name for script in scripts if state(script, script.seen, known) != THERE] == []


def test_known_defects_agree(known: dict[str, Version]) -> None:
    """A known defect counts in a version exactly if its script shows it there."""
    wrong = []
    for owner in ("pytorch", "gloo"):
        file = f"fixtures/defects/{owner}.toml"
        for defect in parse_defects((ROOT / file).read_text(), file).defects:
            for version, each in known.items():
                if defect.waiver.defect not in each.outcomes:
                    continue
                counts = defect.waiver.when.holds(
                    Platform(torch=version, python="3.11.7", machine="x86_64", os="Linux 6")
                )
                if counts != (each.outcomes[defect.waiver.defect] != GONE):
                    wrong.append(f"{defect.waiver.defect}: {'counts' if counts else 'does not count'} with {version}")
    assert wrong == []
