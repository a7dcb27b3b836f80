"""The catalog of faults: how faults are named, found, refused, and put into a process."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import tomllib
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.audit.records import KILLED, load
from harness.commands.audit import faults
from harness.faults import CLASSES, COMPONENTS, Fault, catalog, everywhere, fault, on_call, put
from harness.subjects import STACKS

ROOT = Path(__file__).parents[2]
Package = Callable[..., str]
NUMBERS = itertools.count()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    """Makes a package of modules: ``package(one="...", two="...")``; its name."""

    def make(**modules: str) -> str:
        name = f"catalog_{next(NUMBERS)}"
        for module, text in {"__init__": "", **modules}.items():
            path = tmp_path / name / f"{module.replace('__of__', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("from harness.faults import Fault, fault\n\n" + text)
        monkeypatch.syspath_prepend(tmp_path)
        return name

    return make


def one(name: str, *, kind: str = "SW", component: str = "collectives") -> str:
    """The text of a fault."""
    return f'@fault("{component}", "{kind}", needs="anything")\ndef {name}():\n    """Something is wrong."""\n'


def marked(put: Callable[..., Any]) -> list[Fault]:
    """The faults of a function that was marked."""
    found: list[Fault] = put.concord_faults  # type: ignore[attr-defined]
    return found


class TestMarking:
    """What fault() makes of a function."""

    def test_of_one(self) -> None:
        """The function's name with hyphens, the first paragraph of its docstring in one line."""
        called = []

        @fault("dynamo", "HG", needs="a late rank", issue="pytorch/pytorch#1")
        def never_comes_back() -> None:
            """A rank waits
            for good.

            More about it.
            """
            called.append("put")

        (found,) = marked(never_comes_back)
        assert (found.name, found.component, found.kind) == ("never-comes-back", "dynamo", "HG")
        assert (found.sentence, found.needs) == ("A rank waits for good.", "a late rank")
        assert found.issue == "pytorch/pytorch#1"
        assert str(found) == "never-comes-back"
        assert called == []
        found.put()
        assert called == ["put"]

    def test_of_a_family(self) -> None:
        """One for each entry, named and needed after it; each puts its own value."""
        called = []

        @fault("replicate", "SW", needs="three ranks", each={"odd": 1, "even": 2})
        def wrong(value: int) -> None:
            """Values are wrong."""
            called.append(value)

        found = marked(wrong)
        assert [f.name for f in found] == ["wrong[odd]", "wrong[even]"]
        assert [f.needs for f in found] == ["three ranks; odd", "three ranks; even"]
        for member in found:
            member.put()
        assert called == [1, 2]

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (("dynamos", "SW"), r"component 'dynamos'; there are collectives, .*performance"),
            (("dynamo", "XX"), r"class 'XX'; there are SW, MD, HG"),
        ],
    )
    @pytest.mark.parametrize("each", [None, {"x": 1}])
    def test_bad_words(self, arguments: tuple[str, str], said: str, each: dict[str, int] | None) -> None:
        """A component or class that there is not, with those that there are."""

        def wrong(value: int = 0) -> None:
            """Something is wrong."""

        with pytest.raises(ValueError, match=f"fault wrong.*{said}"):
            fault(*arguments, needs="anything", each=each)(wrong)

    @pytest.mark.parametrize(("doc", "needs"), [(None, "anything"), ("", "anything"), ("Wrong.", "")])
    @pytest.mark.parametrize("each", [None, {"x": 1}])
    def test_says_nothing(self, doc: str | None, needs: str, each: dict[str, int] | None) -> None:
        """Without a docstring, or without what it needs, it is no fault."""

        def wrong(value: int = 0) -> None:
            pass

        wrong.__doc__ = doc
        with pytest.raises(ValueError, match="say what is wrong"):
            fault("dynamo", "SW", needs=needs, each=each)(wrong)

    def test_made_by_hand(self) -> None:
        """A fault that is not made by the decorator is held to the same."""
        with pytest.raises(ValueError, match="fault x: component"):
            Fault("x", "nothing", "SW", "Wrong.", "anything", lambda: None)


class TestFinding:
    """Which faults a catalog has."""

    def test_of_modules(self, package: Package) -> None:
        """Marked functions of every module, in folders too; not again where one is imported."""
        name = package(
            one=one("first") + one("second"), two=one("third"), folder__of____init__="", folder__of__three=one("fourth")
        )
        assert list(catalog(name)) == ["fourth", "first", "second", "third"]

    def test_of_lists(self, package: Package) -> None:
        """What is in a module's FAULTS, beside its marked functions."""
        made = 'FAULTS = [Fault("listed", "dynamo", "SW", "Wrong.", "anything", lambda: None)]\n'
        assert list(catalog(package(one=made + one("marked")))) == ["listed", "marked"]

    def test_imported(self, package: Package) -> None:
        """A function or a list that another module imports is there once."""
        made = 'FAULTS = [Fault("listed", "dynamo", "SW", "Wrong.", "anything", lambda: None)]\n' + one("marked")
        assert len(catalog(package(one=made, two="from .one import FAULTS, marked\n"))) == 2

    def test_same_name(self, package: Package) -> None:
        """Two of one name are refused, with the module of the second."""
        name = package(one=one("same"), two=one("same", kind="HG"))
        with pytest.raises(ValueError, match=rf"two faults are called 'same', the second in {name}\.two"):
            catalog(name)

    def test_no_catalog(self) -> None:
        """A package that there is not."""
        with pytest.raises(ImportError):
            catalog("no_such_catalog")

    def test_unknown_name(self) -> None:
        """put() of a name that there is not."""
        with pytest.raises(KeyError):
            put("no-such-fault")


class TestKeptApart:
    """Compiled code on disk of processes with a defect."""

    def test_own_cache(self, package: Package) -> None:
        """Two processes with the same fault, and one without, have keys of their own for compiled code on disk."""
        script = f"import torch, harness.faults as f; f.catalog.__defaults__ = ({package(one=one('first'))!r},)"
        tag = "print(torch.compiler.config.cache_key_tag)"
        scripts = [f"{script}; {tag}", *[f"{script}; f.put('first'); {tag}"] * 2]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        told = [
            subprocess.run(
                [sys.executable, "-c", s], env=environment, capture_output=True, text=True, check=True
            ).stdout
            for s in scripts
        ]
        assert len(set(told)) == 3


class TestShipped:
    """The catalog that Concord brings along."""

    def test_names(self) -> None:
        """Words with hyphens, and the entry of a family in brackets."""
        strange = [name for name in catalog() if not re.fullmatch(r"[a-z0-9]+([-.][a-z0-9]+)*(\[[\w ,.-]+\])?", name)]
        assert strange == []

    def test_components(self) -> None:
        """Faults are of known components and classes, and say an issue as owner/repository#number."""
        for found in catalog().values():
            assert found.component in COMPONENTS
            assert found.kind in CLASSES
            assert re.fullmatch(r"|[\w-]+/[\w.-]+#\d+", found.issue), found.name
            assert found.sentence.endswith("."), found.name

    def test_performance_is_performance(self) -> None:
        """What is slow is of class PF, and nothing else is among it."""
        assert {f.kind for f in catalog().values() if f.component == "performance"} == {"PF"}

    def test_each_is_noticed(self) -> None:
        """The saved audit says by which test each is detected, but for those that are listed as not noticed.

        Those of performance are for the benchmarks.
        """
        saved = load(ROOT / "fixtures/faults/noticed.json")
        detected = {result.defect.name for result in saved.results if result.state == KILLED}
        listed = tomllib.loads((ROOT / "fixtures/faults/unnoticed.toml").read_text())["unnoticed"]
        assert all(entry["why"] for entry in listed)
        unnoticed = sorted(name for entry in listed for name in entry["faults"])
        faults = [f.name for f in catalog().values() if f.component in STACKS]
        assert sorted(name for name in faults if name not in detected) == unnoticed

    def test_page(self) -> None:
        """The table in docs/audit.md counts the catalog by where faults come from and by component."""
        saved = load(ROOT / "fixtures/faults/noticed.json")
        detected = {result.defect.name for result in saved.results if result.state == KILLED}
        text = (ROOT / "docs/audit.md").read_text()
        rows = re.findall(r"^\| [^|]+ \| (?:`([a-z]+-)`|anything else) \| ([\d,| ]+) \|$", text, re.M)
        beginnings = tuple(beginning for beginning, _ in rows if beginning)
        faults = list(catalog().values())
        told = 0
        for beginning, figures in rows:
            of = [
                f
                for f in faults
                if f.component in STACKS
                and (f.name.startswith(beginning) if beginning else not f.name.startswith(beginnings))
            ]
            counts = [sum(f.component == stack for f in of) for stack in STACKS]
            counts += [len(of), sum(f.name in detected for f in of)]
            assert figures == " | ".join(f"{count:,}" for count in counts), beginning
            told += len(of)
        assert told == sum(f.component in STACKS for f in faults)
        assert f"The catalog has {len(faults):,} faults." in text


class TestEverywhere:
    """everywhere() replaces what has been bound to names."""

    def test_modules(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Under any name, in any module; what only compares equal stays."""

        class Equal:
            def __eq__(self, other: object) -> bool:
                return True

            __hash__ = None  # type: ignore[assignment]

        def old() -> str:
            return "old"

        def new() -> str:
            return "new"

        equal = Equal()
        here, there = types.ModuleType("here"), types.ModuleType("there")
        here.f, there.g, there.h, there.k = old, old, len, equal  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "here", here)
        monkeypatch.setitem(sys.modules, "there", there)
        everywhere(old, new)
        assert (here.f, there.g, there.h) == (new, new, len)
        assert there.k is equal

    def test_classes_of_torch(self) -> None:
        """A function that is a method of a class of torch's; other classes keep it."""

        def old(self: object) -> str:
            return "old"

        def new(self: object) -> str:
            return "new"

        ours = type("Ours", (), {"f": old, "__module__": "torch.made.up"})
        others = type("Others", (), {"f": old, "__module__": "made.up"})
        strange = type("Strange", (), {"f": old, "__module__": property(lambda self: "torch")})
        everywhere(old, new)
        assert (ours().f(), others().f(), strange().f()) == ("new", "old", "old")  # type: ignore[attr-defined]


def test_on_call() -> None:
    """Holds once, on the n-th call, whatever the arguments."""
    third = on_call(3)
    assert [third(), third(1), third(x=2), third(), third()] == [False, False, True, False, False]


def test_listed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`concord faults` gives names as --fault takes them, families and all, however narrow the terminal is."""
    monkeypatch.setenv("COLUMNS", "40")
    faults(["dynamo"])
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == [
        name for name, fault in catalog().items() if fault.component == "dynamo"
    ]
