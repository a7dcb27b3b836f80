"""Containers in which a replicated module takes its inputs and gives its outputs."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks import replicate

SOURCE = "torch.nn.parallel.DistributedDataParallel: forward"
STATIC = pytest.mark.needs(features=["static_graph"])


class Pair(NamedTuple):
    first: Any
    second: Any


class OwnPair(Pair):
    """A named tuple of a class of its own."""

    __slots__ = ()


class Words(dict[str, Any]):
    """A dict with attributes, as model libraries return them."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Row(list[Any]):
    """A list of a class of its own."""


class Column(tuple[Any, ...]):
    """A tuple of a class of its own."""

    __slots__ = ()


@dataclasses.dataclass
class Record:
    first: Any
    second: Any = None
    name: str = "record"


def most(x: torch.Tensor) -> Any:
    """Return what torch returns as a structure of its own: the largest elements and their indices."""
    return x.max(dim=0)


MAKES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "tensor": lambda x, y: x + y,
    "tuple": lambda x, y: (x, y),
    "one": lambda x, y: (x + y,),
    "list": lambda x, y: [x, y],
    "dict": lambda x, y: {"y": y, "x": x},
    "numbered": lambda x, y: {2: y, 1: x},
    "ordered": lambda x, y: OrderedDict(y=y, x=x),
    "named": lambda x, y: Pair(x, y),
    "own named": lambda x, y: OwnPair(x, y),
    "nested": lambda x, y: {"pair": Pair([x], ({"y": y}, None)), "text": "text", "number": 3, "flag": True},
    "of torch": lambda x, y: most(torch.stack([x + y, x + y - 1])),
    "words": lambda x, y: Words(y=y, x=x),
    "in words": lambda x, y: (Words(x=x), Words(y=y)),
    "row": lambda x, y: Row([x, y]),
    "column": lambda x, y: Column((x, y)),
    "record": lambda x, y: Record(x, y),
    "in record": lambda x, y: [Record(Pair(x, y))],
    "record of one": lambda x, y: Record(x + y),
    "twice": lambda x, y: (x, y, x.detach(), None, (), [], {}),
    "default": lambda x, y: defaultdict(list, {"x": [x], "y": [y]}),
    "packed": lambda x, y: nn.utils.rnn.pack_sequence([x, y]),
    "packed in a tuple": lambda x, y: (nn.utils.rnn.pack_sequence([x, y]), 1),
}
"""Containers that DistributedDataParallel searches for tensors, made of two."""
HIDDEN: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "deque": lambda x, y: deque([x, y], maxlen=3),
    "namespace": lambda x, y: SimpleNamespace(x=x, y=y),
    "user's": lambda x, y: UserDict(x=x, y=y),
    "set": lambda x, y: {x, y},
    "function": lambda x, y: lambda: [x, y],
    "iterator": lambda x, y: iter([x, y]),
}
"""Objects that it does not search."""
OF_OTHER_CLASSES = ["words", "in words", "row", "column", "record", "in record", "record of one"]
NOT_FOUND = [*OF_OTHER_CLASSES, *(name for name in HIDDEN if name != "deque")]
"""Containers that pytree does not know: with a static graph, PyTorch silently averages nothing."""


def tensors(of: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of any of these containers that require gradients."""
    if isinstance(of, torch.Tensor):
        if of.requires_grad:
            yield of
        return
    if isinstance(of, nn.utils.rnn.PackedSequence):
        of = [of.data]
    elif isinstance(of, dict | UserDict):
        of = list(of.values())
    elif dataclasses.is_dataclass(of) or isinstance(of, SimpleNamespace):
        of = list(vars(of).values())
    elif callable(of):
        of = of()
    elif isinstance(of, str | int | None):
        of = ()
    for each in of:
        yield from tensors(each)


def shape_of(of: Any) -> Any:
    """Return classes, keys and whatever else is to stay the same, with tensors replaced by their values."""
    if isinstance(of, torch.Tensor):
        return type(of), of.dtype, of.requires_grad, of.tolist()
    if isinstance(of, dict | UserDict):
        own = [of.default_factory] if isinstance(of, defaultdict) else []
        return type(of), [(key, shape_of(value)) for key, value in of.items()], own
    if dataclasses.is_dataclass(of) or isinstance(of, SimpleNamespace):
        return type(of), [(key, shape_of(value)) for key, value in vars(of).items()]
    if isinstance(of, list | tuple | deque):
        own = [of.maxlen] if isinstance(of, deque) else []
        return type(of), [shape_of(each) for each in of], own
    return (type(of), of) if isinstance(of, str | int | None) else type(of)


class Gives(nn.Module):
    """A module with two layers and, with ``unused``, another one that no output uses; it makes its output of theirs."""

    def __init__(self, unused: bool) -> None:
        super().__init__()
        self.x, self.y = (nn.Linear(1, 1, bias=False) for _ in range(2))
        for layer in (self.x, self.y):
            nn.init.ones_(layer.weight)
        if unused:
            self.z = nn.Linear(1, 1, bias=False)
        self.given: Any = None

    def forward(self, x: torch.Tensor, make: Callable[[Any, Any], Any]) -> Any:
        self.given = make(self.x(x)[0], 2 * self.y(x)[0])
        return self.given


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "find-unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
}


IN_STATIC_GRAPHS = requirement(
    "REPL-STATIC-03",
    "With static_graph=True, gradients are averaged whatever container the outputs are in.",
    source="torch.nn.parallel.DistributedDataParallel: static_graph",
)


@requirement(
    "REPL-CALL-06",
    "Under every option, outputs keep the classes, keys and order of their containers.",
    source=SOURCE,
)
@requirement(
    "REPL-CALL-07",
    "Gradients are averaged whatever container the outputs are in.",
    source=SOURCE,
)
@IN_STATIC_GRAPHS
@pytest.mark.parametrize("options", list(OPTIONS))
@pytest.mark.parametrize("how", ["DDP", "replicate"])
@pytest.mark.world(2)
def test_outputs(world: World, how: str, options: str) -> None:
    """Run two steps for each container, one without synchronization, and an evaluation."""
    makes = MAKES if options == "find-unused" else {**MAKES, **HIDDEN}
    if options == "static":
        makes = {name: make for name, make in makes.items() if name not in NOT_FOUND}

    def body(rank: Rank) -> None:
        x = torch.full((1, 1), 1.0 + rank.index, device=rank.device)
        for name, make in makes.items():
            plain = Gives(False).to(rank.device)
            module = Gives(options == "find-unused").to(rank.device)
            model: Any = replicate.replicate(module, **OPTIONS[options]) if how == "replicate" else None
            model = model or DistributedDataParallel(module, **OPTIONS[options])
            for number in range(4):
                if number == 2 and how == "DDP":
                    model.require_backward_grad_sync = False
                elif number == 2:
                    model.set_requires_gradient_sync(False)
                with torch.set_grad_enabled(number < 3):
                    right, output = plain(x, make), model(x, make)
                assert shape_of(output) == shape_of(right), (name, number)
                if options == "plain" or (options == "static" and number):
                    assert output is module.given, (name, number)
                if number == 3:
                    continue
                found = list(tensors(output))
                torch.stack([each.sum() for each in found]).sum().backward()
                mean = 1.5 if number < 2 else 1.0 + rank.index
                gradients = [float(p.grad) for p in (module.x.weight, module.y.weight) if p.grad is not None]
                assert gradients == [mean, 2 * mean], (name, number)
                model.zero_grad()

    world.run(body)


@IN_STATIC_GRAPHS
@pytest.mark.parametrize("container", ["words", "record", "namespace"])
@pytest.mark.parametrize("how", ["DDP", "replicate"])
@pytest.mark.world(2)
def test_static_outputs(world: World, how: str, container: str) -> None:
    """Run three steps with an output in a dataclass, a class derived from a container, or another object."""
    make = {**MAKES, **HIDDEN}[container]

    def body(rank: Rank) -> list[list[float]]:
        module = Gives(False).to(rank.device)
        model: Any = replicate.replicate(module, static_graph=True) if how == "replicate" else None
        model = model or DistributedDataParallel(module, static_graph=True)
        gradients = []
        for _ in range(3):
            model.zero_grad()
            output = model(torch.full((1, 1), 1.0 + rank.index, device=rank.device), make)
            torch.stack([each.sum() for each in tensors(output)]).sum().backward()
            gradients.append([float(p.grad) for p in (module.x.weight, module.y.weight) if p.grad is not None])
        return gradients

    assert_on_ranks([[[1.5, 3.0]] * 3] * 2, world.run(body))


def parts(of: Any) -> list[Any]:
    """Return an object, and those in it at any depth."""
    inner: Any = ()
    if isinstance(of, dict | UserDict):
        inner = of.values()
    elif dataclasses.is_dataclass(of) or isinstance(of, SimpleNamespace):
        inner = vars(of).values()
    elif isinstance(of, list | tuple | deque | set):
        inner = of
    return [of, *(part for each in inner for part in parts(each))]


def write(given: list[Any]) -> list[Any]:
    """Write into each object that can be changed, and return what is to be found there."""
    for each in given:
        if isinstance(each, list | deque):
            each.append("written")
        elif isinstance(each, dict | UserDict):
            each["written"] = "written"
        elif isinstance(each, set):
            each.add("written")
        elif isinstance(each, Record | SimpleNamespace):
            each.written = "written"  # type: ignore[union-attr]
        elif isinstance(each, torch.Tensor) and not each.requires_grad:
            each.fill_(5.0)
    return [shape_of(each) for each in given]


class Takes(nn.Module):
    """A weight times a number, and a note of the other inputs, into which it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("buffer", torch.ones(1))
        self.given: list[Any] = []

    def forward(self, x: torch.Tensor, *others: Any, named: Any = None) -> torch.Tensor:
        """Multiply float[1] by the weight."""
        self.given = [part for each in (*others, named) for part in parts(each)]
        self.written = write(self.given)
        return self.weight * x


@requirement(
    "REPL-CALL-9092",
    "Without device_ids, the forward gets the very objects that the replicated module was called with, so what it "
    "writes into them stays.",
    source="torch.nn.parallel.DistributedDataParallel: device_ids, forward",
)
@pytest.mark.parametrize("options", [*OPTIONS][:2] + [pytest.param("static", marks=STATIC)])
@pytest.mark.parametrize("how", ["DDP", "replicate"])
@pytest.mark.world(2)
def test_inputs(world: World, how: str, options: str) -> None:
    """Give each container by position, by name, or within another one; train with synchronization or not, evaluate."""

    def body(rank: Rank) -> None:
        module = Takes().to(rank.device)
        model: Any = replicate.replicate(module, **OPTIONS[options]) if how == "replicate" else None
        model = model or DistributedDataParallel(module, **OPTIONS[options])
        x = torch.full((1,), 1.0 + rank.index, device=rank.device)
        for number, (name, make) in enumerate({**MAKES, **HIDDEN}.items()):
            for call, (synced, training) in enumerate(((True, True), (False, True), (True, False))):
                floats = [torch.full((1,), 2.0, device=rank.device, requires_grad=i == number % 2) for i in range(2)]
                given = make(*floats) if call else [make(*floats), (make(*floats), {"inner": None})]
                named = make(*floats) if call == 1 else {"named": make(*floats)}
                held = [*parts(given), *parts(named)]
                if how == "DDP":
                    model.require_backward_grad_sync = synced
                else:
                    model.set_requires_gradient_sync(synced)
                with torch.set_grad_enabled(training):
                    output = model(x, given, named=named)
                assert len(module.given) == len(held), (name, call)
                assert all(found is part for found, part in zip(module.given, held, strict=True)), (name, call)
                assert [shape_of(part) for part in held] == module.written, (name, call)
                if training:
                    output.sum().backward()
                    assert module.weight.grad.tolist() == [1.5 if synced else 1.0 + rank.index], (name, call)  # type: ignore[union-attr]
                    model.zero_grad()
            module.given, module.written = [], []

    world.run(body)


class Leaves(nn.Module):
    """A module that returns tensors without a graph, alone or beside an output."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.child = nn.Linear(1, 2, bias=False)
        self.register_buffer("buffer", torch.ones(2))
        self.made: Any = None

    def forward(self, x: torch.Tensor, given: list[Any], pack: Callable[[Any, Any], Any]) -> Any:
        """Multiply float[2] by the weights, and pack the product with what is returned as it is."""
        y = self.weight * x + self.child(x[:1]) * x
        made = {
            "parameter": self.weight,
            "frozen": self.frozen,
            "of a child": self.child.weight,
            "buffer": self.buffer,
            "inputs": [*given],
            "detached": y.detach(),
            "numbers": torch.arange(2, device=x.device),
            "again": self.weight,
            "none": None,
            "module": self.child,
            "text": "text",
        }
        self.made = made
        return pack(y, made)


PACKS: dict[str, Callable[[Any, Any], Any]] = {
    "tuple": lambda y, made: (y, *made.values()),
    "dict": lambda y, made: {"y": y, **made},
    "list": lambda y, made: [y, [made]],
    "named": lambda y, made: Pair(y, made),
}
"""How an output and tensors without a graph are returned."""


@requirement(
    "REPL-CALL-9093",
    "Among outputs, whatever has no graph of its own, such as a parameter, buffer or input, is the object that the "
    "module returned, under every option.",
    source="torch.nn.parallel.DistributedDataParallel: find_unused_parameters, static_graph; pytorch/pytorch#60733",
)
@pytest.mark.parametrize("options", [*OPTIONS][:2] + [pytest.param("static", marks=STATIC)])
@pytest.mark.parametrize("how", ["DDP", "replicate"])
@pytest.mark.world(2)
def test_outputs_without_a_graph(world: World, how: str, options: str) -> None:
    """Return them in each container, train with synchronization or not, evaluate, and change them."""

    def body(rank: Rank) -> None:
        for name, pack in PACKS.items():
            module = Leaves().to(rank.device)
            model: Any = replicate.replicate(module, **OPTIONS[options]) if how == "replicate" else None
            model = model or DistributedDataParallel(module, **OPTIONS[options])
            x = torch.full((2,), 1.0 + rank.index, device=rank.device)
            given = [torch.ones(2, device=rank.device, requires_grad=i == 0) for i in range(2)]
            for number, (synced, training) in enumerate(((True, True), (True, False), (False, True), (True, True))):
                if how == "DDP":
                    model.require_backward_grad_sync = synced
                else:
                    model.set_requires_gradient_sync(synced)
                with torch.set_grad_enabled(training):
                    output = model(x, given, pack)
                right = parts(pack(None, module.made))
                found = parts(output)
                assert len(found) == len(right), (name, number)
                for one, other in zip(found, right, strict=True):
                    if other is not None and not isinstance(other, dict | list | tuple):
                        assert one is other, (name, number)
                if not training:
                    continue
                output_of = next(each for each in found if isinstance(each, torch.Tensor))
                weight = next(each for each in found if each is module.weight)
                (output_of.sum() + 2 * rank.index * weight.sum()).backward()
                mean = 2.5 if synced else 1.0 + 3 * rank.index
                assert module.weight.grad.tolist() == [mean] * 2, (name, number)  # type: ignore[union-attr]
                model.zero_grad()
                with torch.no_grad():
                    for one in found:
                        if isinstance(one, torch.Tensor) and one is not output_of and one.is_floating_point():
                            one.fill_(2.0 + number)
                assert [p.tolist() for p in (module.weight, module.frozen)] == [[2.0 + number] * 2] * 2, (name, number)

    world.run(body)
