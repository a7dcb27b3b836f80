"""Which parameters a managed module shards and trains: shared, frozen and ignored ones, parts of it, and one rank."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from fixtures.layers import alone, layers, train
from fixtures.managed import ways
from harness import Rank, World, requirement
from harness.stacks import messages, replicate, replicate_fsdp
from harness.stacks.limit import runs_with

SOURCE = "torch.distributed.fsdp.fully_shard"


def kept_or_not(way: str) -> list[dict[str, Any]]:
    """Return options of a way to manage modules: parameters that stay gathered after a forward, and that do not."""
    return [{}] if way == "replicated" else [{"reshard_after_forward": value} for value in (True, False)]


def settings(rank: Rank) -> list[tuple[str, Any, dict[str, Any]]]:
    """Return every way to manage modules, with every option of it."""
    return [(way, managed, options) for way, managed in ways(rank).items() for options in kept_or_not(way)]


class Scale(nn.Module):
    """Multiply by a weight, whose length the ranks need not divide."""

    def __init__(self, value: float, rows: int = 3) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((rows, 2), value))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Tied(nn.Module):
    """An embedding and a head that have one weight, and a layer between them."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(rows, 2), Scale(2.0, 1), nn.Linear(2, rows, bias=False)
        self.head.weight = self.embedding.weight
        with torch.no_grad():
            self.embedding.weight.copy_(torch.arange(2.0 * rows).reshape(rows, 2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.body(self.embedding(ids)))
        return result


@requirement(
    "RFSDP-TIED-03",
    "Parameters that modules of one group share have the whole gradient in every row, and stay shared, also in uneven "
    "shards.",
    source=f"{SOURCE}: module; torch/distributed/fsdp/_fully_shard: 'use fully_shard([module_a, module_b])'",
)
@pytest.mark.world(2)
def test_shared(world: World) -> None:
    """Share a weight of one to five rows within a list or the root, in two steps; then in two groups, which fails."""

    def body(rank: Rank) -> None:
        for (way, managed), rows, listed in itertools.product(ways(rank).items(), (1, 4, 5), (True, False)):
            for options in kept_or_not(way):
                what = f"{way}, {rows} rows, {listed=}, {options}"
                model: Any = Tied(rows).to(rank.device)
                managed(model.body, **options)
                if listed:
                    managed([model.embedding, model.head], **options)
                managed(model, **options)
                sgd = torch.optim.SGD(model.parameters(), lr=0.5)
                plain: Any = Tied(rows)
                own = torch.optim.SGD(plain.parameters(), lr=0.5)
                for step in range(2):
                    ids = [torch.arange(r, rows + r) % rows for r in range(2)]
                    model(ids[rank.index].to(rank.device)).sum().backward()
                    ((plain(ids[0]) + plain(ids[1].roll(1))).sum() / 2).backward()
                    found = replicate_fsdp.gradients(model)
                    assert list(found) == ["embedding.weight", "body.weight"], what
                    for name, gradient in found.items():
                        right = plain.get_parameter(name).grad
                        assert torch.equal(gradient.cpu(), right), f"{what}, step {step}: {name}"
                    for each in sgd, own:
                        each.step()
                        each.zero_grad()
                    assert model.head.weight is model.embedding.weight, what
        for managed in () if runs_with("<2.13") else ways(rank).values():  # earlier versions train them, apart
            model = Tied(5).to(rank.device)
            for module in (model.embedding, model.head, model):
                managed(module)
            with pytest.raises(ValueError, match="another"):
                model(torch.arange(5, device=rank.device))

    world.run(body)


class Renamed(nn.Module):
    """Multiply by one weight under several names, and add a bias."""

    def __init__(self, rows: int, names: tuple[str, ...], trained: bool) -> None:
        super().__init__()
        weight = nn.Parameter(torch.arange(2.0 * rows).reshape(rows, 2) % 4 - 1, requires_grad=trained)
        self.names, self.bias = names, nn.Parameter(torch.ones(2))
        for name in names:
            self.register_parameter(name, weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = [self.get_parameter(name) for name in self.names]
        assert all(weight is weights[0] for weight in weights), "in the forward, its names have several parameters"
        for weight in weights:
            x = x * weight
        return x + self.bias


NAMES: list[tuple[int, tuple[str, ...], bool]] = [
    (1, ("encode", "decode", "weight"), True),
    (5, ("encode", "weight"), True),
    (4, ("weight", "decode"), False),
]
"""How many rows a parameter has, its names, and whether it is trained."""


@requirement(
    "RFSDP-TIED-9211",
    "A parameter that a module has under several names has the whole gradient, and stays one parameter under all of "
    "them, also in a forward.",
    source=f"{SOURCE}; torch.nn.Module.register_parameter",
)
@pytest.mark.world(2)
def test_own_names(world: World) -> None:
    """Name it twice or more in the root, in a part or in a list whose other layer shares it; train, load, evaluate."""

    def created(rows: int, names: tuple[str, ...], trained: bool, where: str) -> Any:
        model: Any = nn.Sequential(Renamed(rows, names, trained), Scale(2.0, rows))
        if where == "list":
            model[1].weight = model[0].weight
        return model

    def body(rank: Rank) -> None:
        for (way, managed, options), where, case in itertools.product(settings(rank), ("root", "part", "list"), NAMES):
            what = f"{way}, {options}, {where}, {case}"
            plain, model = created(*case, where), created(*case, where).to(rank.device)
            if where != "root":
                managed(list(model) if where == "list" else model[0], **options)
            managed(model, **options)
            every = dict(plain.named_parameters(remove_duplicate=False))
            sgds = [torch.optim.SGD(each.parameters(), lr=0.25) for each in (plain, model)]
            for step in range(2):
                x = (torch.arange(4.0 * case[0]).reshape(2, case[0], 2) + step) % 3
                (sum(plain(each).sum() for each in x) / 2).backward()
                model(x[rank.index].to(rank.device)).sum().backward()
                right = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
                found = replicate_fsdp.gradients(model)
                assert list(found) == list(right), what
                for name, gradient in found.items():
                    assert torch.equal(gradient.cpu(), right[name]), f"{what}, step {step}: {name}"
                for sgd in sgds:
                    sgd.step()
                    sgd.zero_grad()
            for loaded in False, True:
                if loaded:
                    with torch.no_grad():
                        plain[0].weight.mul_(2)
                    factors = {name: 2 if p is plain[0].weight else 1 for name, p in every.items()}
                    model.load_state_dict({name: p * factors[name] for name, p in model.state_dict().items()})
                with torch.no_grad():
                    assert torch.equal(model(x[0].to(rank.device)).cpu(), plain(x[0])), f"{what}, {loaded=}"
                if way != "replicated" and not options["reshard_after_forward"]:
                    for module in model.modules():
                        if isinstance(module, FSDPModule):
                            module.reshard()
                for name, p in every.items():
                    own = model.get_parameter(name)
                    assert own is model.get_parameter("0.weight") or p is not plain[0].weight, f"{what}: {name}"
                    assert torch.equal(replicate_fsdp.whole(own).cpu(), p), f"{what}, {loaded=}: {name}"
                state = model.state_dict()
                assert list(state) == list(plain.state_dict()), what

    world.run(body)


class Twice(nn.Module):
    """Layers that are called in an order, some of them without gradients besides."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scale(float(i + 1)) for i in range(4))
        self.order = [0, 1, 2, 3]
        self.besides: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in self.order:
            if i in self.besides:
                with torch.no_grad():
                    self.layers[i](x)
            x = self.layers[i](x)
        return x * 1


@requirement(
    "RFSDP-FROZEN-03",
    "Groups that are frozen or thawed, before or between steps, have gradients exactly while they are trained.",
    source=f"{SOURCE}; torch.nn.Module.requires_grad_",
)
@requirement(
    "RFSDP-CALLS-01",
    "A managed layer that one forward calls several times, with or without gradients, has the gradient of all calls "
    "that have them.",
    source=SOURCE,
)
@pytest.mark.world(2)
def test_frozen(world: World) -> None:
    """Freeze layers before they are managed or after, thaw them and freeze others, and call layers once or twice."""
    frozen: list[set[int]] = [{0, 2}, {1, 3}, set(), {0, 1, 2}]
    orders = [(True, [0, 1, 2, 3], []), (False, [0, 1, 2, 1, 3], [1]), (True, [3, 2, 2, 0, 1], [2, 0])]

    def body(rank: Rank) -> None:
        every = itertools.cycle(settings(rank))
        for (_, (early, order, besides)), (way, managed, options) in zip(
            itertools.product(range(3), orders), every, strict=False
        ):
            model: Any = Twice().to(rank.device)
            model.order, model.besides = order, besides
            if early:
                for i in frozen[0]:
                    model.layers[i].requires_grad_(False)
            for layer in model.layers:
                managed(layer, **options)
            managed(model, **options)
            for step, cold in enumerate(frozen):
                what = f"{way}, {early=}, {order}, {options}, step {step}"
                if step or not early:
                    for i, layer in enumerate(model.layers):
                        layer.requires_grad_(i not in cold)
                at = messages.mark()
                model(torch.full((3, 2), 1.0 + rank.index, device=rank.device)).sum().backward()
                reduced = [m for m in messages.since(at) if "gather" not in m.op]
                assert len(reduced) in (0, len(set(order) - cold)), what  # 0 if nothing records them
                for module in (*model.layers, model):
                    module.reshard()
                product = 1.5
                for i in order:
                    product *= i + 1
                right = {f"layers.{i}.weight": [order.count(i) * product / (i + 1)] for i in range(4) if i not in cold}
                found = {name: g.unique().tolist() for name, g in replicate_fsdp.gradients(model).items()}
                assert found == right, what
                model.zero_grad()

    world.run(body)


@requirement(
    "RFSDP-ROOT-05",
    "A sharded part of a model that is called or trained by itself has the values and gradients of one device.",
    source=SOURCE,
)
@pytest.mark.world(2)
def test_part_by_itself(world: World) -> None:
    """After steps of the whole model, call the first or the last part with gradients or without, and go on."""

    def body(rank: Rank) -> None:
        for way, managed in ways(rank).items():
            for options, part, grad in itertools.product(kept_or_not(way), (0, 1), (True, False)):
                what = f"{way}, {options}, part {part}, {grad=}"
                model: Any = nn.Sequential(Scale(2.0), Scale(3.0)).to(rank.device)
                for layer in model:
                    managed(layer, **options)
                managed(model)
                sgd = torch.optim.SGD(model.parameters(), lr=0.5)
                weights = [2.0, 3.0]
                x = torch.full((3, 2), 1.0 + rank.index, device=rank.device)
                for step in range(2):
                    model(x).sum().backward()
                    found = [g.unique().tolist() for g in replicate_fsdp.gradients(model).values()]
                    assert found == [[1.5 * weights[1]], [1.5 * weights[0]]], f"{what}, step {step}"
                    sgd.step()
                    sgd.zero_grad()
                    weights = [weights[0] - 0.75 * weights[1], weights[1] - 0.75 * weights[0]]
                    with torch.set_grad_enabled(grad):
                        y = model[part](x)
                    assert y.unique().tolist() == [weights[part] * (1 + rank.index)], f"{what}, step {step}"
                    if grad:
                        y.sum().backward()
                        found = [g.unique().tolist() for g in replicate_fsdp.gradients(model).values()]
                        assert found == [[1.5]], f"{what}, step {step}"
                        sgd.step()
                        sgd.zero_grad()
                        weights[part] -= 0.75

    world.run(body)


class Forked(nn.Module):
    """A trunk and two branches, whose weights are 2, 3 and 4, and an output of each branch."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = Scale(2.0), Scale(3.0), Scale(4.0)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.trunk(x)
        return self.left(y), self.right(y)


@requirement(
    "RFSDP-BACK-02",
    "Of a forward with several outputs, each may have a backward of its own, whichever modules it needs.",
    source=f"{SOURCE}; torch.distributed.fsdp.FSDPModule.set_is_last_backward",
)
@pytest.mark.world(2)
def test_forked(world: World) -> None:
    """Run backwards of either output, of both in either order, of one twice, or of the left and then of their sum."""
    orders: list[list[tuple[int, ...]]] = [[(0,)], [(1,)], [(0,), (1,)], [(1,), (0,)], [(1,), (1,)], [(0,), (0, 1)]]

    def body(rank: Rank) -> None:
        every = itertools.cycle(settings(rank))
        for (_, order), (way, managed, options) in zip(itertools.product(range(2), orders), every, strict=False):
            what = f"{way}, {options}, {order}"
            model: Any = Forked().to(rank.device)
            for layer in (model.trunk, model.left, model.right):
                managed(layer, **options)
            managed(model)
            sgd = torch.optim.SGD(model.parameters(), lr=0.25)
            trunk, left, right = 2.0, 3.0, 4.0
            for step in range(2):
                outputs = model(torch.full((3, 2), 1.0 + rank.index, device=rank.device))
                for number, used in enumerate(order, 1):
                    model.set_is_last_backward(number == len(order))
                    loss = torch.stack([outputs[i] for i in used]).sum()
                    loss.backward(retain_graph=number < len(order))
                for module in model.modules():
                    if isinstance(module, FSDPModule):
                        module.reshard()
                times = [sum(used.count(i) for used in order) for i in range(2)]
                expected = {
                    "trunk.weight": 1.5 * (left * times[0] + right * times[1]),
                    "left.weight": 1.5 * trunk * times[0],
                    "right.weight": 1.5 * trunk * times[1],
                }
                found = {name: g.unique().tolist() for name, g in replicate_fsdp.gradients(model).items()}
                assert found == {name: [value] for name, value in expected.items() if value}, f"{what}, step {step}"
                sgd.step()
                sgd.zero_grad()
                trunk, left, right = (w - g / 4 for w, g in zip((trunk, left, right), expected.values(), strict=True))

    world.run(body)


class Bare(nn.Module):
    """A weight, which the forward adds up without any input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 2))

    def forward(self) -> torch.Tensor:
        return self.weight.sum()


class Around(Bare):
    """A module without inputs, times that of another."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Bare()

    def forward(self) -> torch.Tensor:
        return super().forward() * self.inner()


@requirement(
    "RFSDP-CALLS-02",
    "A managed module whose forward takes no inputs trains as one that takes some.",
    source=SOURCE,
)
@pytest.mark.world(2)
def test_without_inputs(world: World) -> None:
    """Run two steps of such a module inside another, with the losses of ranks weighted differently."""

    def body(rank: Rank) -> None:
        for way, managed in ways(rank).items():
            for options in kept_or_not(way):
                model: Any = Around().to(rank.device)
                managed(model.inner, **options)
                managed(model, **options)
                for step in range(2):
                    output = model()
                    assert output.item() == 36.0, f"{way}, {options}, step {step}"
                    (output * (1 + rank.index)).backward()
                    found = [g.unique().tolist() for g in replicate_fsdp.gradients(model).values()]
                    assert found == [[9.0 * (step + 1)]] * 2, f"{way}, {options}, step {step}"

    world.run(body)


class Noting(nn.Linear):
    """A layer that says what its attributes are set to."""

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__.setdefault("noted", []).append(name)
        super().__setattr__(name, value)


@requirement(
    "RFSDP-CALLS-4500",
    "A managed module with a __setattr__ of its own trains as one without, and it is told what parameters become.",
    source=f"{SOURCE}; torch.nn.Module.__setattr__",
)
@pytest.mark.world(2)
def test_own_setattr(world: World) -> None:
    """Run three steps of two such layers with weights of their own, with one, and beside a plain layer."""

    def body(rank: Rank) -> None:
        for way, managed in ways(rank).items():
            for options, shared in itertools.product(kept_or_not(way), (False, True)):
                one, other, plain = Noting(2, 2, bias=False), Noting(2, 2, bias=False), nn.Linear(2, 1, bias=False)
                for layer in one, other, plain:
                    nn.init.constant_(layer.weight, 0.5)
                if shared:
                    other.weight = one.weight
                model: Any = nn.Sequential(one, other, plain).to(rank.device)
                right = copy.deepcopy(model)
                managed(model, **options)
                one.noted.clear()
                for step in range(3):
                    x = torch.tensor([[1.0, 2.0 + rank.index]], device=rank.device)
                    model(x).sum().backward()
                    (
                        sum(right(torch.tensor([[1.0, 2.0 + r]], device=rank.device)).sum() for r in range(2)) / 2
                    ).backward()
                    found = [g.tolist() for g in replicate_fsdp.gradients(model).values()]
                    assert found == [p.grad.tolist() for p in right.parameters()], f"{way}, {shared=}, step {step}"
                if way != "replicated":
                    assert "weight" in one.noted, way

    world.run(body)


class InTurn(nn.Module):
    """The forward of a container: its layers in turn."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.children():
            x = layer(x)
        return x


class Listed(nn.ModuleList):
    """A list with a forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return InTurn.forward(self, x)  # type: ignore[arg-type]


class ListedAgain(Listed):
    """A list whose forward is that of its base."""


class Mixed(InTurn, nn.ModuleList):
    """A list that has its forward from another class."""


class Keyed(nn.ModuleDict):
    """A dict with a forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return InTurn.forward(self, x)  # type: ignore[arg-type]


class Bound(nn.ModuleList):
    """A list without a forward."""


CONTAINERS: dict[str, Any] = {
    "list": Listed,
    "inherited": ListedAgain,
    "mixed": Mixed,
    "dict": lambda every: Keyed({f"layer{i}": layer for i, layer in enumerate(every)}),
}
"""How to put layers into a container that has a forward."""


@requirement(
    "RFSDP-APPLY-222",
    "A ModuleList or ModuleDict whose class has a forward may be managed at every place, and one that has none is "
    "refused.",
    source=f"{SOURCE}: 'containers that do not implement forward'",
)
@pytest.mark.skipif(runs_with("<2.12"), reason="before 2.12, every list and dict of modules is refused")
@pytest.mark.world(2)
def test_containers(world: World) -> None:
    """Manage lists and dicts as the root, inside one, as one of a group, or beside their own layers, for two steps."""

    def body(rank: Rank) -> None:
        right = alone(2)
        places = "root", "inside", "in a group", "around layers"
        for ((name, make), place), (way, managed, options) in zip(
            itertools.product(CONTAINERS.items(), places), itertools.cycle(settings(rank)), strict=False
        ):
            what = f"{way}, {name}, {place}, {options}"
            container = make(list(layers(rank.device)))
            model: Any = container if place == "root" else nn.Sequential(container, Scale(1.0, 1).to(rank.device))
            if place == "inside":
                managed(container, **options)
            elif place == "in a group":
                managed([container, model[1]], **options)
            elif place == "around layers":
                for layer in (*container.children(), container):
                    managed(layer, **options)
            managed(model)
            for step in range(2):
                assert train(model, rank.index)[:2] == right, f"{what}, step {step}"
                model.zero_grad()
        for managed in ways(rank).values():
            for without in nn.ModuleList, nn.ModuleDict, Bound:
                with pytest.raises(ValueError, match="forward"):
                    managed(without())

    world.run(body)


class Outer(nn.Module):
    """A weight of one's own beside two parts, which have two weights each."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.ones(3))
        self.first, self.second = Pair(), Pair()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.first(x) + self.second(x) + (self.own * x).sum()
        return y


class Pair(nn.Module):
    """Two weights."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.a * x).sum() + (self.b * x).sum()


@requirement(
    "RFSDP-IGN-04",
    "Parameters that fully_shard ignores, alone or with their whole module, stay the same plain tensors, with the "
    "gradients of their rank.",
    source=f"{SOURCE}: ignored_params",
)
@pytest.mark.world(2)
def test_ignored(world: World) -> None:
    """Ignore parameters of the root, of a part or a whole part, whose parts are managed apart or not."""
    ignored = [{"own"}, {"first.a"}, {"first.a", "first.b"}, {"own", "second.b", "first.b"}]

    def body(rank: Rank) -> None:
        for (way, managed), names, apart in itertools.product(ways(rank).items(), ignored, (False, True)):
            what = f"{way}, {names}, {apart=}"
            model: Any = Outer().to(rank.device)
            left = {model.get_parameter(name) for name in names}
            if apart:
                managed(model.second, ignored_params=left)
            managed(model, ignored_params=left)
            for step in range(2):
                model(torch.full((1,), 1.0 + rank.index, device=rank.device)).backward()
                for name, parameter in model.named_parameters():
                    assert isinstance(parameter, DTensor) == (name not in names), f"{what}: {name}"
                    assert name not in names or parameter in left, f"{what}: {name}"
                    assert replicate_fsdp.whole(parameter.grad).unique().tolist() == [
                        (1.0 + rank.index if name in names else 1.5) * (step + 1)
                    ], f"{what}, step {step}: {name}"

    world.run(body)


@requirement(
    "RFSDP-IGN-3670",
    "A sharded part of a module under DDP, which is told to ignore its parameters, trains with the rest.",
    source=f"{SOURCE}; torch/nn/parallel/distributed.py: _set_params_and_buffers_to_ignore_for_model",
)
@requirement(
    "RFSDP-UNSHARD-3671",
    "A sharded part that was unsharded early, while other collectives run, computes with its whole parameters.",
    source="torch.distributed.fsdp.FSDPModule.unshard: async_op",
)
@pytest.mark.usefixtures("with_reducer")
@pytest.mark.world(2)
def test_inside_ddp(world: World) -> None:
    """Shard a part of a module under DDP, or its own parameters are sharded, and unshard parts early in each step."""
    sharded = ["first"], ["second"], ["first", "second"]

    def body(rank: Rank) -> None:
        for names, kept in itertools.product(sharded, (False, True)):
            what = f"{names}, {kept=}"
            module: Any = Outer().to(rank.device)
            for name in names:
                fully_shard(module.get_submodule(name), mesh=rank.mesh(), reshard_after_forward=not kept)
            replicate.leave_alone(module, [f"{name}.{part}" for name in names for part in "ab"])
            model = DistributedDataParallel(module)
            sgd = torch.optim.SGD(module.parameters(), lr=2.0, foreach=False)
            weight = 1.0
            for step in range(3):
                counted = torch.tensor([1.0 + rank.index], device=rank.device)
                handles = [module.get_submodule(name).unshard(async_op=True) for name in names]
                work = dist.all_reduce(counted, async_op=True)
                if step == 2:
                    for handle in handles[::-1]:
                        handle.wait()
                x = torch.full((1,), 1.0 + rank.index, device=rank.device)
                output = model(x)
                work.wait()
                assert counted.item() == 3.0, f"{what}, step {step}"
                assert output.item() == 13.0 * weight * (1.0 + rank.index), f"{what}, step {step}"
                output.sum().backward()
                for name, parameter in module.named_parameters():
                    assert isinstance(parameter, DTensor) == (name.partition(".")[0] in names), f"{what}: {name}"
                    whole = replicate_fsdp.whole(parameter.grad).unique().tolist()
                    assert whole == [1.5], f"{what}, step {step}: {name}"
                sgd.step()
                sgd.zero_grad()
                weight -= 3.0

    world.run(body)


@requirement(
    "RFSDP-ALONE-02",
    "fully_shard over one rank sends nothing, and has one device's gradients, divided by the gradient divide factor.",
    source=f"{SOURCE}: mesh",
)
@pytest.mark.world(1)
def test_one_rank(world: World) -> None:
    """Run two steps with each factor, and without one in several dtypes and with forced sums."""

    def body(rank: Rank) -> None:
        for factor, dtype, sums in [
            *((factor, "float32", False) for factor in (None, 1.0, 2.0, 0.5)),
            *((None, dtype, sums) for dtype in ("float32", "float64", "float16") for sums in (False, True)),
        ]:
            what = f"{factor}, {dtype}, {sums=}"
            model: Any = layers(rank.device).to(getattr(torch, dtype))
            for module in (*model, model):
                fully_shard(module, mesh=rank.mesh(1))
                module.set_force_sum_reduction_for_comms(sums)
                if factor is not None:
                    module.set_gradient_divide_factor(factor)
            for _ in range(2):
                at = messages.mark()
                x = (torch.arange(4.0)[None] - 2).to(rank.device, getattr(torch, dtype))
                model(x).sum().backward()
                assert messages.since(at) == [], what
                found = [g.flatten().tolist() for g in replicate_fsdp.gradients(model).values()]
                assert found == [[x / (factor or 1.0) for x in gradient] for gradient in alone(1)], what
                model.zero_grad()

    world.run(body)


@requirement(
    "RFSDP-SHARDED-03",
    "A replicated module inside a fully sharded one stays replicated, and trains with the rest.",
    source=f"{SOURCE}; torch/distributed/_composable/replicate_with_fsdp.py: replicate",
)
@pytest.mark.world(2)
def test_replicated_inside(world: World) -> None:
    """Replicate one of two layers, shard the other or leave it to the root, and run two steps."""

    def body(rank: Rank) -> None:
        every = ways(rank)
        for which, apart in itertools.product((0, 1), (False, True)):
            model: Any = layers(rank.device)
            every["replicated"](model[which])
            if apart:
                every["sharded"](model[1 - which])
            every["sharded"](model)
            for step in range(2):
                what = f"{which}, {apart=}, step {step}"
                assert train(model, rank.index) == alone(2), what
                placed = [parameter.placements for parameter in model.parameters()]
                assert placed[which] == (Replicate(),), what
                assert placed[1 - which] == (Shard(0),), what
                model.zero_grad()
            assert not isinstance(model[:1], FSDPModule)
            assert type(model[:1]) is nn.Sequential

    world.run(body)
