"""Applying FSDP-replicate to a module: its arguments, its errors, and the replicated module."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate

from fixtures.layers import alone, layers, row, train
from fixtures.managed import ways
from harness import Rank, World, assert_on_ranks, requirement, unsupported
from harness.results import TorchLacks
from harness.stacks import replicate_fsdp
from harness.stacks.replicate_fsdp import MESH, ReplicateModule, replicate
from harness.stacks.training import clear_shardings

SOURCE = "torch/distributed/_composable/replicate_with_fsdp.py: replicate"


def sharded(rank: Rank) -> nn.Module:
    return fully_shard(layers(rank.device), mesh=rank.mesh())  # type: ignore[return-value]


def named(rank: Rank, *shape: int) -> Any:
    return rank.mesh(*shape, names=("one", "two", "three")[: len(shape)])


REFUSED: dict[str, tuple[Callable[[Rank], object], type[Exception], str]] = {
    "fully-sharded": (lambda rank: replicate(sharded(rank)), RuntimeError, "fully_shard"),
    "list-of-modules": (lambda rank: replicate(nn.ModuleList(layers(rank.device))), ValueError, "forward"),
    "dict-of-modules": (lambda rank: replicate(nn.ModuleDict({"a": layers(rank.device)})), ValueError, "forward"),
    "two-dimensions": (lambda rank: replicate(layers(rank.device), **{MESH: named(rank, 1, 1)}), ValueError, "1D"),
    "missing-dimension": (
        lambda rank: replicate(
            layers(rank.device), **{MESH: named(rank, 1)}, dp_mesh_dims=fsdp.DataParallelMeshDims(replicate="other")
        ),
        ValueError,
        "other",
    ),
    "sharded-dimension": (
        lambda rank: replicate(
            layers(rank.device), **{MESH: named(rank, 1)}, dp_mesh_dims=fsdp.DataParallelMeshDims(shard="one")
        ),
        ValueError,
        "replicate",
    ),
    "twice": (lambda rank: replicate(replicate(layers(rank.device))), Exception, ""),
    "deepcopy": (lambda rank: copy.deepcopy(replicate(layers(rank.device))), AssertionError, "deepcopy"),
}


@requirement(
    "RFSDP-APPLY-01",
    "replicate raises an error that names the problem for a wrong module or mesh, an already distributed module, "
    "or a deepcopy.",
    source=SOURCE,
)
@pytest.mark.parametrize("case", list(REFUSED))
@pytest.mark.world(1)
def test_refused(world: World, case: str) -> None:
    """Pass another stack's module, containers without a forward or wrong meshes; replicate twice; copy."""
    refused, kind, word = REFUSED[case]
    if case.endswith("-dimension") and not hasattr(fsdp, "DataParallelMeshDims"):
        unsupported(TorchLacks("dp_mesh_dims"))

    def body(rank: Rank) -> str:
        try:
            refused(rank)
        except kind as e:
            return "" if word in str(e) else f"{type(e).__name__}: {e}"
        return "no error"

    assert_on_ranks([""], world.run(body))


@requirement(
    "RFSDP-APPLY-02",
    "replicate returns the given module, which becomes an instance of both its own class and FSDPModule.",
    source=SOURCE,
)
@requirement(
    "RFSDP-APPLY-06",
    "The parameters of a replicated module keep their names.",
    source=SOURCE,
)
@requirement(
    "RFSDP-APPLY-07",
    "Slicing a replicated container gives a container of the original class that is not replicated.",
    source=SOURCE,
)
@pytest.mark.world(1)
def test_class(world: World) -> None:
    """Replicate a container of two layers."""

    def body(rank: Rank) -> list[Any]:
        given = layers(rank.device)
        model = replicate(given, **{MESH: rank.mesh()})
        part = given[:1]
        return [
            model is given,
            type(model).__name__,
            isinstance(model, FSDPModule) and isinstance(model, nn.Sequential),
            [name for name, _ in model.named_parameters()],
            type(part).__name__,
            len(part),
        ]

    assert_on_ranks([[True, "ReplicateSequential", True, ["0.weight", "1.weight"], "Sequential", 1]], world.run(body))


@requirement(
    "RFSDP-APPLY-03",
    "Every parameter of a replicated model is whole on each rank, whatever mesh is given.",
    source=SOURCE,
)
@requirement(
    "RFSDP-APPLY-08",
    "Gradients are averaged over all ranks, whatever mesh of these ranks is given.",
    source=SOURCE,
)
@pytest.mark.parametrize("mesh", ["none", "whole", "list", "ignoring"])
@pytest.mark.world(1, 2, 4)
def test_mesh(world: World, mesh: str) -> None:
    """Pass no mesh, all ranks, both layers as a list, or an ignored parameter."""

    def body(rank: Rank) -> list[Any]:
        model = layers(rank.device)
        if mesh == "none":
            replicate(model)
        elif mesh == "whole":
            replicate(model, **{MESH: rank.mesh()})
        elif mesh == "list":
            replicate([model[0], model[1]], **{MESH: rank.mesh()})
            replicate(model, **{MESH: rank.mesh()})
        else:
            replicate(model, **{MESH: rank.mesh()}, ignored_params={model[0].weight})
        kinds = [
            p.placements == (Replicate(),) and p.to_local().shape == p.shape if isinstance(p, DTensor) else "plain"
            for p in model.parameters()
        ]
        return [kinds, train(model, rank.index)]

    results = world.run(body)
    expected = alone(world.size)
    if mesh != "ignoring":
        assert_on_ranks([[[True, True], expected]] * world.size, results)
        return
    for part, (kinds, gradients) in enumerate(results):
        own = layers()
        own(row(part)).sum().backward()
        assert own[0].weight.grad is not None
        assert kinds == ["plain", True]
        assert gradients == [own[0].weight.grad.flatten().tolist(), expected[1]]


@requirement(
    "RFSDP-APPLY-04",
    "Gradients of layers replicated on their own inside a replicated model are averaged once.",
    source=SOURCE,
)
@requirement(
    "RFSDP-APPLY-09",
    "set_requires_gradient_sync on a root module applies to all layers replicated inside it.",
    source=SOURCE,
)
@pytest.mark.parametrize("order", ["inner-first", "layers-only"])
@pytest.mark.world(2)
def test_nested(world: World, order: str) -> None:
    """The sum of an unsynchronized and a synchronized backward is averaged."""

    def body(rank: Rank) -> list[list[float]]:
        model = layers(rank.device)
        for layer in model:
            replicate(layer, **{MESH: rank.mesh()})
        if order == "inner-first":
            replicate(model, **{MESH: rank.mesh()})
        roots = [model] if order == "inner-first" else list(model)
        for synced in (False, True):
            for root in roots:
                root.set_requires_gradient_sync(synced)  # type: ignore[operator]
            model(row(rank.index).to(rank.device)).sum().backward()
        return [p.grad.full_tensor().flatten().tolist() for p in model.parameters()]  # type: ignore[union-attr]

    assert_on_ranks([[[2 * x for x in gradient] for gradient in alone(2)]] * 2, world.run(body))


class Cube(nn.Module):
    """A module with a three-dimensional weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(16.0).reshape(4, 2, 2) - 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = (x[..., None, None] * self.weight).sum((-1, -2))
        return result


@requirement(
    "RFSDP-APPLY-05",
    "Gradients are averaged over the mesh and accumulate over backwards, whatever a parameter's shape, offloading "
    "or hooks.",
    source=SOURCE,
)
@pytest.mark.parametrize("kind", ["plain", "offloaded", "hooked"])
@pytest.mark.parametrize("over", ["all-ranks", "a-dimension"])
@pytest.mark.world(4, 5)
def test_two_backwards(world: World, kind: str, over: str) -> None:
    """Layers have two- or three-dimensional weights; four ranks form a 2 x 2 mesh, five a 1 x 5 mesh.

    One fifth is not exact in binary: ranks multiply their losses by the number of ranks, so that every mean is an
    integer.
    """
    data = world.size if over == "all-ranks" else {4: 2, 5: 1}[world.size]

    def gradients(model: nn.Module) -> list[list[float]]:
        grads = [p.grad for p in model.parameters()]
        whole = [g.full_tensor() if isinstance(g, DTensor) else g for g in grads if g is not None]
        return [g.flatten().tolist() for g in whole]

    def body(rank: Rank) -> tuple[list[list[float]], int]:
        model = nn.Sequential(Cube(), *layers()).to(rank.device)
        mesh = named(rank, data, rank.size // data)["one"]
        options = {"offload_policy": fsdp.CPUOffloadPolicy(pin_memory=False)} if kind == "offloaded" else {}
        replicate(model, **{MESH: mesh}, **options)
        calls: list[int] = []
        if kind == "hooked":
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(lambda p: calls.append(1))
        for number in range(2):
            (data * model(row(mesh.get_local_rank() + number).to(rank.device)).sum()).backward()
        return gradients(model), len(calls)

    model = nn.Sequential(Cube(), *layers())
    for number in range(2):
        model(torch.cat([row(part + number) for part in range(data)])).sum().backward()
    assert_on_ranks([(gradients(model), 6 if kind == "hooked" else 0)] * world.size, world.run(body))


@requirement(
    "RFSDP-LIFE-01",
    "A replicated module and everything created for it are freed once nothing references the module.",
    source="torch/distributed/_composable/replicate_with_fsdp.py: replicate",
)
@pytest.mark.parametrize("trained", [False, True], ids=["wrapped", "trained"])
@pytest.mark.world(1, 2)
def test_lifetime(world: World, trained: bool) -> None:
    """Hold weak references to the module, a layer with its own group, and their parameters."""

    def body(rank: Rank) -> list[bool]:
        model = layers(rank.device)
        replicate(model[0])
        replicate(model)
        if trained:
            train(model, rank.index)
        states = [replicate.state(module) for module in (model, model[0])]
        seen = [weakref.ref(x) for x in (model, *model, *model.parameters(), *states)]
        del model, states
        gc.collect()
        return [found() is None for found in seen]

    for found in world.run(body):
        assert all(found)


@requirement(
    "RFSDP-LIFE-02",
    "A mesh is freed once nothing references it or its modules and DTensor's caches have been cleared.",
    source="torch/distributed/tensor/debug/__init__.py: _clear_sharding_prop_cache",
)
@pytest.mark.parametrize("trained", [False, True], ids=["wrapped", "trained"])
@pytest.mark.world(1, 2)
def test_lifetime_of_a_mesh(world: World, trained: bool) -> None:
    """Hold a weak reference to a slice of a mesh."""

    def body(rank: Rank) -> bool:
        mesh = rank.mesh(rank.size, 1, names=("ranks", "one"))["ranks"]
        model = replicate(layers(rank.device), **{MESH: mesh})
        if trained:
            train(model, rank.index)
        seen = weakref.ref(mesh)
        del mesh, model
        clear_shardings(rank.device)
        gc.collect()
        return seen() is None

    assert_on_ranks([True] * world.size, world.run(body))


@requirement(
    "RFSDP-MESH-03",
    "Without a mesh, parameters are replicated over a mesh of all ranks whose dimension is named replicate.",
    source="torch/distributed/_composable/replicate_with_fsdp.py: replicate, mesh",
)
@pytest.mark.world(1, 3)
def test_default_mesh(world: World) -> None:
    """Read the mesh from a parameter."""

    def body(rank: Rank) -> list[Any]:
        weight = next(replicate(layers(rank.device)).parameters())
        assert isinstance(weight, DTensor)
        return [weight.device_mesh.mesh_dim_names, weight.device_mesh.mesh.tolist(), weight.placements]

    assert_on_ranks([[("replicate",), list(range(world.size)), (Replicate(),)]] * world.size, world.run(body))


@requirement(
    "RFSDP-APPLY-11",
    "Modules of one class can be replicated and fully sharded in one process, each with its own methods.",
    source="torch.distributed.fsdp.fully_shard; torch/distributed/_composable/replicate_with_fsdp.py: replicate",
)
@pytest.mark.parametrize("first", ["sharded", "replicated"])
@pytest.mark.world(2)
def test_one_class_both_ways(world: World, first: str) -> None:
    """Apply both to layers of a class of this test, in either order."""

    class Own(nn.Linear):
        pass

    def body(rank: Rank) -> dict[str, bool]:
        found = {}
        for how in sorted(("sharded", "replicated"), key=lambda each: each != first):
            module = Own(2, 2).to(rank.device)
            if how == "sharded":
                fully_shard(module, mesh=rank.mesh())
            else:
                replicate(module, **{MESH: rank.mesh()})
            found[how] = isinstance(module, ReplicateModule)
        return found

    assert_on_ranks([{"sharded": False, "replicated": True}] * 2, world.run(body))


def named_alike(factor: float, base: type[nn.Module] = nn.Module) -> type[nn.Module]:
    """Make a class whose name is that of every other class that this function makes."""

    class Alike(base):  # type: ignore[misc,valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight * x * factor

        def twice(self) -> float:
            return 2 * factor

    return Alike


@requirement(
    "RFSDP-APPLY-12",
    "A managed module keeps the forward, the methods and the class of its own, whatever other class has the same name.",
    source="torch.distributed.fsdp.fully_shard; torch/distributed/_composable/replicate_with_fsdp.py: replicate",
)
@pytest.mark.world(2)
def test_classes_of_one_name(world: World) -> None:
    """Manage modules of three classes with one name, the last of which is derived from the first, and of one again."""

    def body(rank: Rank) -> None:
        for way, managed in ways(rank).items():
            first, second = named_alike(2.0), named_alike(4.0)
            classes = {first: 2.0, second: 4.0, named_alike(8.0, first): 8.0}
            modules: list[Any] = [managed(made().to(rank.device)) for made in (*classes, first)]
            assert type(modules[0]) is type(modules[3]), way
            assert len({type(module) for module in modules}) == 3, way
            for module, (made, factor) in zip(modules, [*classes.items(), (first, 2.0)], strict=True):
                what = f"{way}, {factor}"
                assert [isinstance(module, other) for other in classes] == [issubclass(made, c) for c in classes], what
                assert isinstance(module, FSDPModule), what
                assert type(module).__name__.endswith("Alike"), what
                assert module.twice() == 2 * factor, what
                output = module(torch.full((2,), 1.0 + rank.index, device=rank.device))
                assert output.tolist() == [factor * (1 + rank.index)] * 2, what
                output.sum().backward()
                assert replicate_fsdp.gradients(module)["weight"].tolist() == [1.5 * factor] * 2, what

    world.run(body)


@requirement(
    "RFSDP-APPLY-3653",
    "Only a module that is managed itself gets a new class, and the modules inside it keep theirs.",
    source="torch.distributed.fsdp.fully_shard; torch/distributed/_composable/replicate_with_fsdp.py: replicate",
)
@pytest.mark.world(2)
def test_classes_of_parts(world: World) -> None:
    """Manage the root, a part or several as one group, in a model with a shared part and parts of one class."""

    def body(rank: Rank) -> None:
        for way, managed in ways(rank).items():
            for given in (
                [[""]],
                [["0"]],
                [["1"]],
                [["1.0"], [""]],
                [["0"], ["1"], [""]],
                [["0", "2"]],
                [["1", "2"], [""]],
            ):
                shared = nn.Linear(2, 2)
                model: Any = nn.Sequential(shared, nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Linear(2, 2), shared)
                model.to(rank.device)
                before = {name: type(module) for name, module in model.named_modules()}
                for group in given:
                    managed([model.get_submodule(name) for name in group])
                for name, module in model.named_modules():
                    what = f"{way}, {given}: {name or 'the root'}"
                    changed = name in itertools.chain.from_iterable(given)
                    assert isinstance(module, FSDPModule) == changed, what
                    assert isinstance(module, before[name]), what
                    assert (type(module) is before[name]) == (not changed), what

    world.run(body)
