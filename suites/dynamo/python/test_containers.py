"""Containers that compiled code with collectives changes or iterates: they are afterwards as without compiling."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn

from harness import Rank, World, requirement
from harness.stacks import dynamo
from harness.stacks.limit import runs_with
from suites.dynamo.objects import known, summed, unlike


class Doubling(dict[Any, Any]):
    """A dictionary that keeps twice of what is written."""

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value * 2)


class InOrder(OrderedDict[Any, Any]):
    """An ordered dictionary that keeps twice of what is written."""

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value * 2)


class Log(list[Any]):
    """A list whose methods do not do what those of lists do."""

    def extend(self, values: Any) -> None:
        for value in values:
            super().append(value * 2)

    def clear(self) -> None:
        super().append("cleared")


def _written(x: torch.Tensor, table: Any) -> Any:
    y = summed(x)
    table["y"] = y
    table["k"] = 3
    return y + 1, "y" in table, len(table)


def _updated_and_removed(x: torch.Tensor, table: Any) -> Any:
    y = summed(x)
    table.update(y=y, n=4)
    del table["k"]
    return y + table.pop("n"), table.setdefault("d", 5), list(table)


def _counted(x: torch.Tensor, table: Any) -> Any:
    table["k"] += 1
    table["new"] += 2
    return summed(x) * table["k"], table["new"]


def _appended(x: torch.Tensor, items: Any) -> Any:
    y = summed(x)
    items.append(y)
    items.append(7)
    return y * len(items), items[0]


def _replaced(x: torch.Tensor, items: Any) -> Any:
    y = summed(x)
    items[0] = y
    return y + items[1], len(items)


def _popped(x: torch.Tensor, items: Any) -> Any:
    last = items.pop()
    items.append(9)
    return summed(x) * last, len(items)


def _extended(x: torch.Tensor, items: Any) -> Any:
    y = summed(x)
    items.extend([y, 5])
    return y * len(items), items[0]


def _added(x: torch.Tensor, items: Any) -> Any:
    items.add(8)
    items.discard(1)
    return summed(x) * len(items), 8 in items


Change = Callable[[torch.Tensor, Any], Any]

CHANGED: dict[str, tuple[Callable[[], Any], tuple[Change, ...]]] = {
    "dict": (lambda: {"k": 1, "a": 2}, (_written, _updated_and_removed)),
    "OrderedDict": (lambda: OrderedDict(k=1, a=2), (_written, _updated_and_removed)),
    "defaultdict": (lambda: defaultdict(int, k=1, a=2), (_written, _updated_and_removed, _counted)),
    "Counter": (lambda: Counter(k=1, a=2), (_counted,)),
    "own __setitem__": (lambda: Doubling(k=1, a=2), (_written,)),
    "own __setitem__, in order": (lambda: InOrder(k=1, a=2), (_written,)),
    "list": (lambda: [1, 2], (_appended, _replaced, _popped, _extended)),
    "own methods": (lambda: Log([1, 2]), (_appended, _replaced, _popped, _extended)),
    "deque": (lambda: deque([1, 2]), (_appended, _replaced, _popped, _extended)),
    "short deque": (lambda: deque([1, 2], maxlen=2), (_replaced, _popped)),
    "set": (lambda: {1, 2}, (_added,)),
}
"""Containers with what compiled code does to them."""


def content(container: Any) -> list[Any]:
    """Return what a container holds, in its order."""
    return [known(each) for each in (container.items() if hasattr(container, "items") else container)]


def _after(change: Change, make: Callable[[], Any], rank: Rank) -> Any:
    """Return what a function of a tensor and a new container gives, and what the container holds then."""
    container = make()
    found = known(change(torch.arange(2.0, device=rank.device) + rank.index, container))
    return found, type(container).__name__, content(container)


@requirement(
    "DYN-CONTAINER-1900",
    "A container that compiled code changes holds afterwards what it holds if the code is not compiled, whatever class "
    "it has.",
    source="torch.compile: the compiled function does what the function does; torch/_dynamo/side_effects.py",
)
@pytest.mark.world(2)
def test_changed(world: World) -> None:
    """Write sums over ranks and numbers to dictionaries, lists, deques, a set and subclasses with own methods."""

    def body(rank: Rank) -> list[str]:
        wrong = []
        for name, (make, changes) in CHANGED.items():
            for change in changes:
                compiled, _ = dynamo.compiled(change, backend="eager", fullgraph=False)
                right = _after(change, make, rank)
                for _ in range(2):
                    try:
                        found = _after(compiled, make, rank)
                    except Exception as error:  # no error is right
                        found = repr(error)[:300]
                    if found != right:
                        wrong.append(f"{name}, {change.__name__}: {right} uncompiled, {found} compiled")
        return wrong

    for wrong in world.run(body):
        assert not wrong, "\n".join(wrong)


PROXIES: dict[str, Callable[[Any], Any]] = {
    "index": lambda p: (p["a"], p["b"]),
    "get": lambda p: (p.get("b"), p.get("c", 9)),
    "keys": lambda p: list(p.keys()),
    "values": lambda p: list(p.values()),
    "items": lambda p: list(p.items()),
    "copied": lambda p: dict(p),
}
"""What can be asked of a mapping proxy."""


@requirement(
    "DYN-CONTAINER-1901",
    "In compiled code, a mapping proxy shows what the code has written to its dictionary before.",
    source="types.MappingProxyType: 'a dynamic view on the mapping's entries'; torch.compile",
)
@pytest.mark.world(2)
def test_proxies(world: World) -> None:
    """Give a dictionary with its proxy, replace and add an entry, and ask the proxy in each way."""

    def body(rank: Rank) -> list[str]:
        wrong = []
        for name, ask in PROXIES.items():

            def write(x: torch.Tensor, table: Any, proxy: Any, ask: Callable[[Any], Any] = ask) -> Any:
                table["a"] = 5
                table["b"] = 2
                return summed(x) * len(table), ask(proxy)

            compiled, _ = dynamo.compiled(write, backend="eager", fullgraph=False)
            found = []
            for call in (write, compiled):
                table = {"a": 1}
                result = call(torch.ones(2, device=rank.device), table, MappingProxyType(table))
                found.append((known(result), content(table)))
            if found[0] != found[1]:
                wrong.append(f"{name}: {found[0]} uncompiled, {found[1]} compiled")
        return wrong

    for wrong in world.run(body):
        assert not wrong, "\n".join(wrong)


class Names(set[str]):
    """Names, as a class of their own."""


@requirement(
    "DYN-CONTAINER-1900",
    "A container that compiled code changes holds afterwards what it holds if the code is not compiled, whatever class "
    "it has.",
    source="torch.compile: the compiled function does what the function does; torch/_dynamo/side_effects.py",
)
@pytest.mark.parametrize("kind", [set, Names], ids=["set", "own class"])
@pytest.mark.world(2)
def test_changed_sets(world: World, kind: type[set[str]]) -> None:
    """Add names to sets and remove them, between sums over ranks."""
    changes: dict[str, Callable[[set[str]], Any]] = {
        "add": lambda names: names.add("c"),
        "discard": lambda names: names.discard("a"),
        "update": lambda names: names.update(["c", "d"]),
    }

    def body(rank: Rank) -> list[str]:
        wrong = []
        for name, change in changes.items():

            def step(x: torch.Tensor, names: set[str], change: Any = change) -> torch.Tensor:
                change(names)
                return summed(x) * len(names)

            found = []
            for function in step, dynamo.compiled(step, backend="eager", fullgraph=False)[0]:
                names = kind(["a", "b"])
                found.append((function(torch.ones(1, device=rank.device), names).item(), sorted(names)))
            if found[0] != found[1]:
                wrong.append(f"{name}: {found[0]} uncompiled, {found[1]} compiled")
        return wrong

    for wrong in world.run(body):
        assert not wrong, "\n".join(wrong)


KEYS: dict[str, tuple[Any, Any]] = {
    "texts": ("first", "second"),
    "numbers": (1, 2),
    "modules": (nn.Linear(1, 1), nn.Linear(1, 1)),
}
"""Keys of a dictionary that has an order."""


@requirement(
    "DYN-CONTAINER-2902",
    "In compiled code, OrderedDict.move_to_end(key, last=False) moves any key to the beginning.",
    source="Python: collections.OrderedDict.move_to_end; torch.compile",
)
@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.world(2)
def test_moved_to_front(world: World, keys: str) -> None:
    """Keep sums over ranks in order, move them by position and by name, and see the order."""
    first, second = KEYS[keys]

    def step(x: torch.Tensor) -> Any:
        order = OrderedDict[Any, torch.Tensor]()
        order[first], order[second] = summed(x), x * 10
        order.move_to_end(second, False)
        moved = list(order.values())
        order.move_to_end(first, last=False)
        order.move_to_end(first)
        return [*moved, *order.values()]

    def body(rank: Rank) -> list[str]:
        return unlike(rank, {keys: (step, ())})

    for wrong in world.run(body):
        assert not wrong, "\n".join(wrong)


CONTAINED: dict[str, Callable[[torch.Tensor], Any]] = {
    "numbers": lambda x: (1 in [1, 2], 3 in (1, 2), 1 in {1: 2}, 3 in {1, 2}),
    "range": lambda x: (1 in range(2), 3 in range(2)),
    "tensor": lambda x: (x in [x], x in (x, x + 1)),
}
"""What is asked of containers."""


@requirement(
    "DYN-CONTAINER-2904",
    "In compiled code, `in` gives True or False, also for a tensor in a list that begins with this tensor.",
    source="Python: Membership test operations, 'any(x is e or x == e for e in y)'; torch.compile",
)
@pytest.mark.parametrize("of", CONTAINED)
@pytest.mark.world(2)
def test_contained(world: World, of: str) -> None:
    """Ask for numbers and for a tensor, and return the answers with a sum over ranks."""
    ask = CONTAINED[of]

    def step(x: torch.Tensor) -> Any:
        return summed(x), ask(x)

    def body(rank: Rank) -> list[str]:
        wrong = []
        compiled, _ = dynamo.compiled(step, backend="eager", fullgraph=False)
        x = torch.arange(2.0, device=rank.device)
        right, found = ([(type(each).__name__, str(each)) for each in call(x)[1]] for call in (step, compiled))
        if found != right:
            wrong.append(f"{right} uncompiled, {found} compiled")
        return wrong

    for wrong in world.run(body):
        assert not wrong, "\n".join(wrong)


GIVEN_TO_SETS: dict[str, Callable[[list[str]], Any]] = {
    "list": lambda names: names,
    "generator": lambda names: (name for name in names),
}
"""What a method of a set is given."""


@requirement(
    "DYN-CONTAINER-3101",
    "A method of a set gives in compiled code what it gives uncompiled, also for a generator.",
    source="torch.compile: the compiled function does what the function does; set.union",
)
@pytest.mark.parametrize("given", GIVEN_TO_SETS)
@pytest.mark.world(2)
def test_methods_of_sets(world: World, given: str) -> None:
    """Unite, intersect and subtract names."""

    def step(x: torch.Tensor, names: list[str]) -> tuple[torch.Tensor, list[Any]]:
        made = GIVEN_TO_SETS[given]
        results = [
            {"a", "b"}.union(made(names)),
            {"a", "b"}.difference(made(names)),
            {"a", "b"}.intersection(made(names)),
            {"a", "b"}.symmetric_difference(made(names)),
        ]
        return summed(x), results

    def body(rank: Rank) -> list[Any]:
        x = torch.ones(1, device=rank.device)
        return dynamo.compiled(step, backend="eager", fullgraph=False)[0](x, ["b", "c"])[1]

    right = [{"a", "b", "c"}, {"a"}, {"b"}, {"a", "c"}]
    for found in world.run(body):
        assert [sorted(each) for each in found] == [sorted(each) for each in right]


COPIES: dict[str, tuple[Callable[[], Any], dict[str, Callable[[Any], Any]]]] = {
    "dict": (lambda: {"k": 1, "a": 2}, {"copy": lambda d: d.copy(), "dict": dict, "unpacked": lambda d: {**d}}),
    "merged": (lambda: {"k": 1, "a": 2}, {"with none": lambda d: d | {}, "into none": lambda d: {} | d}),
    "OrderedDict": (lambda: OrderedDict(k=1, a=2), {"copy": lambda d: d.copy(), "OrderedDict": OrderedDict}),
    "defaultdict": (lambda: defaultdict(int, k=1, a=2), {"copy": lambda d: d.copy(), "dict": dict}),
    "list": (
        lambda: [1, 2],
        {"copy": lambda i: i.copy(), "list": list, "slice": lambda i: i[:], "sum": lambda i: i + []},
    ),
    "deque": (lambda: deque([1, 2]), {"copy": lambda i: i.copy(), "deque": deque, "list": list}),
    "set": (lambda: {1, 2}, {"copy": lambda i: i.copy(), "union": lambda i: i | set()}),
}
"""Containers with the ways to copy them."""

if not runs_with("<2.13"):  # before 2.13, set(given) of a set raises an AssertionError
    COPIES["set"][1]["set"] = set


@requirement(
    "DYN-CONTAINER-3350",
    "A copy of a container that compiled code returns has the container's class and content, but is not the container.",
    source="Python: dict.copy, list.copy, 'a shallow copy'; torch.compile: the compiled function does what it does",
)
@pytest.mark.world(2)
def test_copied(world: World) -> None:
    """Copy a container that is given beside a sum over ranks, change the copy afterwards, and look at both."""

    def change(container: Any) -> None:
        if isinstance(container, dict):
            container["new"] = 5
        else:
            (container.add if isinstance(container, set) else container.append)(5)

    def body(rank: Rank) -> list[str]:
        x, wrong = torch.ones(2, device=rank.device), []
        for name, (make, ways) in COPIES.items():

            def copied(x: torch.Tensor, given: Any, ways: Any = ways) -> Any:
                return summed(x), [way(given) for way in ways.values()]

            found = []
            for call in copied, dynamo.compiled(copied, backend="eager", fullgraph=name != "defaultdict")[0]:
                given = make()
                _, copies = call(x, given)
                facts = [(type(each).__name__, content(each), each is given) for each in copies]
                for each in copies:
                    change(each)
                found.append([*facts, content(given), *map(content, copies)])
            if found[0] != found[1]:
                wrong.append(f"{name}: {found[0]} uncompiled, {found[1]} compiled")
        return wrong

    for wrong in world.run(body):
        assert not wrong, "\n".join(wrong)


ORDERED: dict[str, Callable[[dict[str, float]], Any]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "defaultdict": lambda table: defaultdict(float, table),
    "own class": lambda table: Plain(table),
    "modules": lambda table: nn.ModuleDict({name: nn.Threshold(1e9, number) for name, number in table.items()}),
}
"""Containers of named numbers, which have an order."""


class Plain(dict[str, float]):
    """A dictionary of a class of its own."""


def _numbers_of(table: Any) -> dict[str, list[Any]]:
    """Return the names and numbers of a container in each way to go through it."""
    return {
        "items": [each for item in table.items() for each in item],
        "keys": list(table.keys()),
        "values": list(table.values()),
        "iterator": list(table),
        "reversed": list(reversed(list(table))),
        "comprehension": [name + "!" for name in table],
        "unpacked": [*table],
        "first": [next(iter(table))],
    }


@requirement(
    "DYN-CONTAINER-3351",
    "Compiled code goes through a dictionary in the order that the dictionary has at each call.",
    source="Python: dict, 'dictionaries preserve insertion order'; torch.compile: guards",
)
@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param(("dict",), id="dict"),
        pytest.param(
            tuple(ORDERED)[1:],
            id="others",
            marks=pytest.mark.skipif(runs_with("<2.13"), reason="before 2.13, [*table] of modules is an error"),
        ),
    ],
)
@pytest.mark.world(2)
def test_order(world: World, kinds: tuple[str, ...]) -> None:
    """Call with the same names in another order, in the first order again, and with other numbers."""

    def through(x: torch.Tensor, tables: list[Any]) -> Any:
        found = []
        for table in tables:
            y = summed(x)
            for value in table.values():
                y = y * 2 + (value(y) if isinstance(value, nn.Module) else value)
            seen = _numbers_of(table)
            found.append((y, {way: [each for each in seen[way] if not isinstance(each, nn.Module)] for way in seen}))
        return found

    def body(rank: Rank) -> None:
        x, compiled = torch.ones(2, device=rank.device), dynamo.compiled(through, backend="eager")[0]
        for table in {"a": 1.0, "b": 5.0}, {"b": 5.0, "a": 1.0}, {"a": 1.0, "b": 5.0}, {"b": 1.0, "a": 5.0}:
            right, found = (call(x, [ORDERED[name](table) for name in kinds]) for call in (through, compiled))
            for name, one, other in zip(kinds, right, found, strict=True):
                assert known(other) == known(one), f"{name} of {table}"

    world.run(body)
