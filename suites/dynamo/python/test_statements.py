"""Statements of Python in compiled code with collectives: conditions, match, assert, raise, global and f-strings."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from harness import Rank, World, requirement
from harness.stacks import dynamo
from harness.stacks.limit import runs_with
from suites.dynamo import asserting, counting
from suites.dynamo.objects import known, summed

SAME = "torch.compile: the compiled function does what the function does"


def outcome(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a call gives as plain data, or the class and the text of its error."""
    try:
        return known(function(*arguments))
    except Exception as error:
        return type(error).__name__, str(error).partition("\n")[0]


class Sized:
    """An object that is true if its length is not zero."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length


class Truth:
    """An object whose truth is what it is given, be it a bool or not."""

    def __init__(self, truth: Any) -> None:
        self.truth = truth

    def __bool__(self) -> Any:
        return self.truth


class Enough:
    """An object that is true if a tensor has more than four rows."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def __bool__(self) -> bool:
        return self.x.shape[0] > 4


class Table(dict[str, Any]):
    """A dictionary of a class of its own."""


CONDITIONS: dict[str, list[Callable[[], Any]]] = {
    "dict": [dict, lambda: {"a": 1}, lambda: {"a": torch.ones(1)}],
    # before 2.12, an empty dictionary of a user's class is true
    **({} if runs_with("<2.12") else {"dict of own class": [Table, lambda: Table(a=1)]}),
    "list": [list, lambda: [0], lambda: [torch.ones(1)]],
    "tuple": [tuple, lambda: (0,)],
    "set": [set, lambda: {0}],
    "frozenset": [frozenset, lambda: frozenset([0])],
    "deque": [deque, lambda: deque([0])],
    "text": [str, lambda: "0"],
    "number": [lambda: 0, lambda: 3, lambda: None, lambda: 0.0, lambda: -2.5],
    "modules": [nn.ModuleList, lambda: nn.ModuleList([nn.Identity()])],
    "modules by name": [nn.ModuleDict, lambda: nn.ModuleDict({"a": nn.Identity()})],
    "bool": [lambda: Truth(True), lambda: Truth(False)],
    # before 2.13, what is no bool is taken for one
    **({} if runs_with("<2.13") else {"no bool": [lambda: Truth(1), lambda: Truth(None), lambda: Truth("no")]}),
}
"""Things that are true or false, which compiled code gets in turn."""


def _if(x: torch.Tensor, thing: Any) -> Any:
    if thing:
        return summed(x) + 1
    return summed(x) - 1


def _if_not(x: torch.Tensor, thing: Any) -> Any:
    if not thing:
        x = x * 2
    return summed(x)


def _expression(x: torch.Tensor, thing: Any) -> Any:
    return summed(x) * (3 if thing else 5)


def _while(x: torch.Tensor, thing: Any) -> Any:
    rounds = 0
    while thing and rounds < 2:
        rounds += 1
    return summed(x) * rounds


def _every(x: torch.Tensor, thing: Any) -> Any:
    return [way(x, thing) for way in (_if, _if_not, _expression, _while)]


@requirement(
    "DYN-STATEMENT-3300",
    "A condition in compiled code is true for whatever is true in Python, also if what came before was false.",
    source=f"Python: Truth Value Testing; {SAME}",
)
@pytest.mark.world(2, timeout=120)
def test_conditions(world: World) -> None:
    """Give one compiled function empty and full containers of a class, numbers, modules or objects in turn."""

    def body(rank: Rank) -> list[str]:
        x, wrong = torch.ones(2, device=rank.device), []
        for kind, things in CONDITIONS.items():
            compiled, _ = dynamo.compiled(_every, backend="eager", fullgraph=False)
            for number, make in enumerate([*things, things[0]]):
                right, found = outcome(_every, x, make()), outcome(compiled, x, make())
                if found != right:
                    wrong.append(f"{kind}, call {number}: {right} uncompiled, {found} compiled")
        return wrong

    for wrong in world.run(body):
        assert not wrong, "\n".join(wrong)


SIZES: dict[str, Callable[[torch.Tensor], Any]] = {
    "if": lambda x: _if(x, x.shape[0]),
    "if not": lambda x: _if_not(x, x.size(0)),
    "expression": lambda x: _expression(x, x.shape[0]),
    "while": lambda x: _while(x, x.shape[0]),
    "and": lambda x: summed(x) * (x.shape[0] and 2),
    "or": lambda x: summed(x) * len((x.shape[0] == 0) or (1, 2)),  # type: ignore[arg-type]
    "not": lambda x: summed(x) + (not x.shape[0]),
    "number of elements": lambda x: _if(x, x.numel()),
    "object with a length": lambda x: _if(x, Sized(x.shape[0])),
}
"""Ways to ask whether a size is zero."""

LIMITED: dict[str, Callable[[torch.Tensor], Any]] = {
    "object": lambda x: _if(x, Enough(x)),
    "no object": lambda x: _if_not(x, Enough(x)),
    "comparison": lambda x: _expression(x, x.shape[0] > 4),
}
"""Ways to ask whether a tensor has more than four rows."""


@requirement(
    "DYN-STATEMENT-3301",
    "With dynamic=True, code whose conditions ask only whether a size is zero is compiled once for all other sizes.",
    source="torch.compile: dynamic; Python: Truth Value Testing",
)
@requirement(
    "DYN-STATEMENT-3302",
    "With dynamic=True and fullgraph=True, a condition may compare a size, also within an object's __bool__.",
    source="torch.compile: dynamic, fullgraph; Python: object.__bool__",
)
@pytest.mark.parametrize(("ways", "graphs"), [(SIZES, 1), (LIMITED, 2)], ids=["zero or not", "limited"])
@pytest.mark.skipif(runs_with("<2.13"), reason="before 2.13, conditions by an object of a dynamic size differ")
@pytest.mark.world(2)
def test_sizes_as_conditions(world: World, ways: dict[str, Callable[[torch.Tensor], Any]], graphs: int) -> None:
    """Ask for the sizes of tensors of two to eight rows."""

    def body(rank: Rank) -> list[str]:
        wrong = []
        for name, ask in ways.items():
            compiled, counter = dynamo.compiled(ask, backend="eager", dynamic=True)
            for rows in (2, 3, 5, 6, 8):
                x = torch.ones(rows, device=rank.device)
                right, found = outcome(ask, x), outcome(compiled, x)
                if found != right:
                    wrong.append(f"{name}, {rows} rows: {right} uncompiled, {found} compiled")
            if counter.graphs != graphs:
                wrong.append(f"{name}: {counter.graphs} graphs, not {graphs}")
        return wrong

    for wrong in world.run(body):
        assert not wrong, "\n".join(wrong)


class Batch(NamedTuple):
    """A batch that patterns take apart."""

    x: torch.Tensor
    rows: int


class Loss:
    """A loss that patterns take apart by its attributes."""

    __match_args__ = ("kind", "scale")

    def __init__(self, kind: str, scale: float) -> None:
        self.kind, self.scale = kind, scale


def _matched(x: torch.Tensor, thing: Any) -> Any:
    match thing:
        case []:
            found: Any = "nothing"
        case [torch.Tensor() as only]:
            found = only * 2
        case Batch(x=given, rows=3):
            found = given * 3
        case [first, *rest] if len(rest) > 2:
            found = first, rest
        case (first, [second, 5 | 6]) | (first, second):
            found = first, second
        case [*_]:
            found = "sequence"
        case {"x": given, **others}:
            found = given, others
        case {}:
            found = "mapping"
        case Loss("mean", scale):
            found = scale
        case Loss(kind=kind, scale=1.0 | 2.0):
            found = kind
        case str(text):
            found = text
        case None | True:
            found = "constant"
        case int(number) | float(number):
            found = number
        case _:
            found = "other"
    return summed(x), found


MATCHED: dict[str, Callable[[torch.Tensor], Any]] = {
    "empty list": lambda x: [],
    "list of a tensor": lambda x: [x],
    "tuple of tensors": lambda x: (x, x + 1),
    "list of tensors": lambda x: [x, x + 1, x + 2],
    "long list": lambda x: [x, 1, 2, 3],
    "nested": lambda x: (x, [x + 1, 6]),
    "named": lambda x: Batch(x, 3),
    "named otherwise": lambda x: Batch(x, 4),
    "mapping": lambda x: {"x": x, "y": 2},
    "mapping without": lambda x: {"y": x},
    "mean": lambda x: Loss("mean", 3.0),
    "by name": lambda x: Loss("sum", 2.0),
    "no pattern": lambda x: Loss("sum", 3.0),
    "text": lambda x: "abc",
    "none": lambda x: None,
    "true": lambda x: True,
    "number": lambda x: 7,
    "real": lambda x: 2.5,
}
"""Things that a match statement takes apart."""


@requirement(
    "DYN-STATEMENT-3303",
    "A match statement in compiled code takes the same case with the same names as uncompiled, also for tensors in "
    "containers.",
    source=f"Python: The match statement; {SAME}",
)
@pytest.mark.skipif(runs_with("<2.13"), reason="before 2.13, what a star takes is a tuple")
@pytest.mark.world(2)
def test_match(world: World) -> None:
    """Match what is given, and what is made inside, with patterns of each kind."""

    def made(x: torch.Tensor, things: Any) -> Any:
        return [_matched(x, make(x)) for make in MATCHED.values()]

    def given(x: torch.Tensor, things: Any) -> Any:
        return [_matched(x, thing) for thing in things]

    def body(rank: Rank) -> list[str]:
        x, wrong = torch.ones(2, device=rank.device), []
        for function in (made, given):
            things = [make(x) for make in MATCHED.values()]
            compiled, _ = dynamo.compiled(function, backend="eager")
            for name, right, found in zip(MATCHED, function(x, things), compiled(x, things), strict=True):
                if known(found) != known(right):
                    wrong.append(f"{name}, {function.__name__}: {right} uncompiled, {found} compiled")
        return wrong

    for wrong in world.run(body):
        assert not wrong, "\n".join(wrong)


@requirement(
    "DYN-STATEMENT-3304",
    "An assert in compiled code whose condition is no tensor raises AssertionError with its text, as uncompiled.",
    source=f"Python: The assert statement; {SAME}",
)
@pytest.mark.parametrize(
    "function",
    [asserting.alone, asserting.with_text, asserting.with_formatted_text, asserting.in_call, asserting.caught],
    ids=lambda f: f.__name__.replace("_", "-"),
)
@pytest.mark.skipif(runs_with("<2.13"), reason="before 2.13, the text of a failed assert is missing")
@pytest.mark.world(2)
def test_asserted(world: World, function: Callable[[torch.Tensor, Any], Any]) -> None:
    """Assert that an argument is a certain text, which it is, is not, and is again."""

    def body(rank: Rank) -> list[str]:
        x, wrong = torch.ones(2, device=rank.device), []
        compiled, _ = dynamo.compiled(function, backend="eager", fullgraph=False)
        for k in ("a", "b", "a", None):
            right, found = outcome(function, x, k)[:2], outcome(compiled, x, k)[:2]
            if found != right:
                wrong.append(f"{k}: {right} uncompiled, {found} compiled")
        return wrong

    for wrong in world.run(body):
        assert not wrong, "\n".join(wrong)


def _again() -> None:
    raise


def _told(function: Callable[[], Any]) -> Any:
    """Return the class and arguments of a call's error, and the classes of those that it was raised in or from."""
    try:
        return function()
    except Exception as error:
        context, cause = error.__context__, error.__cause__
        about = type(context).__name__, type(cause).__name__, error.__suppress_context__
        return type(error).__name__, error.args, about


def _raise_in_handler() -> Any:
    try:
        raise KeyError("a")
    except KeyError:
        raise ValueError("b")  # noqa: B904


def _raise_in_handler_of_call() -> Any:
    try:
        return {}["a"]
    except KeyError:
        return int("b")


def _raise_after_handler() -> Any:
    try:
        raise KeyError("a")
    except KeyError:
        pass
    raise ValueError("b")


def _raise_in_finally() -> Any:
    try:
        raise KeyError("a")
    finally:
        raise ValueError("b")


def _raise_from_none() -> Any:
    try:
        raise KeyError("a")
    except KeyError:
        raise ValueError("b") from None


def _raise_again() -> Any:
    try:
        raise KeyError("a")
    except KeyError:
        raise


def _raise_again_after_another() -> Any:
    try:
        raise KeyError("a")
    except KeyError:
        try:
            raise ValueError("b")
        except ValueError:
            pass
        raise


def _raise_again_in_call() -> Any:
    try:
        raise KeyError("a")
    except KeyError:
        return _again()


def _raise_three() -> Any:
    try:
        return _raise_in_handler()
    except ValueError:
        raise TypeError("c")  # noqa: B904


class Failing:
    """A context manager that raises an error at the end of its block."""

    def __enter__(self) -> Failing:
        return self

    def __exit__(self, *error: object) -> None:
        raise ValueError("b")


def _raise_in_exit() -> Any:
    with Failing():
        raise KeyError("a")


def _fails() -> Iterator[int]:
    try:
        yield 1
    except KeyError:
        raise ValueError("b")  # noqa: B904


def _raise_in_generator() -> Any:
    given: Any = _fails()
    next(given)
    return given.throw(KeyError("a"))


RAISED: list[Callable[[], Any]] = [
    _again,
    _raise_in_handler,
    _raise_in_handler_of_call,
    _raise_after_handler,
    _raise_in_finally,
    _raise_from_none,
    _raise_again,
    _raise_again_after_another,
    _raise_again_in_call,
    _raise_three,
    _raise_in_exit,
    _raise_in_generator,
]
"""Functions that raise errors while no other one is handled, while one is, and after one was."""


@requirement(
    "DYN-STATEMENT-3305",
    "An error that compiled code raises has the context and cause that it has uncompiled.",
    source=f"Python: The raise statement, BaseException.__context__; {SAME}",
)
@requirement(
    "DYN-STATEMENT-3306",
    "A raise without an error raises in compiled code the one that is handled, or RuntimeError if there is none.",
    source=f"Python: The raise statement, 'If there isn't currently an active exception'; {SAME}",
)
@pytest.mark.skipif(runs_with("<2.13"), reason="before 2.13, the arguments of errors are a list")
@pytest.mark.world(2)
def test_raised(world: World) -> None:
    """Raise errors in handlers, in finally, at the end of blocks, in calls and again."""

    def told(x: torch.Tensor) -> Any:
        return summed(x), [_told(function) for function in RAISED]

    def body(rank: Rank) -> list[str]:
        x = torch.ones(2, device=rank.device)
        right, found = told(x)[1], dynamo.compiled(told, backend="eager")[0](x)[1]
        return [
            f"{function.__name__}: {expected} uncompiled, {observed} compiled"
            for function, expected, observed in zip(RAISED, right, found, strict=True)
            if observed != expected
        ]

    for wrong in world.run(body):
        assert not wrong, "\n".join(wrong)


COUNTED: dict[str, Callable[[], Any]] = {
    "called": lambda: counting.count(),
    "called by another": lambda: counting.counted(),
    "called by a method": lambda: counting.Counter().counted(),
    "called twice": lambda: (counting.counted(), counting.count(), counting.total),
    "set from outside": lambda: _set_outside(),
    "own": lambda: _counted_here(),
}
"""Functions that set a global variable of another module, or one of this one that has the same name."""

total = 100


def _set_outside() -> int:
    counting.total = 50
    return counting.counted()


def _counted_here() -> Any:
    global total
    total += 1
    return total, counting.counted(), total


@requirement(
    "DYN-STATEMENT-3307",
    "A global that a function sets in compiled code is that of the function's module, whichever modules call it.",
    source=f"Python: The global statement; {SAME}",
)
@pytest.mark.world(2)
def test_globals(world: World) -> None:
    """Count in a module's variable, while this module has a variable of the same name."""

    def body(rank: Rank) -> None:
        global total
        x = torch.ones(2, device=rank.device)
        for how, count in COUNTED.items():

            def counts(x: torch.Tensor, count: Callable[[], Any] = count) -> Any:
                found = count()
                return summed(x) * counting.total, found

            found = []
            for call in (counts, dynamo.compiled(counts, backend="eager", fullgraph=False)[0]):
                total, counting.total = 100, 0
                found.append((known(call(x)), known(call(x)), total, counting.total))
            total, counting.total = 100, 0
            assert found[1] == found[0], how

    world.run(body)


FORMATTED: dict[str, Callable[[torch.Tensor], Any]] = {
    "f-string": lambda x: f"{x.shape[0]}",
    "of a sum": lambda x: f"{x.shape[0] + x.shape[1]} of {x.numel()}",
    "with a width": lambda x: f"{x.shape[0]:>5}|{x.shape[0]:<4}|",
    "converted": lambda x: f"{x.shape[0]!r:>5}|{x.shape[0]!s}",
    "as a width": lambda x: f"{7:{x.shape[0]}}|",
    "nested": lambda x: f"{f'{x.shape[0]}'}",
    "str": lambda x: (str(x.shape[0]), repr(x.size(0))),
    "format": lambda x: ("{}".format(x.shape[0]), "{:03d}".format(x.shape[0]), "%d" % x.shape[0]),  # noqa: UP031, UP032
    "shape": lambda x: f"{x.shape} {list(x.shape)}",
    "joined": lambda x: "-".join([f"{x.shape[0]}", "rows"]),
    "as a key": lambda x: {f"rows {x.shape[0]}": 1},
    "compared": lambda x: (f"{x.shape[0]}" == "3", len(f"{x.shape[0]}")),
    "number again": lambda x: int(f"{x.shape[0]}") + 1,
    "comparison": lambda x: f"{x.shape[0] > 3}",
}
"""Texts that have sizes in them."""


@requirement(
    "DYN-STATEMENT-3308",
    "A text that compiled code makes of sizes has the sizes of each call, also with dynamic=True.",
    source=f"Python: Formatted string literals; torch.compile: dynamic; {SAME}",
)
@pytest.mark.parametrize("how", ["automatic", "dynamic"])
@pytest.mark.world(2)
def test_formatted(world: World, how: str) -> None:
    """Format sizes of tensors of three, four and twelve rows."""

    def texts(x: torch.Tensor) -> Any:
        return summed(x), [make(x) for make in FORMATTED.values()]

    def body(rank: Rank) -> list[str]:
        options: Mapping[str, Any] = {"dynamic": True} if how == "dynamic" else {}
        compiled, _ = dynamo.compiled(texts, backend="eager", fullgraph=False, **options)
        wrong = []
        for rows in (3, 4, 12):
            x = torch.ones(rows, 2, device=rank.device)
            for name, right, found in zip(FORMATTED, texts(x)[1], compiled(x)[1], strict=True):
                if known(found) != known(right):
                    wrong.append(f"{name}, {rows} rows: {right} uncompiled, {found} compiled")
        return wrong

    for wrong in world.run(body):
        assert not wrong, "\n".join(wrong)
