"""concord probe and concord profile check, as people call them, with real ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from harness.commands.main import app
from harness.profiles.shelf import Shelf

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[2]

DEFECTIVE = '''
"""gloo under another name, which dies of bfloat16, never ends a scatter, and adds one to maxima."""

import os

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

def made(store, rank, size, timeout):
    return distributed_c10d.ProcessGroupGloo(store, rank, size, timeout=timeout)

dist.Backend.register_backend("defective", made, devices=["cpu"])
all_reduce = dist.all_reduce

def dying(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
    if tensor.dtype == torch.bfloat16:
        os._exit(9)
    work = all_reduce(tensor, op, group, async_op)
    if op == dist.ReduceOp.MAX:
        tensor.add_(1)
    return work

def hanging(*args, **options):
    dist.recv(torch.zeros(1), 1 - dist.get_rank())  # which nobody sends

dist.all_reduce, dist.scatter = dying, hanging
'''


@pytest.fixture
def concord(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs the command in the folder of the test, whose modules ranks can import."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return lambda *arguments: CliRunner().invoke(app, list(arguments))


@pytest.mark.nightly
def test_defective_backend(tmp_path: Path, concord: Callable[..., Any]) -> None:
    """A crash, a hang and wrong values are outcomes; all else is found, and claimed in the draft."""
    (tmp_path / "defective.py").write_text(DEFECTIVE)
    ended = concord(
        "probe",
        *("--backend=defective", "--device=cpu", "--imports=defective", "--sizes=2", "--timeout=20"),
        *("--stacks=collectives", "--output=mine.toml", "--json=found.json"),
    )
    assert ended.exit_code == 0, ended.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    ends = {(t["collective"], t["dtype"], t["op"]): t["end"] for t in found["trials"]}
    sums = [
        end for (name, dtype, op), end in ends.items() if (name, op) == ("all_reduce", "SUM") and dtype != "bfloat16"
    ]
    assert {ends["all_reduce", "bfloat16", op] for op in ("SUM", "MAX")} == {"crashed"}
    assert {end for (name, dtype, op), end in ends.items() if (name, op) == ("all_reduce", "MAX")} >= {"wrong"}
    assert {end for (name, *_), end in ends.items() if name == "scatter"} == {"hung", "not-tried"}
    assert set(sums) == {"right", "refused"}
    assert {end for (name, *_), end in ends.items() if name == "all_gather"} == {"right", "refused"}
    claims = Shelf(tmp_path).read(tmp_path / "mine.toml").claims
    assert not claims.has("all_reduce", "bfloat16", "SUM")
    assert not claims.has("scatter", "float32")
    assert not claims.has("all_reduce", "float32", "MAX")
    assert claims.has("reduce", "float32", "MAX")
    assert claims.has("all_reduce", "float32", "SUM")
    text = (tmp_path / "mine.toml").read_text()
    assert "# all_reduce of bfloat16 with SUM: crashed: rank " in text
    assert "# scatter of bool, uint8, int8: hung: deadlock: " in text


def test_against(tmp_path: Path, concord: Callable[..., Any]) -> None:
    """What gloo can and a profile omits is undeclared; what a profile claims and gloo can't is not found, and told."""
    (tmp_path / "mine.toml").write_text(
        'name = "mine"\ninherits = "cpu-gloo"\n[collectives]\ndtypes = ["float32", "complex64"]\n'
        '[features]\ncollectives = ["messages", "splitting"]\n'
    )
    arguments = ("probe", "--against", "mine.toml", "--sizes", "1,2", "--timeout", "60", "--json", "found.json")
    ended = concord(*arguments)
    assert ended.exit_code == 1, ended.stderr
    told = json.loads((tmp_path / "found.json").read_text())["against"]
    assert {"all_reduce of float64 with SUM", "gather of int8", "objects of collectives"} <= set(told["undeclared"])
    assert [line.split(":")[0] for line in told["not_found"] if "AVG" not in line and "PREMUL" not in line] == [
        "gather of complex64",
        "splitting of collectives",
    ], told["not_found"]
    assert f"undeclared: {len(told['undeclared'])}\n" in ended.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--sizes", "1,x"), "concord: --sizes 1,x: whole numbers from 1, with commas between them"),
        (("--stacks", "replicat"), "concord: --stacks: 'replicat' is not a stack; there are collectives, "),
        (("--against", "none.toml"), "concord: --against:\nnone.toml: No such file or directory"),
        (("--device", "nothing"), "concord: no nothing device: "),
        (("--output", "mine.toml"), "concord: --output mine.toml: the file exists, and you may have edited it: "),
    ],
)
def test_bad_input(tmp_path: Path, concord: Callable[..., Any], arguments: tuple[str, ...], said: str) -> None:
    """Bad input is one clear error, and nothing is written over a profile."""
    (tmp_path / "mine.toml").write_text("# edited\n")
    ended = concord("probe", *arguments)
    assert ended.exit_code == 2
    assert ended.stderr.startswith(said)
    assert (tmp_path / "mine.toml").read_text() == "# edited\n"


@pytest.mark.parametrize(
    ("imports", "said"),
    [((), "; if a package brings 'mine', name its module: --imports MODULE\n"), (("--imports=os",), "\n")],
)
def test_unknown_backend(concord: Callable[..., Any], imports: tuple[str, ...], said: str) -> None:
    """A backend that nothing registers is named with what is missing, and no draft is made."""
    ended = concord("probe", "--backend=mine", "--device=cpu", "--sizes=1", *imports)
    assert ended.exit_code == 1
    assert "Unknown backend type mine" in " ".join(ended.stderr.split())
    assert ended.stderr.endswith(f"concord: no world came up, so nothing else was tried{said}")
    assert ended.stdout == ""


def test_check(tmp_path: Path, concord: Callable[..., Any]) -> None:
    """Several files are checked at once: every mistake is told, and 2 is the exit code."""
    good, bad = ROOT / "fixtures/profiles/sim.toml", tmp_path / "bad.toml"
    bad.write_text('name = "bad"\nbakend = "x"\ndevice = "cpu"\n[collectives]\nops = ["sum"]\n')
    assert concord("profile", "check", str(good), "cpu-gloo").exit_code == 0
    ended = concord("profile", "check", str(good), str(bad))
    assert ended.exit_code == 2
    assert "sim.toml: sim, simccl on sim, " in ended.stdout
    assert ended.stderr.splitlines() == [
        "bad.toml:2: bakend: no such key; did you mean backend?",
        "bad.toml:5: collectives.ops: 'sum' is not a reduction; did you mean SUM?",
        "concord: 2 mistakes",
    ]


def test_check_of_defects(tmp_path: Path, concord: Callable[..., Any]) -> None:
    """Files of known defects are checked as profiles are, and a profile says how many it has of each owner."""
    bad = tmp_path / "bad.toml"
    bad.write_text('owner = "bad"\n[[defect]]\nid = "x"\ntest = ["suites/*"]\nlink = 3\n')
    good = ROOT / "fixtures/defects/gloo.toml"
    ended = concord("profile", "check", str(good), "cpu-gloo", str(bad))
    assert ended.exit_code == 2
    count = good.read_text().count("[[defect]]")
    assert f"gloo.toml: {count} known defects of gloo\n" in ended.stdout
    assert "cpu-gloo, gloo on cpu, " in ended.stdout
    assert f"{count} of gloo" in ended.stdout
    place = f"{bad}:"
    assert [line.replace(place, "") for line in ended.stderr.splitlines()] == [
        '2: [[defect]] reason: is missing; write reason = "what is wrong"',
        "2: [[defect]] expires: is missing; write expires = 2027-06-30",
        "4: [[defect]] test: no such key; did you mean tests?",
        "5: [[defect]] link: a text in quotes, not 3",
        "concord: 4 mistakes",
    ]
