"""The causes of known defects: what is read, what is refused, their pages, and whether PyTorch has the places named."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
import torch

from harness.versions import causes
from harness.versions.catalog import Catalog, CatalogError, catalog, view
from harness.versions.causes import FILE, PAGE, Cause, UnreadableCauses, by_file, read
from reports.findings import page
from tests.versions.known_defects import HOSTILE, checkout

ROOT = Path(__file__).parents[2]
_LONGEST = 30
"""Words of a sentence."""
_FOREIGN = ("torch/csrc/", "torch/lib/", "aten/", "c10/", "gloo/", "third_party/")
"""Sources that an installed PyTorch does not have."""


def refused(root: Path, text: str) -> str:
    """Why causes are refused."""
    (root / FILE).parent.mkdir(parents=True, exist_ok=True)
    (root / FILE).write_text(text)
    with pytest.raises(UnreadableCauses) as e:
        read(root)
    return str(e.value)


class TestRead:
    def test_known(self, tmp_path: Path) -> None:
        """Files come in the order of their defects, and so do the causes in each."""
        files = by_file(read(checkout(tmp_path)))
        assert [(file.name, file.defects, len(file.causes)) for file in files] == [
            ("torch/distributed/tensor/_dispatch.py", 3, 2),
            ("gloo/gloo/barrier.cc", 1, 1),
        ]
        assert [cause.name for cause in files[0].causes] == ["OpDispatcher.dispatch", ""]

    def test_none(self, tmp_path: Path) -> None:
        """A checkout in which nobody wrote any has none."""
        assert read(tmp_path) == ()

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("garbage", "causes.toml: "),
            ("[[cause]]\nat = 'a.py'\n", "missing required field `why`"),
            ("[[cause]]\nat = 'a.py'\nwhy = ''\nsure = 'no'\ndefects = []\n", "Invalid enum value 'no'"),
            ("[[cause]]\nat = 'a.py'\nwhy = ''\nsure = 'ran'\ndefects = []\nx = 1\n", "unknown field `x`"),
        ],
        ids=["garbage", "missing", "unsure", "unknown"],
    )
    def test_garbage(self, tmp_path: Path, text: str, says: str) -> None:
        """What can't be read is one error, which says where it is."""
        assert says in refused(tmp_path, text)

    def test_two_causes(self, tmp_path: Path) -> None:
        """A defect has one cause."""
        one = "[[cause]]\nat = '{}'\nwhy = ''\nsure = 'ran'\ndefects = ['pytorch/a']\n"
        says = refused(tmp_path, one.format("a.py::f") + one.format("b.py"))
        assert says.endswith("pytorch/a has two causes: a.py::f and b.py")

    def test_in_the_catalog(self, tmp_path: Path) -> None:
        """Each defect has its cause; a file that can't be read is an error of the catalog."""
        made = catalog(checkout(tmp_path))
        of = {each.id: each.cause and each.cause.name for each in made.findings}
        assert (of["dtensor_fixed"], of["strided"], of["fallen"]) == ("OpDispatcher.dispatch", "", None)
        (tmp_path / FILE).write_text("garbage")
        with pytest.raises(CatalogError, match=r"causes\.toml"):
            catalog(tmp_path)


class TestPages:
    def test_markdown(self, tmp_path: Path) -> None:
        """A row says where, what is wrong, which findings it has with their scripts, and what is known."""
        lines = causes.page(read(checkout(tmp_path)), {"dtensor_item", "dtensor_fixed"}).splitlines()
        findings = "[dtensor_item](findings/dtensor_item.py), [dtensor_fixed](findings/dtensor_fixed.py)"
        assert f"| `OpDispatcher.dispatch` | It forgets `item`. | {findings} | ran |" in lines
        assert r"| `barrier` | It waits for a \| forever. | stuck | read |" in lines
        name = "torch/distributed/tensor/_dispatch.py"
        assert f"| [{name}](#torchdistributedtensor_dispatchpy) | 3 | 2 |" in lines

    def test_page(self, tmp_path: Path) -> None:
        """The page of known defects says the cause of each; hostile words stay text."""
        text = page(view(catalog(checkout(tmp_path))))
        assert HOSTILE not in text
        assert text.count("It forgets <code>item</code>.") == 1 + 2
        assert '<a href="#pytorch/dtensor_item">pytorch/dtensor_item</a>' in text

    def test_many_files(self, tmp_path: Path) -> None:
        """Files beyond the first ones are behind a click."""
        known = view(catalog(checkout(tmp_path)))
        known["files"] = [{**known["files"][0], "name": f"file{i}.py"} for i in range(20)]
        assert "5 more files" in page(known)


class TestShipped:
    def test_page(self, shipped: Catalog) -> None:
        """docs/findings-by-cause.md is of today: python -m harness.versions.causes."""
        assert (ROOT / PAGE).read_text() == causes.page(shipped.causes, causes.names(ROOT))

    def test_defects(self, shipped: Catalog) -> None:
        """Every cause is of shipped defects, and every shipped defect has one."""
        named = {name for cause in shipped.causes for name in cause.defects}
        assert named == {each.named for each in shipped.findings}

    def test_sentences(self, shipped: Catalog) -> None:
        """A cause is one short sentence, and no two causes are the same."""
        long = [cause.why for cause in shipped.causes if not 3 <= len(cause.why.split()) <= _LONGEST]
        assert long == []
        assert [cause.why for cause in shipped.causes if not re.fullmatch(r"[A-Z`_].*\.", cause.why)] == []
        assert len({(cause.at, cause.why) for cause in shipped.causes}) == len(shipped.causes)

    @pytest.mark.skipif(torch.__version__.partition("+")[0] != "2.13.0", reason="causes name places of PyTorch 2.13.0")
    def test_places(self, shipped: Catalog) -> None:
        """What a cause names is in the installed PyTorch, unless it is C++ or its defects are of another version."""
        of = {each.named: each for each in shipped.findings}
        here = [c for c in shipped.causes if any(of[name].is_in("2.13.0") is not False for name in c.defects)]
        python = [cause for cause in here if cause.file.endswith(".py") and not cause.file.startswith(_FOREIGN)]
        assert [cause.at for cause in python if not _is_there(cause)] == []
        assert [cause.at for cause in here if not cause.file.startswith(("torch/", *_FOREIGN))] == []


def _is_there(cause: Cause) -> bool:
    """Whether the installed PyTorch has the function, class or variable that a cause names."""
    file = Path(torch.__file__).parents[1] / cause.file
    if not file.is_file():
        return False
    bodies = [_body(file)]
    for part in cause.name.split(".") if cause.name else ():
        bodies = [found for body in bodies for found in _named(body, part)]
    return bool(bodies)


@cache
def _body(file: Path) -> list[ast.stmt]:
    """Return the statements of a file, of which many causes name places."""
    return ast.parse(file.read_text()).body


def _named(body: list[ast.stmt], name: str) -> list[list[ast.stmt]]:
    """The bodies of what has a name among statements, at any depth of conditions; of a variable, an empty one."""
    found: list[list[ast.stmt]] = []
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found += [node.body] if node.name == name else []
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = {each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)}
            found += [[]] if name in names else []
        else:
            for field in ("body", "orelse", "finalbody"):
                found += _named(getattr(node, field, []), name)
            for handler in getattr(node, "handlers", []):
                found += _named(handler.body, name)
    return found
