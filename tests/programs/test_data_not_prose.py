"""Nothing decides by a sentence: with every sentence garbage, the same is found, and the same is written down."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from harness.bench.history.nccl_tests import _SETTINGS
from harness.oracles.exact import Difference
from harness.plugin.facts import reproducer_in
from harness.programs import assertion
from harness.programs.check import problems
from harness.programs.laws import _differences
from harness.programs.problem import Different, Problem
from harness.programs.reproducer import reproducer
from harness.programs.residue import Left
from harness.results import CAUSES, LeftOut, NotClaimed, TestResult, TorchLacks
from harness.stacks.seen import Pass, Seen
from harness.worlds.postmortem import _TRANSPORT
from tests.programs.test_check import EXACT, FOUND, GRADIENT, ROUNDED, healthy, truth

ROOT = Path(__file__).parents[2]
RENDERED = (Seen, Pass, Left, Problem, Difference, *CAUSES, *get_args(LeftOut))
GARBAGE = "threads: gloo_, unsynced of norm of gradient of: there is none: output"
"""Whatever anything was once decided by."""


@pytest.fixture
def garbled(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Every sentence is garbage once this is called."""

    def garble() -> None:
        for rendered in RENDERED:
            monkeypatch.setattr(rendered, "__str__", lambda self: GARBAGE)

    return garble


@pytest.mark.parametrize("program", [EXACT, ROUNDED], ids=["exact", "rounded"])
def test_verdicts(program: Any, garbled: Any) -> None:
    """The same problems are found of every damage, and none of healthy ranks."""

    def found() -> dict[str, str]:
        seen = {"healthy": repr(problems(program, truth(program), healthy(program)))}
        for damage in FOUND:
            outcomes = healthy(program)
            damage(outcomes)
            seen[damage.__name__] = repr(problems(program, truth(program), outcomes))
        return seen

    before = found()
    garbled()
    assert str(GRADIENT) == GARBAGE
    assert found() == before
    assert before["healthy"] == "[]"
    assert "[]" not in {before[damage.__name__] for damage in FOUND}


@pytest.mark.parametrize("program", [EXACT, ROUNDED], ids=["exact", "rounded"])
def test_reproducers(program: Any, garbled: Any) -> None:
    """But for its head, the file is the same; its own decisions are made by the definitions that it carries."""

    def written() -> list[str]:
        texts = []
        for damage in FOUND:
            outcomes = healthy(program)
            damage(outcomes)
            wrong = problems(program, truth(program), outcomes)
            text = reproducer(program, what=Different(wrong).whole(), problems=wrong, truth=truth(program))
            texts.append("\n".join(line for line in text.splitlines() if not line.startswith("#")))
        return texts

    before = written()
    garbled()
    assert written() == before


def test_laws(garbled: Any) -> None:
    """The same differences between the runs of a law."""
    one = dict(healthy(EXACT)[0].seen)
    weight, bias = Seen("parameter", "linear0.weight", step=0), Seen("parameter", "linear0.bias", step=0)
    other = {**one, weight: one[weight] + 1}
    del other[bias]
    before = list(_differences(one, other))
    garbled()
    assert list(map(repr, _differences(one, other))) == list(map(repr, before))
    assert [(p.kind, p.what) for p in before] == [("values", weight), ("missing of second", bias)]


def test_what_an_exception_carries(garbled: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A report has the reproducer, however the note that shows it is worded."""
    monkeypatch.setenv("CONCORD_REPRODUCERS", str(tmp_path))
    garbled()
    error = Different([Problem("bits", GRADIENT, (0, 1))])
    world: Any = SimpleNamespace(spec=SimpleNamespace(backend="gloo", device="cpu", subject="torch"))
    assertion.write(world, EXACT, error, error.whole(), truth(EXACT))
    error.__notes__[:] = [GARBAGE]
    found = reproducer_in(error)
    assert found is not None
    assert found.text == (tmp_path / found.file).read_text()


def test_causes(garbled: Any) -> None:
    """A test is undeclared by its cause, whatever its reason says; one with a plain reason never is."""
    garbled()
    cause, lacks = NotClaimed(what="x"), TorchLacks("x")
    assert str(cause) == str(lacks) == GARBAGE
    assert TestResult(nodeid="a", verdict="unsupported", reason=GARBAGE, cause=cause).undeclared
    assert not TestResult(
        nodeid="a", verdict="unsupported", reason="unsupported: not claimed: x", cause=lacks
    ).undeclared
    assert not TestResult(
        nodeid="a", verdict="unsupported", reason="unsupported: not claimed: x (profile p)"
    ).undeclared


# the source


KNOWN = {
    ("harness/programs/connecting.py", "connectFullMesh failed"): "gloo has no type of error for it",
    ("harness/bench/history/store.py", "is full"): "sqlite's own message",
    ("harness/bench/history/store.py", "No space left"): "the system's own message",
    ("harness/bench/history/store.py", "disk I/O error"): "sqlite's own message",
    ("harness/bench/history/store.py", "not a database"): "sqlite's own message",
    ("harness/bench/history/store.py", "unable to open"): "sqlite's own message",
    ("harness/plugin/rank_reports.py", "Timeout ("): "pytest-timeout has no type of error for it",
    ("harness/worlds/postmortem.py", "Extension modules:"): "faulthandler's own text",
    ("harness/commands/given.py", "the default"): "a key: a word of the tables of parameters",
    ("harness/bench/detection/calibrate.py", "concord perf gate"): "a key: the name of a method",
    ("reports/signing.py", "UNPROTECTED PRIVATE KEY"): "ssh-keygen's own message",
    ("reports/signing.py", "bad permissions"): "ssh-keygen's own message",
    ("reports/signing.py", r'Good "concord" signature with (\S+ key \S+)'): "ssh-keygen's own message",
    ("harness/provenance.py", r"^model name\s*:\s*(.+)$"): "the kernel's own text",
    ("harness/safe_io/untrusted.py", r" \(at (?:line (\d+), column \d+|end of document)\)$"): "tomllib's own text",
    ("harness/worlds/postmortem.py", r"^(Current thread|Thread) (0x[0-9a-f]+)"): "faulthandler's own text",
    ("harness/versions/scripts.py", r"^# Seen with torch (\d+(?:\.\d+)*)"): "a key in the head of a finding's script",
    ("harness/versions/scripts.py", "# Run:"): "a key in the head of a finding's script",
    ("harness/bench/history/nccl_tests.py", r"# Collective test starting: (\S{1,200})"): "nccl-tests' own text",
    ("harness/bench/history/nccl_tests.py", _SETTINGS.pattern): "nccl-tests' own text",
    ("harness/bench/history/nccl_tests.py", r"#\s*Out of bounds values\s*:\s*(\d{1,18})"): "nccl-tests' own text",
    ("harness/worlds/postmortem.py", _TRANSPORT.pattern): "backends have no type of error for it",
}
"""What something is decided by all the same, by file, and why."""

OLD = {"harness/results/old.py": "version 4 stored the sentence and nothing else"}
"""The only module that parses Concord's own sentences, and why."""


def decided_by(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Prose that a comparison of strings looks for, with its line: a constant of more than a word, or a pattern with
    two words."""
    constants = {
        target.id: node.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }

    def prose(node: ast.expr) -> Iterator[str]:
        for inner in ast.walk(node):
            value = constants.get(inner.id) if isinstance(inner, ast.Name) else getattr(inner, "value", None)
            if isinstance(value, str) and len(value.split()) > 1 and any(map(str.isalpha, value)):
                yield value

    for node in ast.walk(tree):
        looked_for: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            for left, how in zip(sides, node.ops, strict=False):
                if isinstance(how, (ast.In, ast.NotIn)) and not isinstance(sides[-1], (ast.Tuple, ast.Set, ast.Dict)):
                    looked_for.append(left)
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            if called in ("startswith", "endswith", "removeprefix", "removesuffix"):
                looked_for += node.args
            of_re = isinstance(node.func, ast.Attribute) and getattr(node.func.value, "id", "") == "re"
            patterns = prose(node.args[0]) if of_re and node.args else ()
            yield from ((node.lineno, text) for text in patterns if re.search("[a-z]{2,} [a-z]{2,}", text))
        for each in looked_for:
            if isinstance(each, (ast.Constant, ast.Name, ast.JoinedStr, ast.Tuple)):
                yield from ((node.lineno, text) for text in prose(each))


def test_no_decision_by_a_sentence() -> None:
    """No string is searched for prose, but for what only others' text tells."""
    files = [file for part in ("harness", "reports") for file in (ROOT / part).rglob("*.py")]
    texts = {
        (str(file.relative_to(ROOT)), text) for file in files for _, text in decided_by(ast.parse(file.read_text()))
    }
    assert {(file, text) for file, text in texts if file not in OLD} == KNOWN.keys()
    assert {file for file, _ in texts} >= OLD.keys()


@pytest.mark.parametrize(
    "source",
    [
        "x = ' there is none' in said",
        "said.startswith('threads: gloo_')",
        "A = 'norm of'\nb = A in said",
        "f'gradient of {x}.' in y",
        "re.compile(r'a world of (\\d+) ranks')",
        "A = r'torch has no backend (.+) here'\nre.fullmatch(A, said)",
        "re.search(rf'the {x} of {y} is given', said)",
    ],
)
def test_decisions_are_seen(source: str) -> None:
    """Each way in which something was once decided by a sentence."""
    assert list(decided_by(ast.parse(source)))
