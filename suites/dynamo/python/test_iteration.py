"""Iterators, generators and operators of containers in compiled code with collectives: they give what Python's give."""

from __future__ import annotations

import itertools
import operator
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from harness import Rank, World, requirement
from harness.stacks import dynamo
from harness.stacks.limit import runs_with
from suites.dynamo.objects import known, summed


def _numbers(error: type[Exception]) -> Iterator[int]:
    """Yield two numbers, and raise an error."""
    yield 1
    yield 2
    raise error("no")


def _outcome(function: Callable[[], Any]) -> Any:
    """Return what a function returns, or the class of its error."""
    try:
        return function()
    except (ValueError, RuntimeError, StopIteration) as error:
        return type(error).__name__


def _consumed(kind: Callable[[list[int]], Iterator[int]]) -> Any:
    given = kind([1, 2, 3])
    return next(given), list(given), list(given), next(given, "none")


def _pairs() -> Any:
    given = iter([1, 2, 3, 4, 5])
    return list(zip(given, given, strict=False))


def _asked_again(error: type[Exception]) -> Any:
    given = _numbers(error)
    return next(given), next(given), _outcome(lambda: next(given)), next(given, "end")


def _first(of: Iterator[int], count: int) -> list[int]:
    return [value for _, value in zip(range(count), of, strict=False)]


def _endless(seen: list[int]) -> Iterator[list[int]]:
    for k in range(20):
        seen.append(k)
        yield [k, k + 1]


def _chained() -> Any:
    seen: list[int] = []
    found = _first(itertools.chain.from_iterable(_endless(seen)), 3)
    return found, seen


def _sent() -> Any:
    def total() -> Any:
        value = 0
        while True:
            more = yield value
            value += more

    given = total()
    return next(given), given.send(3), given.send(4)


def _from_another() -> Any:
    def outer() -> Any:
        yield 0
        yield from _numbers(ValueError)

    found: list[Any] = []

    def drawn() -> None:
        nonlocal found
        for value in outer():
            found += [value]

    return _outcome(drawn), found


def _from_each() -> Any:
    def outer() -> Any:
        yield from iter([1, 2])
        yield from map(abs, (-3, 4))
        yield from zip([5], [6], strict=False)
        yield from enumerate("a")
        yield from filter(None, [0, 7])
        yield from reversed([8, 9])
        yield from itertools.repeat(10, 2)
        yield from itertools.chain([11], (12,))
        yield from range(13, 15)
        yield from {"b": 1}.items()
        yield from (k * 2 for k in (15, 16))
        yield from itertools.islice(itertools.count(40), 3)

    return list(outer())


def _returned() -> Any:
    def counted(value: Any) -> Any:
        yield 1
        return value

    def ended(value: Any) -> Any:
        given = counted(value)
        next(given)
        try:
            next(given)
        except StopIteration as error:
            return error.value, error.args
        return "not ended"

    return [ended(value) for value in (None, 0, 5, (1, 2), "a")], list(counted(3))


ITERATED: dict[str, Callable[[], Any]] = {
    "iter": lambda: _consumed(iter),
    "map": lambda: _consumed(lambda items: map(abs, items)),
    "filter": lambda: _consumed(lambda items: filter(None, items)),
    "enumerate": lambda: [(k, value, k + value) for k, value in enumerate(iter([1, 2]), start=3)],
    "zip of one with itself": _pairs,
    "zip strict": lambda: _outcome(lambda: list(zip([1, 2], [3], strict=True))),
    "zip not strict": lambda: _outcome(lambda: list(zip([1, 2], [3], strict=False))),
    "zip of equals, strict": lambda: list(zip([1, 2], (3, 4), strict=True)),
    "cycle": lambda: _first(itertools.cycle([1, 2, 3]), 8),
    "cycle of a generator": lambda: _first(itertools.cycle(k * 2 for k in range(3)), 7),
    "chain": lambda: _first(itertools.chain([1, 2], (3,), "a"), 9),  # type: ignore[arg-type]
    "chain from an iterable": _chained,
    "repeat": lambda: (list(itertools.repeat(5, 3)), _first(itertools.repeat(6), 2)),
    "count": lambda: _first(itertools.count(3, 2), 4),
    "islice": lambda: list(itertools.islice(itertools.count(), 2, 9, 3)),
    "pairwise": lambda: list(itertools.pairwise([1, 2, 3])),
    "accumulate": lambda: (
        list(itertools.accumulate([1, 2, 3])),
        list(itertools.accumulate([1, 2, 3], operator.mul, initial=2)),
    ),
    "product": lambda: list(itertools.product([1, 2], "ab")),
    "zip_longest": lambda: list(itertools.zip_longest([1], [2, 3], fillvalue=0)),
    "takewhile": lambda: list(itertools.takewhile(lambda k: k < 3, [1, 2, 3, 1])),
    "dropwhile": lambda: list(itertools.dropwhile(lambda k: k < 3, [1, 2, 3, 1])),
    "generator with an error": lambda: _asked_again(ValueError),
    "generator with StopIteration": lambda: _asked_again(StopIteration),
    "generator that is sent to": _sent,
    "generator from another": _from_another,
    "generator from iterators": _from_each,
    "generator that returns": _returned,
    "sum": lambda: (sum([1, 2], start=3), sum(k for k in (4, 5))),
    "extremes": lambda: (max(iter([1, 3, 2])), min((), default=7), max(["a", "bb"], key=len)),
    "any and all": lambda: (any(k > 1 for k in (1, 2)), all(iter([1, 0]))),
    "unpacked": lambda: (lambda first, *rest: (first, rest))(*iter([1, 2, 3])),
}
"""What is drawn from iterators and generators, also after they have ended or failed."""


def _extended() -> Any:
    items = [0]
    return _outcome(lambda: items.extend(_numbers(ValueError))), items


def _updated(table: Any, more: Any) -> Any:
    other = table
    table |= more
    return list(table), list(other), other is table


def _in_front(last: bool) -> Any:
    table = OrderedDict(a=1, b=2, c=3)
    table.move_to_end("b", last=last)
    return list(table), table.popitem(last=last)


def _by_operator(kind: Callable[[Any], Any]) -> Any:
    a, b = kind([1, 2, 3]), {3, 4}
    found = [a - b, a & b, a | b, a ^ b, a.union([5]), a.difference((1,)), a.intersection({2: 3})]
    return [(type(each).__name__, sorted(each)) for each in found], a.isdisjoint([7]), kind([1]) <= a


def _as_keys() -> Any:
    a = frozenset([1, 2])
    return {a - {2}: "difference", a | {3}: "union"}[frozenset([1])]


def _added(kind: type, more: Any) -> Any:
    items: Any = kind([1, 2])
    other = items
    items += more
    return list(items), list(other), other is items


def _put(put: Callable[[deque[int]], Any]) -> Any:
    queue = deque([0, 1, 2, 3], maxlen=3)
    other = queue
    given = put(queue)
    return list(queue), queue.maxlen, len(other), given if isinstance(given, int | None) else list(given)


def _increased(queue: deque[int]) -> Any:
    queue += [4, 5]


QUEUES: dict[str, Callable[[deque[int]], Any]] = {
    "appended": lambda queue: queue.append(4),
    "in front": lambda queue: queue.appendleft(4),
    "extended": lambda queue: queue.extend([4, 5]),
    "extended in front": lambda queue: queue.extendleft(iter([4, 5, 6, 7])),
    "added to": _increased,
    "popped before": lambda queue: (queue.popleft(), queue.append(4), queue.append(5)),
    "made of another": lambda queue: deque(queue, 2),
    "cleared": lambda queue: (queue.clear(), queue.extend(range(5))),
}
"""What comes into a queue of limited length that is full."""

OPERATED: dict[str, Callable[[], Any]] = {
    **{f"full queue, {name}": lambda put=put: _put(put) for name, put in QUEUES.items()},  # type: ignore[misc]
    "extended by a generator that fails": _extended,
    "updated": lambda: _updated({"a": 1}, {"b": 2}),
    "updated in order": lambda: _updated(OrderedDict(a=1), {"b": 2}),
    "set updated": lambda: _updated({1}, {2}),
    "frozen set updated": lambda: _updated(frozenset([1]), {2}),
    "list added to": lambda: _added(list, (3,)),
    "tuple added to": lambda: _added(tuple, (3,)),
    "moved to the end": lambda: _in_front(True),
    "moved to the front": lambda: _in_front(False),
    "set": lambda: _by_operator(set),
    "frozen set": lambda: _by_operator(frozenset),
    "frozen sets as keys": _as_keys,
    "orders of dictionaries": lambda: (
        OrderedDict(a=1, b=2) == OrderedDict(b=2, a=1),
        OrderedDict(a=1, b=2) == {"b": 2, "a": 1},
        {"a": 1, "b": 2} == {"b": 2, "a": 1},
    ),
    "merged": lambda: ({"a": 1} | {"a": 2, "b": 3}, {"a": 1, "c": 4}),
    "sorted": lambda: (sorted([2, 1, 3], reverse=True), sorted("bca", key=ord)),
    "sliced": lambda: ([1, 2, 3, 4][::-2], (1, 2, 3)[-2:]),
}
"""What operators and methods of containers give, also to who else has the container."""


def _differences(rank: Rank, cases: Mapping[str, Callable[[], Any]]) -> list[str]:
    """Return a sentence for each case that gives something else in compiled code than in uncompiled code."""

    def together(x: torch.Tensor) -> Any:
        return summed(x) * 2, [case() for case in cases.values()]

    x = torch.arange(2.0, device=rank.device) + rank.index
    right = together(x)
    found = dynamo.compiled(together, backend="eager")[0](x)
    assert known(found[0]) == known(right[0]), "the sum over ranks"
    return [
        f"{name}: {expected} uncompiled, {observed} compiled"
        for name, expected, observed in zip(cases, right[1], found[1], strict=True)
        if known(observed) != known(expected)
    ]


@requirement(
    "DYN-ITERATION-2500",
    "In compiled code, iterators and generators give values, end or fail as they do in uncompiled code.",
    source="Python: Iterator types; itertools; PEP 479; torch.compile",
)
@requirement(
    "DYN-ITERATION-2501",
    "In compiled code, operators and methods of containers give what they give in uncompiled code, also to others that "
    "have the container.",
    source="Python: Mapping types; Set types; torch.compile: the compiled function does what the function does",
)
@pytest.mark.skipif(runs_with("<2.13"), reason="before 2.13, several of these iterators and operators differ")
@pytest.mark.parametrize("cases", [ITERATED, OPERATED], ids=["iterators", "operators"])
@pytest.mark.world(2)
def test_values(world: World, cases: dict[str, Callable[[], Any]]) -> None:
    """Draw from iterators and use operators beside a sum over ranks."""
    for wrong in world.run(lambda rank: _differences(rank, cases)):
        assert not wrong, "\n".join(wrong)


GIVEN: dict[str, Callable[[], Iterator[int]]] = {
    "list": lambda: iter([1, 2, 3, 4]),
    "tuple": lambda: iter((1, 2, 3, 4)),
    "range": lambda: iter(range(4)),
    "range with a step": lambda: iter(range(0, 20, 4)),
    "range backwards": lambda: iter(range(9, 1, -2)),
    "count": lambda: itertools.count(3, 2),
    "repeat": lambda: itertools.repeat(7),
}
"""Iterators that are given to compiled code."""


@requirement(
    "DYN-ITERATION-2502",
    "Compiled code goes on with an iterator where its caller has left it, however far that is.",
    source="Python: Iterator types; torch.compile: the compiled function does what the function does",
)
@pytest.mark.world(2)
def test_begun(world: World) -> None:
    """Give compiled code iterators that have given no value, one, or two."""

    def drawn(x: torch.Tensor, *given: Iterator[int]) -> Any:
        return summed(x), [next(each) for each in given]

    def body(rank: Rank) -> None:
        x = torch.ones(2, device=rank.device)
        for begun in range(3):
            found = []
            for call in (drawn, dynamo.compiled(drawn, backend="eager", fullgraph=False)[0]):
                given = [make() for make in GIVEN.values()]
                for each in given * begun:
                    next(each)
                found.append((known(call(x, *given)), dict(zip(GIVEN, map(next, given), strict=True))))
            assert found[1] == found[0]

    world.run(body)


class Base:
    """A class whose methods of each kind say what they are given."""

    @classmethod
    def of_class(cls) -> Any:
        return cls.__name__

    @staticmethod
    def of_nothing(k: int) -> Any:
        return k + 1

    def of_instance(self) -> Any:
        return type(self).__name__

    @property
    def asked(self) -> Any:
        return "base"


class Derived(Base):
    """A class that calls its base's methods."""

    @classmethod
    def of_class(cls) -> Any:
        return "not the base's"

    def called(self) -> Any:
        return super().of_class(), super().of_nothing(3), super().of_instance(), super().asked


class Noting:
    """An object that notes which of its attributes are set or deleted."""

    def __init__(self) -> None:
        object.__setattr__(self, "log", [])

    def __setattr__(self, name: str, value: Any) -> None:
        self.log.append(f"set {name}")
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        self.log.append(f"deleted {name}")
        object.__delattr__(self, name)


def _called(x: torch.Tensor, thing: Any) -> Any:
    return summed(x), thing.called()


def _set_and_deleted(x: torch.Tensor, thing: Any) -> Any:
    thing.k = 3
    thing.k += 1
    y = summed(x) * thing.k
    del thing.k
    return y, hasattr(thing, "k"), thing.log


@requirement(
    "DYN-OBJECT-2500",
    "Compiled code calls an object's methods of each kind with what Python gives them, also through super and for "
    "attributes that are set or deleted.",
    source="Python: super; object.__delattr__; torch.compile: the compiled function does what the function does",
)
@pytest.mark.parametrize("of", [Derived, Noting], ids=["super", "attributes"])
@pytest.mark.world(2)
def test_methods(world: World, of: Callable[[], Any]) -> None:
    """Call a class's, a static and an instance's method of the base, or set, change and delete an attribute."""

    def body(rank: Rank) -> None:
        function, whole = (_called, True) if of is Derived else (_set_and_deleted, False)
        x = torch.ones(2, device=rank.device)
        right, thing = function(x, of()), of()
        found = dynamo.compiled(function, backend="eager", fullgraph=whole)[0](x, thing)
        assert known(found) == known(right)
        assert not hasattr(thing, "k")

    world.run(body)


def _caused(x: torch.Tensor) -> Any:
    y, found = summed(x), []
    for cause in (True, False):
        try:
            try:
                raise KeyError("a")
            except KeyError as error:
                if cause:
                    raise ValueError("b") from error
                raise ValueError("b") from None
        except ValueError as error:
            found.append((type(error.__cause__).__name__, str(error)))
    return y * 2, found


def _with_values(x: torch.Tensor) -> Any:
    with nullcontext(3) as k, nullcontext() as none, nullcontext([k]) as items:
        y = summed(x) * k
    return y, none, items


def _with_named_value(x: torch.Tensor) -> Any:
    with nullcontext(enter_result=3) as k:
        return summed(x) * k


@requirement(
    "DYN-CALLED-2500",
    "In compiled code, an error that is raised from another one has it as its cause.",
    source="Python: raise; torch.compile: the compiled function does what the function does",
)
@requirement(
    "DYN-CALLED-2501",
    "In compiled code, a nullcontext gives its block the value that it was made with.",
    source="contextlib.nullcontext; torch.compile: the compiled function does what the function does",
)
@pytest.mark.parametrize(
    "function", [_caused, _with_values, _with_named_value], ids=["causes", "nullcontext", "nullcontext by name"]
)
@pytest.mark.world(2)
def test_blocks(world: World, function: Callable[[torch.Tensor], Any]) -> None:
    """Raise an error from another one or from none, and enter contexts that only give a value."""

    def body(rank: Rank) -> None:
        x = torch.ones(2, device=rank.device)
        assert known(dynamo.compiled(function, backend="eager", fullgraph=False)[0](x)) == known(function(x))

    world.run(body)
