"""Reproducers are run for real, with torchrun: on healthy software, on an injected defect, on a live one."""

from __future__ import annotations

import ast
import contextlib
import math
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from harness.oracles.exact import Difference
from harness.programs import assertion, prelude, standalone
from harness.programs.check import truth_of
from harness.programs.definitions import _parts, definitions
from harness.programs.problem import Problem
from harness.programs.reproducer import reproducer, write
from harness.programs.stored import loads
from harness.specs.program import Branch, Compile, Embedding, Layout, Linear, Model, Norm, Program, Residual, Step
from harness.stacks import seen, training
from harness.stacks.seen import Seen
from tests.programs.hostile import CANARY, PAYLOADS

REPLICATE = "import importlib\nr = importlib.import_module('torch.distributed._composable.replicate')\n"
"""The module; as an attribute of its package there is the function of the same name."""
STEPS = (Step(rows=(3, 4), reload=True, evaluate=True),)
EXACT = Program(Model((2,), (Embedding(3), Residual((Linear(3),))), tokens=5), steps=STEPS)
ROUNDED = Program(Model((3,), (Linear(4), Norm())), steps=STEPS, dtype="float32", span=0, denominator=1)


def torchrun(file: Path, ranks: int, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a file as its head says, in a folder and with a path that have nothing of Concord."""
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTEST_CURRENT_TEST")}
    command = [sys.executable, "-I", "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", str(file)]
    if "PYTHONPATH" in environment:
        command.remove("-I")
    return subprocess.run(
        command, cwd=file.parent, env={**env, **environment}, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize(("subject", "said"), [("torch", False), ("reference", True)])
def test_subject(subject: str, said: bool) -> None:
    """What was seen on another subject than torch says so, and that the file itself runs on torch."""
    text = reproducer(EXACT, what="x: other bits", subject=subject)
    assert f"#     subject: {subject}" in text
    assert ("It was seen on the subject 'reference'.  This file runs on the stacks of torch" in text) == said


@pytest.mark.parametrize("payload", PAYLOADS)
def test_payloads(payload: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ranks say, and names from a profile or the environment, are comments and strings in it, and no code."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", payload.encode(errors="replace").decode()[:1000].replace("\0", ""))
    text = reproducer(EXACT, what=f"{payload}: other bits", backend=payload, device=payload, subject=payload)
    tree = ast.parse(text)
    plain = ast.parse(reproducer(EXACT, what="x: other bits", backend="gloo", device="cpu"))
    assert CANARY not in {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    given = {value.value for value in constants(tree) if value.value not in {c.value for c in constants(plain)}}
    assert given <= {payload}
    for value in [*constants(tree), *constants(plain)]:
        value.value = "the same"
    assert ast.dump(tree) == ast.dump(plain)


def constants(tree: ast.Module) -> list[ast.Constant]:
    """The strings that say how the program is run."""
    (case,) = [one for one in tree.body if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == "CASE"]
    return [n for n in ast.walk(case) if isinstance(n, ast.Constant) and isinstance(n.value, str)]


def written(program: Program, folder: Path, *problems: Problem, what: str = "", limit: int = 120) -> Path:
    truth = truth_of(program)
    file = folder / "repro.py"
    what = what or "\n".join(map(str, problems))
    file.write_text(reproducer(program, what=what, problems=problems, truth=truth, limit=limit))
    assert not re.search(r"^(from|import) harness", file.read_text(), re.MULTILINE)
    return file


LAYOUTS = {
    "replicate": Layout("replicate"),
    "replicate_fsdp": Layout("replicate_fsdp", wrapped=("residual1",)),
    "tp_extension": Layout("tp_extension", tensor=1, options=(("use_orig_params", True),)),
    "dynamo": Layout("dynamo", compiled=Compile("eager")),
}


@pytest.mark.parametrize(
    "stack", [pytest.param(stack, marks=[pytest.mark.nightly] * (stack != "dynamo")) for stack in LAYOUTS]
)
def test_healthy(stack: str, tmp_path: Path) -> None:
    """On every stack a file for a healthy program exits with 0."""
    program = Program(EXACT.model, LAYOUTS[stack], EXACT.steps)
    ended = torchrun(written(program, tmp_path, what="nothing"), 2)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "rank 0: as on one device" in ended.stdout
    assert "rank 1: as on one device" in ended.stdout


@pytest.mark.parametrize("program", [EXACT, ROUNDED], ids=["exact", "rounded"])
def test_injected(program: Program, tmp_path: Path) -> None:
    """A defect that is put into torch makes it print expected and observed, and exit with another status."""
    name = "residual1.0.weight" if program is EXACT else "linear0.weight"
    gradient = Seen("gradient", name, micro_batch=1)
    file = written(program, tmp_path, Problem("values", gradient, (0,), found=Difference("x", "y")))
    (tmp_path / "defect").mkdir()
    (tmp_path / "defect" / "sitecustomize.py").write_text(
        f"{REPLICATE}r.replicate = lambda module, **options: module\n"
    )
    ended = torchrun(file, 2, PYTHONPATH=str(tmp_path / "defect"))
    assert ended.returncode != 0
    assert f"rank 0: {gradient}: " in ended.stdout
    assert "expected tensor(" in ended.stdout
    assert "observed tensor(" in ended.stdout


DOUBLED = """
import torch, torch.distributed as dist
step = torch.optim.SGD.step
def damaged(self, closure=None):
    if dist.is_initialized() and dist.get_world_size() > 1:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(2)
    return step(self, closure)
torch.optim.SGD.step = damaged
"""


def test_of_a_world(tmp_path: Path) -> None:
    """A defect that is there wherever there is a world is not taken for the truth: one device is alone."""
    parameter = Seen("parameter", "residual1.0.weight", step=0)
    file = written(EXACT, tmp_path, Problem("values", parameter, (0,), found=Difference("x", "y")))
    (tmp_path / "defect").mkdir()
    (tmp_path / "defect" / "sitecustomize.py").write_text(DOUBLED)
    ended = torchrun(file, 2, PYTHONPATH=str(tmp_path / "defect"))
    assert ended.returncode != 0
    assert "rank 0: step 0: parameter residual1.0.weight: " in ended.stdout
    assert "expected tensor(" in ended.stdout


def test_live(tmp_path: Path) -> None:
    """Composable DDP leaves gradients unreduced in the first step when a module is unused (pytorch/pytorch#128949)."""
    model = Model((3,), (Linear(3), Branch(Linear(3), "never")))
    file = written(Program(model, Layout("replicate")), tmp_path, what="gradients differ")
    ended = torchrun(file, 2)
    assert ended.returncode != 0
    assert "rank 1: micro-batch 0: gradient of linear0.weight: different bits than on rank 0" in ended.stdout


def test_hang(tmp_path: Path) -> None:
    """A hang ends after the limit, with stacks and another status."""
    file = written(EXACT, tmp_path, what="a hang", limit=25)
    (tmp_path / "defect").mkdir()
    (tmp_path / "defect" / "sitecustomize.py").write_text(
        f"{REPLICATE}import os, time\n"
        "r.replicate = lambda module, **options: time.sleep(1000 * int(os.environ['RANK'])) or module\n"
    )
    ended = torchrun(file, 2, PYTHONPATH=str(tmp_path / "defect"))
    assert ended.returncode != 0
    assert re.search(r"Timeout \(0:00:25\)!|[Tt]imed? ?out", ended.stderr)


def case_of(text: str) -> Any:
    """What a reproducer asks of ranks, as it would be there."""
    names: dict[str, Any] = {"__name__": "reproducer"}
    with contextlib.ExitStack() as stack:
        sys.modules["reproducer"] = ModuleType("reproducer")
        stack.callback(sys.modules.pop, "reproducer")
        exec(compile(text, "reproducer", "exec"), names)
    return names["CASE"]


def test_only_what_differed_may_differ() -> None:
    """Tolerances are those of what differed, whatever the head of the file says; what was missing must be there."""
    one, other = Seen("gradient", "linear0.weight", micro_batch=1), Seen("parameter", "linear0.bias", step=0)
    truth = truth_of(ROUNDED)
    assert truth.bounded is not None
    problems = [Problem("bits", one, (0, 1)), Problem("missing", other, (0,)), Problem("missing", other, (1,))]
    case = case_of(reproducer(ROUNDED, what="", problems=problems, truth=truth))
    assert case.allowed == {seen: truth.bounded.tolerance[seen].flatten().tolist() for seen in (one, other)}
    assert case.promised == {other}
    nothing = case_of(reproducer(ROUNDED, what=f"{one}: there is none", truth=truth))
    assert (nothing.allowed, nothing.promised) == ({}, frozenset())
    assert case_of(reproducer(EXACT, what="", problems=problems, truth=truth_of(EXACT))).allowed is None


def test_what_nothing_is_known_of() -> None:
    """A tolerance that is infinite, as after wild clipping, is a number in the file as well."""
    gradient = Seen("gradient", "linear0.weight", micro_batch=1)
    truth = truth_of(ROUNDED)
    assert truth.bounded is not None
    truth.bounded.tolerance[gradient].fill_(math.inf)
    case = case_of(reproducer(ROUNDED, what="", problems=[Problem("bits", gradient, (0, 1))], truth=truth))
    assert case.allowed == {gradient: [math.inf] * 12}
    allowed, one = SimpleNamespace(**vars(case)), standalone.Party(parts=1)
    found = {gradient: torch.full((4, 3), math.nan)}
    assert standalone.wrong_values(allowed, one, truth.tensors, found) == []  # type: ignore[arg-type]
    allowed.allowed = {gradient: [1.0] * 12}
    assert len(standalone.wrong_values(allowed, one, truth.tensors, found)) == 1  # type: ignore[arg-type]


def test_one_name_for_one_thing() -> None:
    """No two of the modules that every reproducer stands on define the same name; definitions() checks a stack's."""
    modules = (seen, training, prelude, standalone)
    names = [each for module in modules for each in _parts(module.__file__ or "").defined]
    assert sorted(names) == sorted(set(names))


def test_head_and_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head has command, findings and environment, none of it as code; the program is beside it."""
    monkeypatch.setenv("CONCORD_REPRODUCERS", str(tmp_path / "deep" / "a folder"))
    what = 'rank 0: one line\n"""\nimport os; os.abort()\n' + "x" * 1000
    file, command = write(EXACT, "t.py::test[a/../b \n]", what=what, truth=None, backend="gloo", device="cpu")
    assert file.parent == tmp_path / "deep" / "a folder"
    assert command == f"torchrun --nproc-per-node=2 '{file}'"
    head = re.split(r"\n\n+(?:from|import) ", file.read_text())[0]
    assert all(line.startswith("#") for line in head.splitlines())
    assert "torch: 2." in head
    assert max(map(len, head.splitlines())) < 250
    assert loads(file.with_suffix(".json").read_text()) == EXACT
    compile(file.read_text(), str(file), "exec")


def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk the smallest failure so far stays, whole, and what was found still is what is said."""
    monkeypatch.setenv("CONCORD_REPRODUCERS", str(tmp_path))
    first, _ = write(EXACT, "a", what="it differs", truth=None, backend="gloo", device="cpu")
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    error = ValueError("what was found")
    try:
        spec = SimpleNamespace(backend="gloo", device="cpu", subject="torch")
        with monkeypatch.context() as patch:
            patch.setattr(assertion.reproducer, "name_of_test", lambda: "a")
            assertion.write(SimpleNamespace(spec=spec), ROUNDED, error, "it differs more", None)  # type: ignore[arg-type]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before
    (note,) = error.__notes__
    assert note.startswith("no reproducer could be written: ")
    assert f"File too large: '{first}'" in note


def test_links_in_a_shared_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a link in the place of a reproducer leads to is as it was."""
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "repro_a.py").symlink_to("precious")
    (tmp_path / "repro_a.json").symlink_to("precious")
    monkeypatch.setenv("CONCORD_REPRODUCERS", str(tmp_path))
    file, _ = write(EXACT, "a", what="it differs", truth=None, backend="gloo", device="cpu")
    assert (tmp_path / "precious").read_text() == "precious"
    assert loads(file.with_suffix(".json").read_text()) == EXACT


def test_only_what_is_needed() -> None:
    """Definitions come with what they use in turn, and with nothing else."""
    text = definitions([training], {"whole"})
    assert "def whole(" in text
    assert "from torch.distributed.tensor import DTensor" in text
    assert "def reload(" not in text
    assert "FullyShardedDataParallel" not in text
