"""How replication on FSDP2's machinery is put on a module: what it takes, what it refuses, what it gives back."""

from __future__ import annotations

import copy
import gc
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
from harness import Rank, World, requirement
from harness.stacks.replicate_fsdp import MESH, replicate

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
    "What replicate can't be put on, or can't do, is refused at once by an error that names it.",
    source=SOURCE,
)
@pytest.mark.parametrize("case", list(REFUSED))
@pytest.mark.world(1)
def test_refused(world: World, case: str) -> None:
    """Another stack's module, containers without a forward, meshes that do not fit, a second time, a copy."""
    refused, kind, word = REFUSED[case]
    if case.endswith("-dimension") and not hasattr(fsdp, "DataParallelMeshDims"):
        pytest.skip("unsupported: this torch has no dp_mesh_dims")

    def body(rank: Rank) -> str:
        try:
            refused(rank)
        except kind as e:
            return "" if word in str(e) else f"{type(e).__name__}: {e}"
        return "no error"

    assert world.run(body) == [""]


@requirement(
    "RFSDP-APPLY-02",
    "A replicated module is the module that was given, of its own class and of FSDP's, with its names; a slice of a "
    "container is a container of that class that is not replicated.",
    source=SOURCE,
)
@pytest.mark.world(1)
def test_class(world: World) -> None:
    """A container of two layers."""

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

    assert world.run(body) == [[True, "ReplicateSequential", True, ["0.weight", "1.weight"], "Sequential", 1]]


@requirement(
    "RFSDP-APPLY-03",
    "Every parameter of a replicated model is whole on each rank, and gradients are those of the mean over all ranks, "
    "whatever mesh the ranks are given as.",
    source=SOURCE,
)
@pytest.mark.parametrize("mesh", ["none", "whole", "list", "ignoring"])
@pytest.mark.world(1, 2, 4)
def test_mesh(world: World, mesh: str) -> None:
    """No mesh; all ranks; both layers at once; a parameter left out."""

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

    found = world.run(body)
    expected = alone(world.size)
    if mesh != "ignoring":
        assert found == [[[True, True], expected]] * world.size
        return
    for part, (kinds, gradients) in enumerate(found):
        own = layers()
        own(row(part)).sum().backward()
        assert own[0].weight.grad is not None
        assert kinds == ["plain", True]
        assert gradients == [own[0].weight.grad.flatten().tolist(), expected[1]]


@requirement(
    "RFSDP-APPLY-04",
    "Layers that are replicated on their own inside a replicated model have gradients that are averaged once, and "
    "belong to one root, which is asked to synchronise all of them.",
    source=SOURCE,
)
@pytest.mark.parametrize("order", ["inner-first", "layers-only"])
@pytest.mark.world(2)
def test_nested(world: World, order: str) -> None:
    """A first backward without synchronisation, a second with it: what both add up to is averaged."""

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

    assert world.run(body) == [[[2 * x for x in gradient] for gradient in alone(2)]] * 2


class Cube(nn.Module):
    """A weight of three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(16.0).reshape(4, 2, 2) - 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = (x[..., None, None] * self.weight).sum((-1, -2))
        return result


@requirement(
    "RFSDP-APPLY-05",
    "Gradients are those of the mean over the ranks of the mesh, and those of two backwards add up, whatever the "
    "dimensions of a parameter, where it is kept, who hooks on to it, and how many ranks there are beside the mesh.",
    source=SOURCE,
)
@pytest.mark.parametrize("kind", ["plain", "offloaded", "hooked"])
@pytest.mark.parametrize("over", ["all-ranks", "a-dimension"])
@pytest.mark.world(4, 5)
def test_two_backwards(world: World, kind: str, over: str) -> None:
    """Layers with weights of two and of three dimensions; four ranks as 2 x 2, five as 1 x 5.

    A fifth is no binary number: ranks multiply their losses by how many they are, so that every mean is an integer.
    """
    data = world.size if over == "all-ranks" else {4: 2, 5: 1}[world.size]

    def gradients(model: nn.Module) -> list[list[float]]:
        found = [p.grad for p in model.parameters()]
        whole = [g.full_tensor() if isinstance(g, DTensor) else g for g in found if g is not None]
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
    assert world.run(body) == [(gradients(model), 6 if kind == "hooked" else 0)] * world.size


@requirement(
    "RFSDP-LIFE-01",
    "What was made for a replicated module goes with it.",
    source="torch/distributed/_composable/replicate_with_fsdp.py: replicate",
)
@pytest.mark.parametrize("trained", [False, True], ids=["wrapped", "trained"])
@pytest.mark.world(1, 2)
def test_lifetime(world: World, trained: bool) -> None:
    """The module, a layer with a group of its own, and parameters, once nobody refers to the module any more."""

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
    "RFSDP-MESH-03",
    "Without a mesh, parameters are replicated over one of all ranks, whose dimension is called replicate.",
    source="torch/distributed/_composable/replicate_with_fsdp.py: replicate, mesh",
)
@pytest.mark.world(1, 3)
def test_default_mesh(world: World) -> None:
    """The mesh that a parameter says it is on."""

    def body(rank: Rank) -> list[Any]:
        weight = next(replicate(layers(rank.device)).parameters())
        assert isinstance(weight, DTensor)
        return [weight.device_mesh.mesh_dim_names, weight.device_mesh.mesh.tolist(), weight.placements]

    assert world.run(body) == [[("replicate",), list(range(world.size)), (Replicate(),)]] * world.size
