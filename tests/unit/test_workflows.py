"""Workflows of GitHub: where secrets are, what a runner of one's own is given, and which torch a machine gets."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORKFLOWS = {path.stem: path.read_text() for path in (ROOT / ".github/workflows").glob("*.yml")}
CPU = "https://download.pytorch.org/whl/cpu"
PIP = """#!/usr/bin/env bash
echo "$(basename "$0") $*" >>called
[ "$1" = -c ] && echo 2.13.0+mine || true
"""
PYTHON = """#!/usr/bin/env bash
echo "python3 $*" >>called
mkdir -p .venv/bin
for name in pip python concord; do cp "$(dirname "$0")/pip" .venv/bin/$name; done
"""


def steps(text: str) -> list[str]:
    """The steps of a workflow."""
    found = re.split(r"^      - ", text, flags=re.MULTILINE)[1:]
    return [re.split(r"\n {0,4}\S", step)[0] for step in found]


def scripts(text: str) -> list[str]:
    """What the steps of a workflow run in a shell."""
    inline = re.findall(r"^\s+(?:- )?run: ([^|>\n].*)$", text, re.MULTILINE)
    blocks = re.findall(r"^      (?:- |  )run: [|>]-?\n((?: {10}.*\n)+)", text, re.MULTILINE)
    return [*inline, *blocks]


def value(workflow: str, key: str, **known: str) -> object:
    """What an expression of a workflow comes to.

    ``known``: inputs and variables that are set, with ``_`` for the dot: ``inputs_labels``.
    """
    found = re.search(rf"{key}: (?:>-\s+)?\$\{{\{{(.*?)\}}\}}", WORKFLOWS[workflow], re.DOTALL)
    assert found is not None
    names = re.findall(r"\b(?:inputs|vars)\.\w+", found[1])
    python = re.sub(r"\b(inputs|vars)\.(\w+)", r"\1_\2", " ".join(found[1].split()))
    python = re.sub(r"!(?!=)", " not ", python).replace("&&", " and ").replace("||", " or ")
    values = {name.replace(".", "_"): "" for name in names} | known
    return eval(python, {"fromJSON": lambda text: f"labels {text}"}, values)


@pytest.mark.parametrize("name", WORKFLOWS)
def test_secrets_are_given_to_single_steps(name: str) -> None:
    """No secret is in the environment of a whole job; a job that is a workflow of ours hands it to such steps."""
    told = [line for line in WORKFLOWS[name].splitlines() if "secrets." in line]
    of_a_step = re.compile(r"(?:        env: \{ |          )CONCORD_HISTORY: ")
    of_a_call = re.compile(r"    secrets: \{ CONCORD_HISTORY: ")
    assert [line for line in told if not of_a_step.match(line) and not of_a_call.match(line)] == []
    assert len(told) == {"nightly": 2, "gpu": 1}.get(name, 0)
    assert "secrets: inherit" not in WORKFLOWS[name]


@pytest.mark.parametrize("name", WORKFLOWS)
def test_no_secrets_in_artifacts(name: str) -> None:
    """Only what Concord has written is uploaded, by steps that are given no secret."""
    uploads = [step for step in steps(WORKFLOWS[name]) if "upload-artifact" in step]
    assert uploads
    for step in uploads:
        assert re.search(r"\bpath: reports/out\b", step)
        assert ("secrets." in step, "env:" in step, "token" in step) == (False, False, False)


@pytest.mark.parametrize("name", WORKFLOWS)
def test_no_input_is_part_of_a_script(name: str) -> None:
    """Inputs and names of branches reach scripts as variables: as text, they could be commands."""
    assert scripts(WORKFLOWS[name])
    assert [script for script in scripts(WORKFLOWS[name]) if "${{" in script] == []


@pytest.mark.parametrize("name", ["gpu", "nightly"])
def test_runners_of_ones_own(name: str) -> None:
    """Whoever may open a pull request can't have a runner of one's own execute it, nor read the token that is left."""
    head = WORKFLOWS[name].partition("\njobs:")[0]
    assert ("pull_request:" in head, "push:" in head) == (False, False)
    kept = [step for step in steps(WORKFLOWS[name]) if "actions/checkout" in step and "persist-cred" not in step]
    assert len(kept) == {"gpu": 0, "nightly": 2}[name]  # those of the jobs on GitHub's own runners


@pytest.mark.parametrize(
    ("known", "runner", "index"),
    [
        ({}, "ubuntu-24.04", CPU),
        ({"vars_CONCORD_RUNNER": "mine"}, "mine", ""),
        ({"vars_CONCORD_RUNNER": "mine", "vars_CONCORD_TORCH_INDEX": "https://x/rocm"}, "mine", "https://x/rocm"),
        ({"inputs_labels": '["gpu"]'}, 'labels ["gpu"]', ""),
        ({"inputs_labels": '["gpu"]', "inputs_index": "https://x/xpu"}, 'labels ["gpu"]', "https://x/xpu"),
    ],
)
def test_torch_of_the_night(known: dict[str, str], runner: str, index: str) -> None:
    """Only GitHub's own runner gets wheels for the CPU."""
    assert (value("nightly", "runs-on", **known), value("nightly", "TORCH_INDEX", **known)) == (runner, index)


@pytest.fixture
def install(tmp_path: Path) -> Path:
    """A folder with the script that installs, and a Python and a pip that only note how they are called."""
    for name, text in {"python3": PYTHON, "pip": PIP}.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    (tmp_path / "constraints.txt").write_text("torch==2.13.0\nnumpy==2\n")
    return tmp_path


@pytest.mark.parametrize(
    ("variables", "venv", "torch"),
    [
        ({}, "python3 -m venv .venv", ["pip install -q torch==2.13.0"]),
        ({"TORCH": "", "TORCH_INDEX": ""}, "python3 -m venv .venv", ["pip install -q torch==2.13.0"]),
        (
            {"TORCH": "torch==2.12.1 torch_npu", "TORCH_INDEX": "https://x/y"},
            "python3 -m venv .venv",
            ["pip install -q torch==2.12.1 torch_npu --index-url https://x/y"],
        ),
        ({"TORCH": "installed", "TORCH_INDEX": "https://x/y"}, "python3 -m venv --system-site-packages .venv", []),
    ],
)
def test_install(install: Path, variables: dict[str, str], venv: str, torch: list[str]) -> None:
    """The torch that is asked for, or the one that is there, stays the one that is there."""
    environment = {"PATH": f"{install / 'bin'}:/usr/bin:/bin", **variables}
    subprocess.run(["bash", ".ci/install"], cwd=install, env=environment, check=True)
    first, *others = (install / "called").read_text().splitlines()
    assert first == venv
    assert others[: len(torch)] == torch
    assert others[-2:] == ["pip install -q -e . -c .venv/constraints.txt", "concord doctor"]
    assert len(others) == len(torch) + 3
    assert (install / ".venv/constraints.txt").read_text() == "torch==2.13.0+mine\nnumpy==2\n"


def test_constraints_of_the_installer(install: Path) -> None:
    """The constraints that it makes of ours pin the torch that is there, and pip finds the files that they name."""
    for file in ROOT.glob("constraints*.txt"):
        shutil.copy(file, install)
    environment = {"PATH": f"{install / 'bin'}:/usr/bin:/bin"}
    subprocess.run(["bash", ".ci/install"], cwd=install, env=environment, check=True)
    made = install / ".venv/constraints.txt"
    lines = made.read_text().splitlines()
    assert "torch==2.13.0+mine" in lines
    named = [made.parent / line.removeprefix("-c ") for line in lines if line.startswith("-c ")]
    assert named
    assert [file for file in named if not file.is_file()] == []


def jobs_of(name: str) -> dict[str, str]:
    """The text of each job of a workflow."""
    found = re.split(r"^  (\w+):\n", WORKFLOWS[name].partition("\njobs:\n")[2], flags=re.MULTILINE)
    return dict(zip(found[1::2], found[2::2], strict=True))


def test_who_may_attest() -> None:
    """Only the job that runs nothing of a vendor's can have a file attested, and no other workflow can."""
    jobs = jobs_of("attested")
    assert {name: "id-token: write, attestations: write" in job for name, job in jobs.items()} == {
        "run": False,
        "bundle": True,
    }
    assert ("PACKAGE" in jobs["run"], "pytest" in jobs["run"]) == (True, True)
    assert ("inputs." in jobs["bundle"], "vendor" in jobs["bundle"], "pytest" in jobs["bundle"]) == (False,) * 3
    assert [name for name, text in WORKFLOWS.items() if "id-token" in text] == ["attested"]
    head = WORKFLOWS["attested"].partition("\njobs:")[0]
    assert "\npermissions: {}" in head
    assert re.findall(r"^  (\w+):", head.partition("\non:\n")[2], re.MULTILINE) == ["workflow_call"]


def test_what_is_attested() -> None:
    """The file that is attested is the one that is uploaded, made by the Concord of the workflow's own commit."""
    jobs = jobs_of("attested")
    bundle = jobs["bundle"]
    (subject,) = re.findall(r"subject-path: (\S+) \}", bundle)
    assert f"-o {subject}\n" in bundle
    assert f"path: {subject} }}" in bundle
    for job in jobs.values():
        first = steps(job)[0]
        assert "repository: ${{ job.workflow_repository }}" in first
        assert "ref: ${{ job.workflow_sha }}" in first
