"""The tables of parameters: they have all that the installed PyTorch offers, and name tests that there are."""

from __future__ import annotations

import ast
import importlib.metadata
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from typer.testing import CliRunner

from harness.commands.main import app
from harness.commands.outputs import INDEX, out_of_date
from harness.commands.parameters import (
    FOLDER,
    PAGES,
    Table,
    TableError,
    disagreements,
    pages,
    parse,
    read,
    unknown_tests,
)
from harness.stacks.surface import STACKS, parameters, stated, surface

ROOT = Path(__file__).parents[2]
TORCH = importlib.metadata.version("torch")
TEST = "suites/collectives/operations/test_all_reduce.py::test_shapes"


@pytest.fixture(scope="module")
def tables() -> Mapping[str, Table]:
    """Read the tables here."""
    return read(ROOT)


def test_every_stack_has_a_table(tables: Mapping[str, Table]) -> None:
    """The files are those of the stacks."""
    assert sorted(tables) == sorted(STACKS)


@pytest.mark.parametrize("stack", STACKS)
def test_tables_have_all_that_pytorch_has(tables: Mapping[str, Table], stack: str) -> None:
    """No function or parameter of the installed PyTorch is missing, and none is there that it lacks."""
    assert disagreements(tables[stack], surface(stack), TORCH) == []


@pytest.mark.parametrize("stack", STACKS)
def test_tables_name_tests(tables: Mapping[str, Table], stack: str) -> None:
    """Every test in a table is in the suites."""
    assert unknown_tests(tables[stack], ROOT) == []


@pytest.mark.parametrize("stack", STACKS)
def test_tests_can_reach_what_they_prove(tables: Mapping[str, Table], stack: str) -> None:
    """The file of a test, or a file that it imports, has the name of the function or of the parameter."""
    assert [
        f"{name}({parameter}): {proof}"
        for name, function in tables[stack].items()
        for parameter, entry in function.parameters.items()
        for proof in entry.values.values()
        if proof.startswith("suites/")
        and not {name.rpartition(".")[2], name.split(".")[-2], parameter} & _words(proof.partition("::")[0])
    ] == []


def test_the_pages_are_up_to_date(tables: Mapping[str, Table]) -> None:
    """docs/parameters is what the tables say."""
    assert out_of_date(pages(tables), ROOT / PAGES) == [], f"run: concord parameters {PAGES}"


_KNOWN: dict[str, set[str]] = {}


def _words(file: str) -> set[str]:
    """Return the names and texts in a file of tests and in the files of this checkout that it imports."""
    if file not in _KNOWN:
        _KNOWN[file] = set()  # for files that import each other
        found: set[str] = set()
        for node in ast.walk(ast.parse((ROOT / file).read_text())):
            if isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.Name):
                found.add(node.id)
            elif isinstance(node, ast.keyword) and node.arg:
                found.add(node.arg)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.update(node.value.replace("(", " ").replace(")", " ").replace(".", " ").split())
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.update(alias.name for alias in node.names)
                for module in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names)):
                    found |= _imported(module, ROOT / file)
        _KNOWN[file] = found
    return _KNOWN[file]


def _imported(module: str, importer: Path) -> set[str]:
    for base in (ROOT, importer.parent):
        path = base.joinpath(*module.split("."))
        for each in (path.with_suffix(".py"), path / "__init__.py"):
            if each.is_file():
                return _words(str(each.relative_to(ROOT)))
    return set()


SMALL = f"""
["torch.f"]
a."1" = "{TEST}"
b.torch = ">=2.13"
b."None" = "not tested: it is the default"

["torch.g"]
torch = "<2.13"
"()"."called" = "gap: nobody calls it"

["torch.Class"]
outside = "it is no part of the stack"
"""


def small() -> Table:
    return parse(SMALL, "small.toml")


def test_agreement() -> None:
    """A table that has everything agrees with each version, and a class that is outside covers its methods."""
    assert (
        disagreements(small(), {"torch.f": ("a", "b"), "torch.Class": (), "torch.Class.m": ("x",)}, "2.13.0+cpu") == []
    )
    assert disagreements(small(), {"torch.f": ("a",), "torch.g": (), "torch.Class": ()}, "2.12.1") == []


@pytest.mark.parametrize(
    ("there", "version", "problem"),
    [
        ({"torch.f": ("a", "b", "c")}, "2.13.0", "torch.f: the table lacks the parameter c"),
        ({"torch.f": ("b",)}, "2.13.0", "torch.f: PyTorch 2.13.0 lacks the parameter a"),
        ({"torch.f": ("a",)}, "2.13.0", "torch.f: PyTorch 2.13.0 lacks the parameter b"),
        ({"torch.f": ("a", "b"), "torch.g": ()}, "2.12.0", "has the parameter b, and the table says >=2.13"),
        ({"torch.f": ("a", "b"), "torch.h": ()}, "2.13.0", "torch.h: the table lacks it"),
        ({"torch.f": ("a", "b"), "torch.f.m": ()}, "2.13.0", "torch.f.m: the table lacks it"),
        ({"torch.f": ("a", "b"), "torch.g": ()}, "2.13.0", "torch.g: PyTorch 2.13.0 has it, and the table says <2.13"),
        ({"torch.f": ("a",), "torch.g": ("x",)}, "2.12.0", "torch.g: the table lacks the parameter x"),
        ({"torch.f": ("a",)}, "2.12.0", "torch.g: PyTorch 2.12.0 lacks it"),
        ({}, "2.13.0", "torch.f: PyTorch 2.13.0 lacks it"),
    ],
)
def test_disagreements(there: dict[str, tuple[str, ...]], version: str, problem: str) -> None:
    """A function or a parameter that only one of them has is named, with the version."""
    found = disagreements(small(), {"torch.Class": (), **there}, version)
    assert any(problem in each for each in found), found


@pytest.mark.parametrize(
    "name", ["suites/collectives/operations/test_all_reduce.py::test_none", "suites/none.py::test_shapes"]
)
def test_unknown_test(name: str) -> None:
    """A test that is not there, or whose file is not there, is named with the value."""
    (problem,) = unknown_tests(parse(SMALL.replace(TEST, name), "small.toml"), ROOT)
    assert problem == f"torch.f: a: 1: there is no test {name}"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("\0", "not TOML"),
        ("a = ", "not TOML"),
        ("[" * 100, "t.toml: "),
        ("x = 1", "x: must be a table of parameters"),
        ("[x]", "x: needs parameters"),
        ("[x]\na = 1", "x: a: must be a table of values"),
        ("[x]\na = {}", "x: a: needs a value"),
        ("[x]\na.v = 1", "x: a: v: must be a text"),
        ("[x]\na.v = ''", "x: a: v: must be a text"),
        ("[x]\na.v = 'test_shapes'", "x: a: v: must be a test such as"),
        ("[x]\na.v = 'tests/unit/test_x.py::test_y'", "x: a: v: must be a test such as"),
        ("[x]\na.v = 'not tested: '", "x: a: v: must be a text"),
        ("[x]\na.v = 'gap:'", "x: a: v: must be a test such as"),
        ('[x]\na.v = "gap: \\u001b[31m"', "x: a: v: must be a text"),
        (f"[x]\na.v = 'gap: {'x' * 400}'", "x: a: v: must be a text"),
        ("[x]\ntorch = '2.13'\na.v = 'gap: y'", "x: torch must be a specifier"),
        ("[x]\na.torch = 1\na.v = 'gap: y'", "x: a: torch must be a specifier"),
        ("[x]\noutside = 'y'\na.v = 'gap: y'", "x: has 'outside', so it must have no parameters: a"),
        ("[x]\noutside = ''", "x: outside: must be a text"),
        ("[x]\n'()'.v = 'gap: y'\na.v = 'gap: y'", "x: '()' stands alone"),
        ("x" * (600 << 10), "larger than"),
    ],
)
def test_refused(text: str, problem: str) -> None:
    """A text that is no table has one error, with the file and the key."""
    with pytest.raises(TableError) as caught:
        parse(text, "t.toml")
    assert str(caught.value).startswith("t.toml: ")
    assert problem in str(caught.value)
    assert "\x1b" not in str(caught.value)


def test_pages() -> None:
    """The first page counts; that of a stack links tests, shows versions, and escapes markup."""
    made = pages({"x": parse(SMALL.replace("None", "<a|b>"), "small.toml")})
    assert "| [`x`](x.md) | 2 | 3 | 3 | 1 | 1 | 1 |" in made[INDEX]
    shown = made["x.md"]
    assert f"| `torch.f` | `a` | 1 | [`test_shapes`](../../{TEST.partition('::')[0]}) |" in shown
    assert r"| `torch.f` | `b` (&gt;=2.13) | &lt;a\|b&gt; | not tested: it is the default |" in shown
    assert "| `torch.g` (&lt;2.13) | the call | called | **gap**: nobody calls it |" in shown
    assert "| `torch.Class` | it is no part of the stack |" in shown


class TestSurface:
    """What PyTorch offers."""

    def test_functions(self) -> None:
        """Functions of Python have the parameters of their signatures."""
        assert surface("collectives")["torch.distributed.all_reduce"] == ("tensor", "op", "group", "async_op")

    def test_methods(self) -> None:
        """Methods have no self, and functions whose first parameter has this name have it."""
        found = surface("collectives")
        assert found["torch.distributed.device_mesh.DeviceMesh.size"] == ("mesh_dim",)
        assert found["torch.distributed._functional_collectives.broadcast"][:2] == ("self", "src")

    def test_functions_of_c(self) -> None:
        """Methods of C++ have the parameters of their docstrings."""
        assert surface("collectives")["torch.distributed.Work.wait"] == ("timeout",)

    def test_a_new_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A function that a version adds is in the surface, and the table lacks it."""
        name = "concord_new"
        module = dist.distributed_c10d
        monkeypatch.setattr(module, name, lambda tensor, how=None: None, raising=False)
        monkeypatch.setattr(module, "__all__", [*module.__all__, name])
        found = surface("collectives")
        assert found[f"torch.distributed.{name}"] == ("tensor", "how")
        assert f"torch.distributed.{name}: the table lacks it" in disagreements(read(ROOT)["collectives"], found, TORCH)

    def test_a_new_parameter(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A parameter that a version adds is one that the table lacks."""

        def compiled(model: object = None, concord_new: int = 0) -> None:
            raise NotImplementedError

        monkeypatch.setattr(torch, "compile", compiled)
        problems = disagreements(read(ROOT)["dynamo"], surface("dynamo"), TORCH)
        assert "torch.compile: the table lacks the parameter concord_new" in problems

    @pytest.mark.parametrize(
        ("doc", "names"),
        [
            ("f(self: a.B, x: int, y: dict[str, int] = {1: 2}, *, z: c.D = <d: 0>) -> None\n", ["x", "y", "z"]),
            ("f(*args, **kwargs)\nOverloaded function.\n\n1. f(x: int) -> None\n\n2. f(y: int) -> int\n", ["x", "y"]),
            ("f(x: Callable[[int], int]) -> int", ["x"]),
            ("f() -> int", []),
            ("Does something.", None),
            ("", None),
        ],
    )
    def test_docstrings(self, doc: str, names: list[str] | None) -> None:
        """All overloads count, and a docstring without a signature states nothing."""
        assert stated(doc, "f") == names

    def test_private_parameters(self) -> None:
        """A parameter that begins with an underscore is private."""

        def f(a: int, *, _b: int = 0) -> None:
            raise NotImplementedError

        assert parameters(f) == ["a"]


class TestCommand:
    """``concord parameters``."""

    @pytest.fixture(autouse=True)
    def checkout(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """One small table instead of those here."""
        (tmp_path / FOLDER).mkdir(parents=True)
        (tmp_path / FOLDER / "x.toml").write_text(SMALL)
        monkeypatch.chdir(tmp_path)
        return tmp_path

    def test_prints(self) -> None:
        """Without a folder, it prints the pages."""
        assert CliRunner().invoke(app, ["parameters"]).output == "\n".join(pages({"x": small()}).values())

    def test_writes(self, checkout: Path) -> None:
        """With a folder, it writes the pages, which are up to date then, and out of date once a table changes."""
        assert CliRunner().invoke(app, ["parameters", "out"]).exit_code == 0
        assert out_of_date(pages({"x": small()}), checkout / "out") == []
        assert CliRunner().invoke(app, ["parameters", "out", "--check"]).exit_code == 0
        (checkout / FOLDER / "x.toml").write_text(SMALL.replace("nobody", "somebody"))
        done = CliRunner().invoke(app, ["parameters", "out", "--check"])
        assert (done.exit_code, done.output) == (1, "in out, x.md out of date; run: concord parameters out\n")

    @pytest.mark.parametrize("content", [None, b"\xff", b"x = 1"], ids=["missing", "not UTF-8", "no table"])
    def test_bad_input(self, checkout: Path, content: bytes | None) -> None:
        """Bad input is one line and exit code 2."""
        if content is None:
            (checkout / FOLDER / "x.toml").unlink()
        else:
            (checkout / FOLDER / "x.toml").write_bytes(content)
        done = CliRunner().invoke(app, ["parameters"])
        assert done.exit_code == 2
        assert done.output.startswith("concord: ")
        assert done.output.count("\n") == 1

    def test_check_needs_a_folder(self) -> None:
        """--check without a folder is bad input."""
        assert CliRunner().invoke(app, ["parameters", "--check"]).exit_code == 2
