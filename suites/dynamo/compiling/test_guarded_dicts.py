"""Compiled code that is called with one dictionary after another does not keep what the first of them was like."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest
import torch

from harness import Rank, World, requirement
from suites.dynamo.objects import summed
from suites.dynamo.turns import by_turns

Ask = Callable[[Any], Any]


def _branch(table: Any) -> int:
    return 2 if table else 3


def _either(table: Any) -> int:
    return len(table or "none")


CLASSES: dict[str, Callable[[Any], Any]] = {
    "OrderedDict": OrderedDict,
    "defaultdict": lambda pairs: defaultdict(int, pairs),
}
"""Dictionaries of other classes, of pairs."""

TRUTHS: dict[str, dict[str, tuple[Callable[[Any], Any], Ask]]] = {
    "branch": {"if": (dict, _branch), "or": (dict, _either)},
    "length": {"dict": (dict, len)},
    "bool": {"bool": (dict, bool), "not": (dict, lambda table: not table)},
    "branch on other classes": {name: (kind, _branch) for name, kind in CLASSES.items()},
    "branch on views": {
        "items": (dict, lambda table: _branch(table.items())),
        "proxy": (lambda pairs: MappingProxyType(dict(pairs)), _branch),
    },
}
"""How code asks whether a dictionary is empty: what makes the dictionary, and what asks."""


@requirement(
    "DYN-GUARD-3750",
    "Compiled code finds out at each call whether the dictionary that it gets is empty, in whatever way it asks.",
    source="Python: Truth Value Testing; torch.compile: the compiled function does what the function does",
)
@pytest.mark.parametrize("way", TRUTHS)
@pytest.mark.world(2)
def test_truth(world: World, way: str) -> None:
    """Scale a sum over ranks by what an empty dictionary, a full one and an empty one again are."""

    def body(rank: Rank) -> list[str]:
        wrong = []
        for name, (kind, ask) in TRUTHS[way].items():

            def step(x: torch.Tensor, table: Any, ask: Ask = ask) -> torch.Tensor:
                return summed(x) * (1 + ask(table))

            contents: list[list[tuple[str, int]]] = [[], [("a", 1)], []]
            makes = [lambda pairs=pairs, kind=kind: kind(pairs) for pairs in contents]
            wrong += by_turns(rank, step, makes, name=name)
        return wrong

    for wrong in world.run(body):
        assert not wrong, "\n".join(wrong)


def _unpacked(table: Any) -> Any:
    first, second = table
    return first, second


def _updated(table: Any) -> Any:
    other: dict[str, int] = {}
    other.update(table)
    return list(other)


ORDERS: dict[str, dict[str, Ask]] = {
    "iterated": {"items": lambda d: list(d.items()), "loop": lambda d: [d[name] for name in d]},
    "copied": {"list": list, "copy": lambda d: list(d.copy()), "starred": lambda d: list({**d})},
    "merged": {"or": lambda d: list(d | {}), "update": _updated},
    "unpacked": {"assigned": _unpacked, "starred": lambda d: (lambda *names: names)(*d)},
    "keywords": {"names": lambda d: (lambda **more: list(more))(**d)},
    "text": {"joined": lambda d: ",".join(d), "str": str},
    "popped": {"popitem": lambda d: d.popitem()},
}
"""What code makes of a dictionary in its order."""


@requirement(
    "DYN-GUARD-3751",
    "Compiled code takes a dictionary's items in the order of this dictionary, not of an earlier call's one, whatever "
    "it makes of them.",
    source="Python: Mapping Types, 'Dictionaries preserve insertion order'; torch.compile",
)
@pytest.mark.parametrize("way", ORDERS)
@pytest.mark.world(2)
def test_order(world: World, way: str) -> None:
    """Give dictionaries of the same names in one order and in the other, beside a sum over ranks."""

    def body(rank: Rank) -> list[str]:
        wrong = []
        for name, make in ORDERS[way].items():

            def step(x: torch.Tensor, table: Any, make: Ask = make) -> Any:
                return summed(x), make(table)

            orders = [lambda: {"a": 1, "b": 2}, lambda: {"b": 2, "a": 1}]
            wrong += by_turns(rank, step, orders, name=name)
        return wrong

    for wrong in world.run(body):
        assert not wrong, "\n".join(wrong)
