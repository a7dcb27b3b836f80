"""What code with collectives calls in Python: functions by their parameters, modules by __call__, context managers."""

from __future__ import annotations

import functools
import inspect
import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from harness import Rank, World, requirement
from harness.stacks import dynamo
from harness.stacks.limit import runs_with
from suites.dynamo.objects import Case, known, summed, unlike


def _by_position(x: torch.Tensor, k: float = 2.0, /, **options: float) -> Any:
    return summed(x) * k, options


def _by_position_or_name(x: torch.Tensor, /, k: float, *more: float, scale: float = 3.0, **options: float) -> Any:
    return summed(x) * k * scale, more, options


def _by_name(x: torch.Tensor, *, k: float = 4.0, **options: float) -> Any:
    return summed(x) * k, options


BY_NAME = {"k": 7.0, "x": 3.0}

CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "by position": lambda x: _by_position(x, 5.0),
    "left out": lambda x: _by_position(x),
    "named as the tensor": lambda x: _by_position(x, x=3.0),
    "named as the number": lambda x: _by_position(x, k=7.0),
    "named as both": lambda x: _by_position(x, 5.0, k=7.0, x=3.0),
    "unpacked": lambda x: _by_position(*(x, 5.0), **BY_NAME),
    "more": lambda x: _by_position_or_name(x, 2.0, 3.0, 4.0, x=5.0),
    "by name": lambda x: _by_position_or_name(x, k=2.0, scale=5.0, x=6.0, y=7.0),
    "only by name": lambda x: _by_name(x, k=2.0, y=3.0),
    "missing": lambda x: _by_position_or_name(x, x=3.0),  # type: ignore[call-arg]
}
"""Calls of functions with parameters of each kind, of which one raises an error."""


@requirement(
    "DYN-CALLED-1900",
    "In compiled code, the arguments of a call go to the same parameters as in uncompiled code, whatever their kinds "
    "or their names.",
    source="Python: Calls; torch.compile: the compiled function does what the function does",
)
@pytest.mark.world(2)
def test_parameters(world: World) -> None:
    """Call by position, by name, with defaults, and by names that positional-only parameters have, too."""

    def taken(x: torch.Tensor) -> list[Any]:
        found: list[Any] = []
        for call in CALLS.values():
            try:
                found.append(call(x))
            except TypeError:
                found.append("refused")
        return found

    def body(rank: Rank) -> None:
        compiled, _ = dynamo.compiled(taken, backend="eager", fullgraph=False)
        x = torch.arange(2.0, device=rank.device) + rank.index
        for name, right, found in zip(CALLS, taken(x), compiled(x), strict=True):
            assert known(found) == known(right), name

    world.run(body)


class Plus(nn.Module):
    """A module that adds something in its own way of being called."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), 3.0))

    def __call__(self, x: torch.Tensor, *args: Any, more: float = 10.0) -> Any:
        return super().__call__(x, *args) + more

    def forward(self, x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        return x * self.weight * factor * summed(torch.ones_like(x.detach()))


class PlusInherited(Plus):
    """A module that has its way of being called from its class's base."""


class Outer(nn.Module):
    """A module that calls such modules, directly and in containers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.many = Plus(), nn.Sequential(PlusInherited(), Plus())
        self.kept = nn.ModuleDict({"a": Plus()})

    def forward(self, x: torch.Tensor) -> Any:
        return self.kept["a"](self.many(self.one(x)), more=5.0) + self.one(x, 2.0, more=1.0)


@requirement(
    "DYN-CALLED-1901",
    "A compiled model calls its modules by their own __call__, also under DDP.",
    source="torch.compile; torch.nn.Module.__call__",
)
@pytest.mark.parametrize("wraps", [False, True], ids=["plain", "ddp"])
@pytest.mark.world(2)
def test_own_call(world: World, wraps: bool) -> None:
    """Call modules whose class or its base adds a number to what forward returns, with hooks on one of them."""

    def body(rank: Rank) -> None:
        model: nn.Module = Outer().to(rank.device)
        model.one.register_forward_hook(lambda module, args, output: output * 2)  # type: ignore[union-attr]
        model = DistributedDataParallel(model) if wraps else model
        compiled, counter = dynamo.compiled(model, backend="eager", fullgraph=False)
        x = torch.arange(2.0, device=rank.device) + rank.index
        found = []
        for call in (model, compiled):
            output = call(x)
            output.sum().backward()
            found.append((known(output), [known(p.grad) for p in model.parameters()]))
            model.zero_grad()
        assert found[1] == found[0]
        assert counter.graphs

    world.run(body)


class Guarded:
    """A context manager that notes what ends its block, and stops errors of one class."""

    def __init__(self, stops: type[BaseException] | None) -> None:
        self.stops = stops
        self.seen: list[Any] = []

    def __enter__(self) -> Guarded:
        self.seen.append("entered")
        return self

    def __exit__(self, kind: Any, value: Any, trace: Any) -> bool:
        self.seen += [kind is None, kind is ValueError, isinstance(value, ValueError), trace is None]
        return kind is not None and kind is self.stops


def _in_context(x: torch.Tensor, stops: Any, error: Any) -> Any:
    context, caught = Guarded(stops), "nothing"
    y = summed(x)
    try:
        with context:
            y = y + 1
            if error is not None:
                raise error("no")
            y = y + 10
    except Exception:
        caught = "error"
    return y * 2, caught, context.seen


def _in_both(x: torch.Tensor, stops: Any, error: Any) -> Any:
    outer, inner, caught = Guarded(None), Guarded(stops), "nothing"
    y = summed(x)
    try:
        with outer, inner:
            y = y + 1
            if error is not None:
                raise error("no")
    except Exception:
        caught = "error"
    return y * 2, caught, outer.seen, inner.seen


CONTEXTS: dict[str, Case] = {
    f"{function.__name__}, {stops}, {error}": (function, (stops, error))
    for function in (_in_context, _in_both)
    for stops, error in ((None, None), (None, ValueError), (ValueError, ValueError), (ValueError, KeyError))
}
"""Blocks that end normally or by an error, in context managers that stop it or not."""


@requirement(
    "DYN-CALLED-1902",
    "In compiled code, __exit__ of a user's context manager has the class, value and traceback of the error that ends "
    "its block, or None.",
    source="Python: object.__exit__; torch.compile",
)
@pytest.mark.world(2)
def test_contexts(world: World) -> None:
    """End blocks after a sum over ranks normally or by errors, which the context manager stops or not."""

    def body(rank: Rank) -> list[str]:
        return unlike(rank, CONTEXTS, fullgraph=True)

    for wrong in world.run(body):
        assert not wrong, "\n".join(wrong)


def _refuse(*numbers: float, k: float = 0.0, scale: float = 1.0) -> float:
    raise ValueError(f"{numbers}, {k}, {scale}")


def _add(a: float, b: float = 10.0, k: float = 100.0, scale: float = 1000.0) -> float:
    return a + b + k + scale


class Refusing:
    """A class that can't be instantiated with certain numbers, and whose method raises an error."""

    def __init__(self, k: float = 0.0) -> None:
        if k:
            raise ValueError(k)

    def refuse(self, *, k: float) -> float:
        raise ValueError(k)


REFUSED: dict[str, Callable[[], Any]] = {
    "function": lambda: _refuse(k=3.0),
    "with positions": lambda: _refuse(1.0, 2.0, scale=3.0),
    "class": lambda: Refusing(k=3.0),
    "method": lambda: Refusing().refuse(k=3.0),
    "partial": lambda: functools.partial(_refuse, k=3.0)(scale=4.0),
    "argument": lambda: _add(1.0, k=_refuse(scale=3.0)),
    "builtin": lambda: int("a", base=10),
    "strict zip": lambda: list(zip([1], [], strict=True)),
}
"""Calls with keywords that raise ValueError."""


@requirement(
    "DYN-CALLED-3300",
    "In compiled code, a call after one that raised an error gets its own arguments only, whatever keywords the failed "
    "one had.",
    source="Python: Calls; torch.compile: the compiled function does what the function does",
)
@pytest.mark.skipif(runs_with("<2.13"), reason="before 2.13, the error of a strict zip cannot be caught")
@pytest.mark.world(2)
def test_after_failed_calls(world: World) -> None:
    """Call by position in a handler, in finally, and after both, each after calls of several kinds have failed."""

    def handled(x: torch.Tensor, call: Callable[[], Any]) -> Any:
        found: list[Any] = []
        try:
            call()
        except ValueError:
            found.append(_add(1.0, 2.0))
        finally:
            found.append(_add(3.0))
        return summed(x) * _add(4.0, 5.0), found

    def directly(x: torch.Tensor) -> Any:
        try:
            _refuse(1.0, k=3.0, scale=5.0)
        except ValueError:
            return summed(x) * _add(1.0, 2.0)

    def body(rank: Rank) -> list[str]:
        cases: dict[str, Case] = {name: (handled, (call,)) for name, call in REFUSED.items()}
        return unlike(rank, cases | {"directly": (directly, ())}, fullgraph=True)

    for wrong in world.run(body):
        assert not wrong, "\n".join(wrong)


FAILING: dict[str, Callable[[Any], Any]] = {
    "math.sqrt": lambda k: math.sqrt(k),
    "math.log": lambda k: math.log(k),
    "math.exp": lambda k: math.exp(-1e9 * k),
    "math.factorial": lambda k: math.factorial(k),
    "int": lambda k: int(f"{k}a"),
    "ord": lambda k: ord(f"{k}"),
    "chr": lambda k: chr(k),
    "index": lambda k: [1, 2][k - 5],
    "key": lambda k: {1: 2}[k],
    "division": lambda k: 1 // (k + 1),
    "operator": lambda k: operator.truediv(k, k + 1),
    "attribute": lambda k: k.size,
    "next": lambda k: next(iter(())),
    "unpacked": lambda k: (lambda a, b: a)(*[k]),  # type: ignore[call-arg]
}
"""Calls with the number -1, each of which raises an error."""


@requirement(
    "DYN-CALLED-1903",
    "Compiled code catches the errors of calls with plain numbers as uncompiled code does.",
    source="Python: try; torch.compile",
)
@pytest.mark.world(2)
def test_caught(world: World) -> None:
    """Catch errors of arithmetic, mathematical functions, indices, keys and attributes by their classes."""

    def caught(x: torch.Tensor, k: int) -> Any:
        y, found = summed(x), []
        for call in FAILING.values():
            try:
                call(k)
            except ValueError:
                found.append("value")
            except (OverflowError, ZeroDivisionError):
                found.append("number")
            except (LookupError, AttributeError, TypeError, StopIteration):
                found.append("other")
        return y * len(found), found

    def body(rank: Rank) -> list[str]:
        return unlike(rank, {"caught": (caught, (-1,))})

    for wrong in world.run(body):
        assert not wrong, "\n".join(wrong)


OUTSIDE = {"far": 10, "length": 2, "below": -3}
"""Indices outside a list of two elements."""


@requirement(
    "DYN-CALLED-2900",
    "Compiled code catches the IndexError of list.pop with any index outside the list.",
    source="Python: list.pop, 'raises an IndexError if the list is empty or the index is outside the list range'",
)
@pytest.mark.parametrize(
    "where",
    [
        "far",
        pytest.param("length", marks=pytest.mark.skipif(runs_with("<2.13"), reason="before 2.13, an internal error")),
        "below",
    ],
)
@pytest.mark.world(2)
def test_popped_outside(world: World, where: str) -> None:
    """Pop there, catch the error, and add what is left to a sum over ranks."""

    def step(x: torch.Tensor) -> Any:
        batches, caught = [1, 2], False
        try:
            batches.pop(OUTSIDE[where])
        except IndexError:
            caught = True
        return summed(x) * len(batches), batches, caught

    def body(rank: Rank) -> list[str]:
        return unlike(rank, {where: (step, ())})

    for wrong in world.run(body):
        assert not wrong, "\n".join(wrong)


class Schedule:
    """A schedule with a scale of its class and a scale for all."""

    @classmethod
    def scale(cls) -> float:
        return 2.0 if cls is Schedule else 3.0

    @staticmethod
    def shift() -> float:
        return 5.0

    def weight(self) -> float:
        return 7.0


class OwnSchedule(Schedule):
    """A schedule that asks its base."""

    def of_class(self) -> float:
        return super().scale()

    def static(self) -> float:
        return super().shift()

    def plain(self) -> float:
        return super().weight()


@requirement(
    "DYN-CALLED-2901",
    "In compiled code, super() calls each kind of method of the base, also for an object that this code has made.",
    source="Python: super; torch.compile",
)
@pytest.mark.parametrize("method", ["plain", "static", "of_class"])
@pytest.mark.parametrize("how", ["given", "made"])
@pytest.mark.world(2)
def test_super(world: World, how: str, method: str) -> None:
    """Multiply a sum over ranks by what the method of the base says."""
    given = OwnSchedule()

    def step(x: torch.Tensor) -> Any:
        schedule = given if how == "given" else OwnSchedule()
        return summed(x) * getattr(schedule, method)()

    def body(rank: Rank) -> list[str]:
        return unlike(rank, {method: (step, ())})

    for wrong in world.run(body):
        assert not wrong, "\n".join(wrong)


def _sharing(total: Any) -> tuple[Callable[[Any], None], Callable[[], Any]]:
    """Return two functions that share a variable, of which one assigns it."""

    def add(more: Any) -> None:
        nonlocal total
        total = total + more

    return add, lambda: total * 2


def _counting(total: Any) -> tuple[Callable[[Any], None], Callable[[], Any]]:
    """Return such functions that share the variable with a class and with a function within them."""

    class Adds:
        def __call__(self, more: Any) -> None:
            nonlocal total

            def within() -> None:
                nonlocal total
                total = total + more

            within()

    return Adds(), lambda: total * 2


SHARING: dict[str, Callable[[Any], tuple[Callable[[Any], None], Callable[[], Any]]]] = {
    "functions": _sharing,
    "an object and a function": _counting,
}


@requirement(
    "DYN-CALLED-3350",
    "In compiled code, functions that share a variable read what another of them has assigned, also after the code.",
    source="Python: nonlocal; torch.compile: the compiled function does what the function does",
)
@pytest.mark.parametrize("where", ["made", "given"])
@pytest.mark.world(2)
def test_shared_variables(world: World, where: str) -> None:
    """Add sums over ranks to a variable by one function and read it by another, before and after the last call."""

    def body(rank: Rank) -> list[str]:
        x, wrong = torch.ones(2, device=rank.device), []
        for name, make in SHARING.items():
            found = []
            for compiles in False, True:
                add, read = make(torch.zeros(2, device=rank.device))

                def step(x: torch.Tensor, make: Any = make, add: Any = add, read: Any = read) -> Any:
                    if where == "made":
                        add, read = make(x * 0)
                    seen = [read()]
                    for scale in (1, 3):
                        add(summed(x) * scale)
                        seen.append(read() + 0)
                    return seen

                call = dynamo.compiled(step, backend="eager", fullgraph=False)[0] if compiles else step
                found.append([known(call(x)), known(read()), known(call(x)), known(read())])
            if found[0] != found[1]:
                wrong.append(f"{name}: {found[0]} uncompiled, {found[1]} compiled")
        return wrong

    for wrong in world.run(body):
        assert not wrong, "\n".join(wrong)


def _functions(y: torch.Tensor) -> dict[str, Any]:
    """Return functions of each kind that are made here, and close over a tensor or not."""

    def plain(given: Any) -> Any:
        """Add a tensor."""
        return given + y

    def with_defaults(given: Any = 2, *more: Any, scale: int = 3, **options: Any) -> Any:
        return given * scale + len(more) + len(options)

    def annotated(given: int, /, scale: float = 1.5) -> float:
        return given * scale

    @functools.wraps(plain)
    def wrapping(given: Any) -> Any:
        return plain(given) * 2

    def outer() -> Any:
        def inner(given: Any) -> Any:
            return given - y

        return inner

    return {
        "plain": plain,
        "with defaults": with_defaults,
        "annotated": annotated,
        "wrapping": wrapping,
        "in another": outer(),
        "nameless": lambda given: given * 7,
    }


def _described(function: Any) -> Any:
    """Return what Python tells about a function, and what it gives."""
    names = ("__name__", "__doc__", "__defaults__", "__kwdefaults__", "__module__", "__closure__")
    told = [getattr(function, name) for name in names[:-1]]
    return told, str(inspect.signature(function)), function.__closure__ is None, known(function(3))


@requirement(
    "DYN-CALLED-3351",
    "A function that compiled code makes and returns has the name, parameters or text of the uncompiled code's one.",
    source="Python: Callable types, special attributes; torch.compile: the compiled function does what it does",
)
@pytest.mark.world(2)
def test_returned_functions(world: World) -> None:
    """Return functions beside a sum over ranks: with defaults, keywords, annotations, or of another's looks."""

    def step(x: torch.Tensor) -> Any:
        y = summed(x)
        return y, _functions(y)

    def body(rank: Rank) -> list[str]:
        x = torch.ones(2, device=rank.device)
        right, found = step(x)[1], dynamo.compiled(step, backend="eager", fullgraph=False)[0](x)[1]
        return [
            f"{name}: {_described(one)} uncompiled, {_described(found[name])} compiled"
            for name, one in right.items()
            if _described(one) != _described(found[name])
        ]

    for wrong in world.run(body):
        assert not wrong, "\n".join(wrong)
