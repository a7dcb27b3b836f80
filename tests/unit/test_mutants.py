"""Mutants: what is edited, how the edit gets into live functions, and what is left alone."""

from __future__ import annotations

import functools
import importlib
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from harness.audit import mutants

NUMBER = itertools.count()


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Makes a module of a text."""
    monkeypatch.syspath_prepend(tmp_path)
    made: list[str] = []

    def make(text: str) -> ModuleType:
        made.append(f"edited_{next(NUMBER)}")
        (tmp_path / f"{made[-1]}.py").write_text(text)
        return importlib.import_module(made[-1])

    yield make
    for name in made:
        sys.modules.pop(name)


def edits(module: ModuleType) -> list[str]:
    return [f"{m.function}: {m.edit}" for m in mutants.mutants(module.__name__)]


def put(module: ModuleType, edit: str) -> None:
    (mutant,) = [m for m in mutants.mutants(module.__name__) if m.edit == edit]
    mutants.put(mutants.prepared(mutant))


EDITS = [
    ("return a == b", "a == b: !=", (1, 1), False),
    ("return a < b", "a < b: <=", (1, 1), True),
    ("return a >= b", "a >= b: >", (1, 1), False),
    ("return a is b", "a is b: is not", (1, 1), False),
    ("return a in [b]", "a in [b]: not in", (1, 1), False),
    ("return a and b", "or in a and b", (0, 7), 7),
    ("return not a", "without not: not a", (5, 0), 5),
    ("return a + b", "- in a + b", (5, 3), 2),
    ("return a * b", "// in a * b", (7, 3), 2),
    ("return a | b", "& in a | b", (5, 3), 1),
    ("return a + 2", "2 to 3", (5, 0), 8),
    ("return [a, True]", "True to False", (5, 0), [5, False]),
    ("return a if b else 0", "not (b)", (5, 1), 0),
    ("return dict(x=a, y=b)", "dict without x=", (1, 2), {"y": 2}),
    ("return a", "returns None for a", (5, 0), None),
    ("if a:\n  b += 1\n return b", "not (a)", (0, 1), 2),
    ("b += 1\n return b", "leaves out: b += 1", (0, 1), 1),
    ("c = []\n c.append(a)\n return c", "leaves out: c.append(a)", (5, 0), []),
    ("c = [0]\n c[0] = a\n return c", "leaves out: c[0] = a", (5, 0), [0]),
    ("if a:\n  raise KeyError\n return b", "leaves out: raise KeyError", (5, 2), 2),
    ("assert a\n return b", "leaves out: assert a", (0, 2), 2),
    ("for i in range(3):\n  a += i\n return a", "no iteration over range(3)", (5, 0), 5),
    ("for i in [1, 2]:\n  break\n return i", "break to continue", (0, 0), 2),
    ("for i in [1, 2]:\n  if i == 1:\n   continue\n  a = i\n return a", "continue to break", (0, 0), 0),
    ("return [i for i in [a, b] if i]", "not (i)", (0, 5), [0]),
    ("c = [a, b]\n return c[1:]", "[1:] begins one later", (5, 2), []),
    ("c = [a, b]\n return c[:2]", "[:2] begins one later", (5, 2), [2]),
    ("c = [a, b]\n return c[:2]", "[:2] ends one earlier", (5, 2), [5]),
    ("return list(range(a))", "range(a) ends one earlier", (2, 0), [0]),
    ("return list(range(a, b))", "range(a, b) ends one earlier", (2, 4), [2]),
    ("return divmod(a, b)", "a and b swapped in divmod(a, b)", (7, 2), (0, 2)),
    ("c = [a]\n d = c.copy()\n d.append(b)\n return c", "without .copy() of c", (7, 2), [7, 2]),
    ("c = [a]\n d = list(c)\n d.append(b)\n return c", "no copy: list(c)", (7, 2), [7, 2]),
    ("b.x = a\n b.x = a + 1\n return b.x", "b.x keeps its first value (2)", (7, SimpleNamespace()), 7),
    ("try:\n  raise KeyError\n except KeyError:\n  return a\n return b", "swallows KeyError", (7, 2), 2),
    ("def g(c=3): return c\n return g()", "default of c of g: 3 to 4", (7, 2), 4),
]


@pytest.mark.parametrize(("body", "edit", "given", "found"), EDITS, ids=[edit for _, edit, _, _ in EDITS])
def test_edit(module: Callable[[str], ModuleType], body: str, edit: str, given: tuple[int, int], found: Any) -> None:
    """Each kind of edit does what its words say, and the function did something else before."""
    made = module(f"def f(a, b):\n {body}\n")
    try:
        before = made.f(*given)
    except (KeyError, AssertionError) as e:
        before = e
    put(made, edit)
    assert made.f(*given) == found
    assert before != found


@pytest.mark.parametrize(
    ("head", "edit", "found"),
    [
        ("a, b=True", "default of b: True to False", (1, False, ())),
        ("a, b=True, /, *c", "default of b: True to False", (1, False, ())),
        ("a, b=None, c=2", "default of c: 2 to 3", (1, None, 3)),
        ("a, *, b=0.5, c=2", "default of b: 0.5 to 1.5", (1, 1.5, 2)),
    ],
)
def test_default(module: Callable[[str], ModuleType], head: str, edit: str, found: tuple[Any, ...]) -> None:
    """A default of a live function is edited, whichever kind of parameter it is of; what is given is not."""
    made = module(f"def f({head}):\n return (a, b, c) if 'c' in locals() else (a, b, ())\n")
    before = made.f(1)
    put(made, edit)
    assert made.f(1) == found != before
    assert made.f(0)[0] == 0


def test_default_group(module: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that a call is given becomes the default group, and the name of a group that one's name."""
    made = module("import torch\ndef f(take, group, group_name):\n return take(1, group), take(2, pg=group_name)\n")
    world = SimpleNamespace(group_name="world")
    monkeypatch.setattr("torch.distributed.group", SimpleNamespace(WORLD=world))

    def called() -> Any:
        return made.f(lambda number, pg: (number, pg), "mine", "name")

    assert called() == ((1, "mine"), (2, "name"))
    put(made, "the default group for group in take(1, group)")
    assert called() == ((1, world), (2, "name"))
    put(made, "the default group for group_name in take(2, pg=group_name)")
    assert called() == ((1, "mine"), (2, "world"))


def test_no_default_group(module: Callable[[str], ModuleType]) -> None:
    """A module that does not import torch has no name for the default group, and no such edits."""
    made = module("def f(take, group):\n return take(1, group)\n")
    assert not [edit for edit in edits(made) if "default group" in edit]


def test_left_alone(module: Callable[[str], ModuleType]) -> None:
    """Docstrings, messages, logging, types and what runs at import are no behavior to edit."""
    text = '''
import logging
from typing import TYPE_CHECKING, cast, overload
LIMIT = 1 + 1
logger = logging.getLogger()
if TYPE_CHECKING:
    def g(a): return a + 1
@overload
def f(a: int) -> int: return 3
def f(a):
    """Adds 1 + 1."""
    logger.warning("at %d", 2)
    x: int
    x = cast(int, a)
    raise KeyError(f"no {1 + 1}")
'''
    assert edits(module(text)) == ["f: leaves out: raise KeyError(f'no {1 + 1}')"]


def test_live_functions(module: Callable[[str], ModuleType]) -> None:
    """Whoever has the function by then has the edit: bound elsewhere, decorated, a property, a method, nested."""
    text = """
import functools
def kept(f):
    def inner(*args):
        return f(*args)
    return inner
@kept
def decorated(a): return a + 1
class Base:
    def __init__(self): self.a = 1
class C(Base):
    def __init__(self):
        super().__init__()
        self.b = 2
    @property
    def both(self): return self.a * 3
    @staticmethod
    def less(a): return a - 1
    @classmethod
    @functools.cache
    def cached(cls, a): return a // 2
def outer(a):
    def inner(): return a % 7
    return inner
"""
    made = module(text)
    elsewhere, partial = made.decorated, functools.partial(made.C.less, 5)
    put(made, "- in a + 1")
    put(made, "// in self.a * 3")
    put(made, "+ in a - 1")
    put(made, "* in a // 2")
    put(made, "* in a % 7")
    put(made, "leaves out: super().__init__()")
    assert elsewhere(5) == 4
    assert partial() == 6
    assert made.C.cached(4) == 8
    assert made.outer(2)() == 14
    assert vars(made.C()) == {"b": 2}
    assert {m.function for m in mutants.mutants(made.__name__) if "a % 7" in m.edit} == {"outer"}


def test_made_before(module: Callable[[str], ModuleType]) -> None:
    """Inner functions that were made before have the edit: closures, and what a decorator with arguments returned."""
    text = """
def counted(by):
    def wrap(f):
        def inner(a):
            return f(a) + by
        return inner
    return wrap
@counted(2)
def decorated(a): return a
@counted(3)
def other(a): return a
def outer(a):
    def left(): return a
    def inner(): return a % 7
    return left, inner
"""
    made = module(text)
    left, inner = made.outer(9)
    put(made, "- in f(a) + by")
    put(made, "* in a % 7")
    assert (made.decorated(5), made.other(5)) == (3, 2)
    assert (left(), inner(), made.outer(9)[1]()) == (9, 63, 63)


def test_names(module: Callable[[str], ModuleType]) -> None:
    """Names do not depend on lines, and no two are the same."""
    first = module("def f(a):\n return a == 1 or a == 1\n")
    second = module("\n\n\ndef f(a):\n return a == 1 or a == 1\n")
    assert edits(first) == edits(second)
    assert len(set(edits(first))) == len(edits(first))
    assert [m.lines for m in mutants.mutants(second.__name__)] == [(5, 5)] * len(edits(second))


def test_lines(module: Callable[[str], ModuleType]) -> None:
    """An edit of the head of a block is on the head's lines, not on those of the block."""
    made = module("def f(a):\n if (\n  a\n ):\n  a = g(\n   1,\n  )\n return a\n")
    found = {m.edit: m.lines for m in mutants.mutants(made.__name__)}
    assert found == {"not (a)": (2, 4), "1 to 2": (5, 7), "returns None for a": (8, 8)}


def test_not_there(module: Callable[[str], ModuleType]) -> None:
    """A function that is not live, or that can't take the code, is said to be so."""
    made = module("def f(a):\n return a + 1\n")
    (mutant, *_) = mutants.mutants(made.__name__)
    prepared = mutants.prepared(mutant)
    del made.f
    with pytest.raises(LookupError, match="no live function f at line 1"):
        mutants.put(prepared)


def test_no_module() -> None:
    """A module that is not installed is named."""
    with pytest.raises(ModuleNotFoundError, match="torch_nowhere"):
        mutants.mutants("torch_nowhere")


@pytest.mark.parametrize("component", list(mutants.SOURCES))
def test_every_source_can_be_edited(component: str) -> None:
    """Of each source there are mutants with names of their own, and some are compiled."""
    for name in mutants.sources(component, level="wide"):
        found = mutants.mutants(name)
        assert len({m.name for m in found}) == len(found) > 0
        for mutant in found[:: 20 if name in mutants.SOURCES[component] else 400]:
            assert mutants.prepared(mutant)
