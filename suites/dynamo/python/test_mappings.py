"""Mappings of users' classes in compiled code with collectives: dictionaries made of them, and their own methods."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any

import pytest
import torch

from harness import Rank, World, requirement
from harness.stacks import dynamo
from suites.dynamo.objects import known, summed

SAME = "torch.compile: the compiled function does what the function does"


class Fixed(Mapping[str, Any]):
    """A mapping that can't be changed."""

    def __init__(self, table: Any = ()) -> None:
        self.table = dict(table)

    def __getitem__(self, key: str) -> Any:
        return self.table[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.table)

    def __len__(self) -> int:
        return len(self.table)


class Changed(Fixed, MutableMapping[str, Any]):
    """A mapping that can be changed."""

    def __setitem__(self, key: str, value: Any) -> None:
        self.table[key] = value

    def __delitem__(self, key: str) -> None:
        del self.table[key]


class Table(dict[str, Any]):
    """A dictionary of a class of its own."""


def _updated(table: Any, more: Any) -> Any:
    table.update(more)
    return table


MADE: dict[str, Callable[[Any], Any]] = {
    "dict": lambda given: dict(given),
    "dict with more": lambda given: dict(given, z=3),
    "own class": lambda given: Table(given),
    "own class with more": lambda given: Table(given, z=3),
    "OrderedDict": lambda given: OrderedDict(given),
    "defaultdict": lambda given: defaultdict(int, given),
    "mapping": lambda given: Changed(given),
    "update": lambda given: _updated({"a": 1}, given),
    "update of own class": lambda given: _updated(Table(a=1), given),
    "update of OrderedDict": lambda given: _updated(OrderedDict(a=1), given),
    "update of Counter": lambda given: dict(_updated(Counter(a=1), dict(given))),
    "update of mapping": lambda given: _updated(Changed({"a": 1}), given),
}
"""How dictionaries are made of mappings or of pairs."""

UNPACKED: dict[str, Callable[[Any], Any]] = {
    "in a dictionary": lambda given: {"a": 1, **given, "z": 3},
    "in a call": lambda given: (lambda **more: more)(**given),
    "in a call with more": lambda given: dict(a=1, **given),
}
"""How mappings are unpacked."""

PAIRS = [("first", 1), ("second", 2.5)]

SOURCES: dict[str, Callable[[], Any]] = {
    "mapping": lambda: Fixed(PAIRS),
    "mapping that changes": lambda: Changed(PAIRS),
    "proxy": lambda: MappingProxyType(dict(PAIRS)),
    "own class": lambda: Table(PAIRS),
    "OrderedDict": lambda: OrderedDict(PAIRS),
    "pairs": lambda: list(PAIRS),
    "generator": lambda: ((key, value) for key, value in PAIRS),
}
"""Mappings, and what else a dictionary can be made of."""


def _shown(found: Any) -> Any:
    return type(found).__name__, [(key, known(found[key])) for key in found]


def _differences(function: Callable[..., Any], names: Any, *things: Callable[[], Any]) -> list[str]:
    """Return a sentence for each of a function's results that differ, whose compiled form is called twice."""
    compiled, _ = dynamo.compiled(function, backend="eager")
    wrong = []
    for call in range(2):
        right, found = ([*each(*(make() for make in things))] for each in (function, compiled))
        wrong += [
            f"{name}, call {call}: {expected} uncompiled, {observed} compiled"
            for name, expected, observed in zip(names, right, found, strict=True)
            if known(expected) != known(observed)
        ]
    return wrong


@requirement(
    "DYN-MAPPING-3300",
    "Compiled code makes of mappings of all kinds the dictionaries that uncompiled code makes, be they given or made.",
    source=f"Python: Mapping types, dict; collections.abc.Mapping; {SAME}",
)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.world(2)
def test_made(world: World, source: str) -> None:
    """Copy, update and unpack a mapping, or pairs, beside a sum over ranks."""
    ways = MADE if source in ("pairs", "generator") else MADE | UNPACKED
    ways = {name: way for name, way in ways.items() if source != "generator" or "Counter" not in name}

    def made(x: torch.Tensor) -> Any:
        return [summed(x), *[_shown(way(SOURCES[source]())) for way in ways.values()]]

    def given(x: torch.Tensor, thing: Any) -> Any:
        return [summed(x), *[_shown(way(thing)) for way in ways.values()]]

    def body(rank: Rank) -> list[str]:
        x, names = torch.ones(2, device=rank.device), ["sum", *ways]
        wrong = _differences(made, names, lambda: x)
        return wrong if source == "generator" else wrong + _differences(given, names, lambda: x, SOURCES[source])

    for wrong in world.run(body):
        assert not wrong, "\n".join(wrong)


class OwnKeys(dict[str, Any]):
    """A dictionary whose keys() are others."""

    def keys(self) -> Any:
        return [f"_{key}" for key in dict.keys(self)]


class OwnValues(dict[str, Any]):
    """A dictionary whose values() are twice of what it holds."""

    def values(self) -> Any:
        return [value * 2 for value in super().values()]


class OwnItems(dict[str, Any]):
    """A dictionary whose items() are twice of what it holds."""

    def items(self) -> Any:
        return [(key, value * 2) for key, value in super().items()]


class OwnLength(dict[str, Any]):
    """A dictionary with a length of its own."""

    def __len__(self) -> int:
        return 7


class OwnIteration(dict[str, Any]):
    """A dictionary that gives another key."""

    def __iter__(self) -> Iterator[str]:
        return iter(["z"])


class OwnSearch(dict[str, Any]):
    """A dictionary that contains only one key."""

    def __contains__(self, key: object) -> bool:
        return key == "z"


class OwnIndex(dict[str, Any]):
    """A dictionary that holds five under each key."""

    def __getitem__(self, key: str) -> Any:
        return 5


class OwnDefault(dict[str, Any]):
    """A dictionary that makes up what it lacks."""

    def __missing__(self, key: str) -> Any:
        return key * 2


class OwnGet(dict[str, Any]):
    """A dictionary with a get() of its own."""

    def get(self, key: str, default: Any = None) -> Any:
        return key, default


class OwnKeysInOrder(OrderedDict[str, Any]):
    """An ordered dictionary whose keys() are others."""

    def keys(self) -> Any:
        return [f"_{key}" for key in dict.keys(self)]


OWN = (
    OwnKeys,
    OwnValues,
    OwnItems,
    OwnLength,
    OwnIteration,
    OwnSearch,
    OwnIndex,
    OwnDefault,
    OwnGet,
    OwnKeysInOrder,
)
"""Dictionaries that have one method of their own."""

READ: dict[str, Callable[[Any], Any]] = {
    "keys": lambda table: list(table.keys()),
    "values": lambda table: list(table.values()),
    "items": lambda table: list(table.items()),
    "length": lambda table: len(table),
    "in": lambda table: ("a" in table, "z" in table),
    "index": lambda table: (table["a"], table["b"]),
    "get": lambda table: (table.get("b"), table.get("c", 9)),
    "iteration": lambda table: list(table),
    "loop": lambda table: {key: 1 for key in table},  # noqa: C420
    "loop over items": lambda table: sum(value for _, value in table.items()),
    "equality": lambda table: table == {"a": 1, "b": 2},
    "missing": lambda table: table["c"] if isinstance(table, OwnDefault) else 0,
    "sorted": lambda table: sorted(table),
}
"""How a dictionary is read."""


@requirement(
    "DYN-MAPPING-3301",
    "Compiled code reads a dictionary of a user's class by the methods that the class has of its own, and by no "
    "others.",
    source=f"Python: Mapping types; {SAME}",
)
@pytest.mark.world(2, timeout=120)
def test_own_methods(world: World) -> None:
    """Read a dictionary of each class in each way, which is given or made."""

    def given(x: torch.Tensor, table: Any) -> Any:
        return [summed(x), *[read(table) for read in READ.values()]]

    def body(rank: Rank) -> list[str]:
        x, names, wrong = torch.ones(2, device=rank.device), ["sum", *READ], []
        for of in OWN:

            def made(x: torch.Tensor, of: Any = of) -> Any:
                return [summed(x), *[read(of(a=1, b=2)) for read in READ.values()]]

            differences = _differences(given, names, lambda: x, lambda of=of: of(a=1, b=2))
            wrong += [f"{of.__name__}: {each}" for each in differences + _differences(made, names, lambda: x)]
        return wrong

    for wrong in world.run(body):
        assert not wrong, "\n".join(wrong)
