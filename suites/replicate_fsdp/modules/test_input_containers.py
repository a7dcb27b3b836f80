"""When the backward of a managed module ends, whatever container its inputs came in."""

from __future__ import annotations

import dataclasses
import itertools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from fixtures.containers import CONTAINERS
from fixtures.managed import ways
from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks import replicate_fsdp
from harness.stacks.limit import runs_with

SEARCHED = [name for name in CONTAINERS if name not in ("set", "own-set")]
"""Containers that PyTorch looks into: all but sets, into which its trees do not look either."""


MADE = {name: CONTAINERS[name][0] for name in SEARCHED}


class OwnDict(dict[str, Any]):
    """A dict of a class of its own, as batches of tokens often are."""


class Inner(nn.Module):
    """A weight that multiplies all floats of a container."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), 3.0))

    def forward(self, opened: Callable[[Any], list[Any]], given: Any = None, *, named: Any = None) -> torch.Tensor:
        """Open what is given, and return the products, added up."""
        every = [x for container in (given, named) if container is not None for x in opened(container)]
        floats = [x for x in every if isinstance(x, torch.Tensor) and x.is_floating_point()]
        return self.weight * torch.stack(floats).sum(0)


class Outer(nn.Module):
    """A weight before a managed module, which is looked at when its backward has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.inner = nn.Parameter(torch.full((2,), 2.0)), Inner()
        self.seen: list[tuple[bool, bool]] = []

    def forward(self, x: torch.Tensor, name: str, by_name: bool) -> torch.Tensor:
        """Give the inner module the product in a container, by name or by position."""
        hidden = self.weight * x
        hidden.register_hook(lambda _: self.look())
        make, opened = CONTAINERS[name]
        container = make(hidden, torch.arange(2, device=x.device))
        result: torch.Tensor = self.inner(opened, **{"named" if by_name else "given": container})
        return result

    def look(self) -> None:
        """See whether the inner weight is sharded again, and has its gradient."""
        self.seen.append((isinstance(self.inner.weight, DTensor), self.inner.weight.grad is not None))


@requirement(
    "RFSDP-IN-211",
    "The backward of a managed module reduces its gradients and reshards it before that of earlier layers, whatever "
    "container holds its inputs.",
    source="torch.distributed.fsdp.fully_shard; torch/distributed/fsdp/_common_utils.py: collect_grad_tensors",
)
@pytest.mark.skipif(runs_with("<2.12"), reason="before 2.12, tensors in dataclasses are not found")
@pytest.mark.usefixtures("with_early_averages")
@pytest.mark.world(2)
def test_ends_early(world: World) -> None:
    """Pass each container by position or by name to a module inside of another, which stays gathered or not."""

    def body(rank: Rank) -> None:
        for at, (way, managed) in enumerate(ways(rank).items()):
            model: Any = Outer().to(rank.device)
            managed(model.inner, **({} if way == "replicated" else {"reshard_after_forward": way == "sharded"}))
            managed(model)
            for by_name, name in zip(itertools.cycle((at % 2 == 0, at % 2 == 1)), SEARCHED, strict=False):
                what = f"{way}, {name}, {by_name=}"
                count = 2 if name == "in-a-named-one" else 1
                model.seen.clear()
                output = model(torch.full((2,), 1.0 + rank.index, device=rank.device), name, by_name)
                assert output.tolist() == [6.0 * count * (1 + rank.index)] * 2, what
                output.sum().backward()
                assert model.seen == [(True, True)], what
                gradients = {n: g.tolist() for n, g in replicate_fsdp.gradients(model).items()}
                assert gradients == {"weight": [4.5 * count] * 2, "inner.weight": [3.0 * count] * 2}, what
                model.zero_grad()

    world.run(body)


class Receiver(nn.Module):
    """A weight, and what the module was given last."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, *given: Any, **named: Any) -> torch.Tensor:
        """Note the inputs, and return the sum of all tensors times the weight."""
        self.given, self.named = given, named
        result: torch.Tensor = self.weight * sum(tensors(given) + tensors(list(named.values())))
        return result


def tensors(given: Any) -> list[torch.Tensor]:
    """Return the tensors in containers of any depth, in order."""
    if isinstance(given, torch.Tensor):
        return [given]
    if dataclasses.is_dataclass(given):
        given = [getattr(given, field.name) for field in dataclasses.fields(given)]
    inner = list(given.values()) if isinstance(given, Mapping) else given
    return [each for one in inner for each in tensors(one)] if isinstance(inner, (list, tuple)) else []


def described(given: Any) -> Any:
    """Return classes, keys and values of containers and tensors, whichever tensors those are."""
    if isinstance(given, torch.Tensor):
        return given.tolist()
    if dataclasses.is_dataclass(given):
        return type(given), [described(getattr(given, field.name)) for field in dataclasses.fields(given)]
    if isinstance(given, Mapping):
        return type(given), [(key, described(value)) for key, value in given.items()]
    return (type(given), [described(one) for one in given]) if isinstance(given, (list, tuple)) else given


ORDERS: list[list[str]] = [["query", "key", "value"], ["value", "query", "key"], ["b", "a"], ["x1", "x10", "x2"]]
"""Names of inputs, in the order in which they are given."""


@requirement(
    "RFSDP-IN-4883",
    "A managed module gets each input that requires gradients under its own name or position, and in a container of "
    "its own class.",
    source="torch.distributed.fsdp.fully_shard; torch/distributed/fsdp/_common_utils.py: replace_grad_tensors: "
    "'in the same traversal order'",
)
@pytest.mark.skipif(runs_with("<2.12"), reason="before 2.12, tensors in dataclasses are not found")
@pytest.mark.world(2, keeps="modules that store their inputs, in whose graphs they are")
def test_arrive(world: World) -> None:
    """Give tensors with and without gradients by name in several orders, in dicts, and in each container."""

    def body(rank: Rank) -> None:
        for way, managed in ways(rank).items():
            model: Any = managed(Receiver().to(rank.device))

            def made(number: int) -> torch.Tensor:
                return torch.full((1,), float(number), device=rank.device, requires_grad=number % 3 != 2)

            def dicts(kind: type, names: list[str]) -> Any:
                return kind((name, made(i)) for i, name in enumerate(names))

            calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
                *(((), dicts(dict, names)) for names in ORDERS),
                *(((dicts(kind, names), made(7)), {}) for names in ORDERS for kind in (dict, OrderedDict, OwnDict)),
                *(((make(made(0), made(1)),), {"named": make(made(3), made(4))}) for make in MADE.values()),
            ]
            for given, named in calls:
                right = described((given, named))
                model(*given, **named).sum().backward()
                assert described((model.given, model.named)) == right, f"{way}: {given}, {named}"

    world.run(body)


class Notes(nn.Module):
    """A weight, and a note of its product in what the module is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor, given: Any, named: Any, detached: bool) -> torch.Tensor:
        """Multiply a row of floats by the weight."""
        y = self.weight * x
        for notes in (given, named):
            noted = y.detach() if detached else y
            if isinstance(notes, list):
                notes.append(noted)
            else:
                table = notes if isinstance(notes, dict) else vars(notes)
                table[str(len(table))] = noted
        return y


class Noted(nn.Module):
    """Layers that are given the same two containers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Notes() for _ in range(3))
        self.counts: list[int] = []

    def forward(self, x: torch.Tensor, container: type, detached: bool = False) -> torch.Tensor:
        """Give one container by position, and one by name, and count what is in them."""
        given, named = container(), container()
        for layer in self.layers:
            x = layer(x, given, named=named, detached=detached)
        self.counts = [len(each if hasattr(each, "__len__") else vars(each)) for each in (given, named)]
        return x


KINDS: dict[str, dict[str, tuple[bool, bool]]] = {
    "plain": {"trained": (True, False)},
    "without-gradients": {"trained": (True, True), "evaluated": (False, False)},
    "cast": {"trained": (True, False), "detached": (True, True), "evaluated": (False, False)},
}
"""Whether a model is trained, and whether its notes are detached, by the kind of its management."""
if runs_with("<2.12"):  # before, detached notes are lost as others are (fsdp_noted_inputs)
    del KINDS["without-gradients"]["trained"]


@requirement(
    "RFSDP-IN-9341",
    "A list, dict or other object that a managed module is given has after its forward what the module put into it.",
    source="torch.distributed.fsdp.fully_shard: 'forward'; torch.distributed.fsdp.MixedPrecisionPolicy: "
    "cast_forward_inputs; huggingface/transformers#45663",
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("container", [list, dict, SimpleNamespace], ids=["list", "dict", "namespace"])
@pytest.mark.world(2)
def test_notes(world: World, container: type, kind: str) -> None:
    """Three layers in a model put their results into containers of the model; train, and evaluate."""
    options = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)} if kind == "cast" else {}

    def body(rank: Rank) -> dict[str, list[int]]:
        found = {}
        for way, managed in ways(rank).items():
            model: Any = Noted().to(rank.device)
            for part in (*model.layers, model):
                managed(part, **options)
            for how, (training, detached) in KINDS[kind].items():
                with torch.set_grad_enabled(training):
                    output = model(torch.ones(1, device=rank.device), container, detached)
                if training:
                    output.sum().backward()
                found[f"{way}, {how}"] = model.counts
        return found

    whole = {f"{way}, {how}": [3, 3] for way in ("replicated", "sharded", "hybrid") for how in KINDS[kind]}
    assert_on_ranks([whole] * 2, world.run(body))
