"""Models that are managed on the meta device, and get their memory and values later in one way or another."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fixtures import states
from fixtures.managed import ways
from fixtures.tensors import chunk, numbers
from harness import Rank, World, requirement
from harness.stacks import replicate_fsdp


def model() -> nn.Sequential:
    """Create layers with three rows, one and five, which two ranks do not divide."""
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1), nn.Linear(1, 5))


def values() -> dict[str, torch.Tensor]:
    """Return the parameters of :func:`model` with whole numbers."""
    return {name: numbers(*p.shape) - 3 + i for i, (name, p) in enumerate(model().state_dict().items())}


def own(module: Any, given: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return the given values as DTensors that are placed as the module's parameters."""
    return {n: distribute_tensor(given[n], p.device_mesh, p.placements) for n, p in module.state_dict().items()}


def emptied(rank: Rank, module: Any) -> Any:
    return module.to_empty(device=rank.device)


def copied(rank: Rank, module: Any, given: dict[str, torch.Tensor]) -> None:
    """Copy each rank's part into the memory of its parameters."""
    parts = own(emptied(rank, module), given)
    for name, parameter in module.named_parameters():
        parameter.detach().to_local().copy_(parts[name].to_local())


def initialized(rank: Rank, module: Any, given: dict[str, torch.Tensor]) -> None:
    """Write to the parameters, as initialization does."""
    parts = own(emptied(rank, module), given)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(parts[name])


def loaded(rank: Rank, module: Any, given: dict[str, torch.Tensor]) -> None:
    emptied(rank, module).load_state_dict(own(module, given))


def assigned(rank: Rank, module: Any, given: dict[str, torch.Tensor]) -> None:
    module.load_state_dict(own(module, given), assign=True)


def assigned_in_parts(rank: Rank, module: Any, given: dict[str, torch.Tensor]) -> None:
    for name, part in own(module, given).items():
        module.load_state_dict({name: part}, assign=True, strict=False)


def whole(rank: Rank, module: Any, given: dict[str, torch.Tensor]) -> None:
    set_model_state_dict(emptied(rank, module), given, options=StateDictOptions(full_state_dict=True))


def from_rank_0(rank: Rank, module: Any, given: dict[str, torch.Tensor]) -> None:
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(emptied(rank, module), given if rank.index == 0 else {}, options=options)


FILLED: list[Callable[[Rank, Any, dict[str, torch.Tensor]], None]] = [
    copied,
    initialized,
    loaded,
    assigned,
    assigned_in_parts,
    whole,
    from_rank_0,
]


@requirement(
    "RFSDP-META-03",
    "A model that was managed on the meta device trains on the values that it then gets, also where ranks do not "
    "divide its rows.",
    source="torch.distributed.fsdp.fully_shard; torch.nn.Module.to_empty",
)
@pytest.mark.world(2)
def test_uneven(world: World) -> None:
    """Fill the model in every way, as one group or one of each layer; run an evaluation, two steps and another."""

    def body(rank: Rank) -> None:
        given = {name: value.to(rank.device) for name, value in values().items()}
        plain = model().to(rank.device)
        plain.load_state_dict(given)
        rows = torch.tensor([[1.0, 2.0], [-1.0, 1.0]], device=rank.device)
        (plain(rows).sum() / 2).backward()
        right = [p.grad for p in plain.parameters()]
        for way, managed in ways(rank).items():
            for fill in FILLED:
                for apart in (False, True) if way == "sharded" else (True,):
                    what = f"{way}, {fill.__name__}, {apart=}"
                    with torch.device("meta"):
                        module: Any = model()
                    for layer in module if apart else ():
                        managed(layer)
                    fill(rank, managed(module), dict(given))  # loading puts DTensors into the dict
                    for step in range(3):
                        output = module(rows[rank.index : rank.index + 1])
                        assert torch.equal(output, plain(rows[rank.index : rank.index + 1])), what
                        if step > 0:
                            output.sum().backward()
                    found = list(replicate_fsdp.gradients(module).values())
                    assert all(map(torch.equal, found, [2 * x for x in right if x is not None])), what

    world.run(body)


@requirement(
    "RFSDP-META-03",
    "A model that was managed on the meta device trains on the values that it then gets, also where ranks do not "
    "divide its rows.",
    source="torch.distributed.fsdp.fully_shard; torch.nn.Module.to_empty",
)
@pytest.mark.world(4)
def test_tensor_parallel(world: World) -> None:
    """Tensor parallelism divides layers before that; they are filled as a whole, or initialize themselves first."""

    def body(rank: Rank) -> None:
        mesh = rank.mesh(2, 2, names=("shards", "tensor"))
        plain = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)).to(rank.device)
        given = {n: (numbers(*p.shape) % 5 - 2).to(rank.device) for n, p in plain.named_parameters()}
        plain.load_state_dict(given)
        rows = torch.tensor([[1.0, 2.0, -1.0, 0.0], [-1.0, 1.0, 2.0, 1.0]], device=rank.device)
        (plain(rows).sum() / 2).backward()
        part = mesh.get_local_rank("shards")
        for fill, reset in itertools.product((whole, from_rank_0), (False, True)):
            what = f"{fill.__name__}, {reset=}"
            with torch.device("meta"):
                module: Any = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
                parallelize_module(module, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
            for layer in (*module, module):
                fully_shard(layer, mesh=mesh["shards"])
            assert {p.device.type for p in module.parameters()} == {"meta"}, what
            emptied(rank, module)
            if reset:
                for parameter in module.parameters():
                    torch.nn.init.constant_(parameter, 1337.0)
                for layer in module:
                    layer.reset_parameters()
                assert all(bool((p.detach().abs() < 1).full_tensor().all()) for p in module.parameters()), what
            fill(rank, module, dict(given))
            for _ in range(2):
                output = module(rows[part : part + 1])
                assert torch.equal(output, plain(rows[part : part + 1])), what
                output.sum().backward()
            for name, gradient in replicate_fsdp.gradients(module).items():
                right: Any = plain.get_parameter(name).grad
                assert torch.equal(gradient, 2 * right), f"{what}: {name}"

    world.run(body)


@requirement(
    "RFSDP-META-3665",
    "Layers that reset their own parameters, once a managed model has memory, initialize every element, also where "
    "ranks do not divide rows.",
    source="torch.distributed.fsdp.fully_shard: 'meta'; torch.nn.Module: to_empty, reset_parameters",
)
@pytest.mark.world(2)
def test_resets(world: World) -> None:
    """Reset linear, normalizing and embedding layers of eight rows, of three or of one, and run a step."""

    def made(rows: int) -> nn.Sequential:
        return nn.Sequential(nn.Embedding(rows, rows), nn.Linear(rows, rows), nn.LayerNorm(rows), nn.Linear(rows, 3))

    def body(rank: Rank) -> None:
        for (way, managed), rows in itertools.product(ways(rank).items(), (8, 3, 1)):
            what = f"{way}, {rows} rows"
            with torch.device("meta"):
                module: Any = made(rows)
            for layer in (*module, module):
                managed(layer)
            emptied(rank, module)
            for parameter in module.parameters():
                nn.init.constant_(parameter, 1337.0)
            for layer in module:
                layer.reset_parameters()
            full = {name: p.detach().full_tensor() for name, p in module.named_parameters()}
            for name, value in full.items():
                assert bool((value.abs() < 1337).all()), f"{what}: {name}"
            assert bool((full["2.weight"] == 1).all()), what
            assert bool((full["2.bias"] == 0).all()), what
            plain = made(rows).to(rank.device)
            plain.load_state_dict(full)
            given = torch.arange(rows, device=rank.device)
            if way == "sharded":  # elsewhere, each rank has drawn its own
                assert torch.equal(module(given), plain(given)), what
            module(given).sum().backward()
            torch.optim.SGD(module.parameters(), lr=0.0).step()
            for parameter in module.parameters():
                assert parameter.grad.shape == parameter.shape, what

    world.run(body)


@requirement(
    "RFSDP-META-03",
    "A model that was managed on the meta device trains on the values that it then gets, also where ranks do not "
    "divide its rows.",
    source="torch.distributed.fsdp.fully_shard; torch.nn.Module.to_empty",
)
@pytest.mark.world(4)
def test_uneven_tensor_parallel(world: World) -> None:
    """Tensor parallelism and shards divide six rows and three; layers reset themselves, and then get their values."""

    def made() -> nn.Sequential:
        return nn.Sequential(nn.Linear(3, 6), nn.Linear(6, 3))

    def body(rank: Rank) -> None:
        mesh = rank.mesh(2, 2, names=("shards", "tensor"))
        plain = made().to(rank.device)
        given = {n: 2 * (numbers(*p.shape) % 5 - 2).to(rank.device) for n, p in plain.named_parameters()}
        plain.load_state_dict(given)
        rows = torch.tensor([[1.0, 2.0, -1.0], [-1.0, 1.0, 2.0]], device=rank.device)
        (plain(rows).sum() / 2).backward()
        part = mesh.get_local_rank("shards")
        with torch.device("meta"):
            module: Any = made()
            parallelize_module(module, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        for layer in (*module, module):
            fully_shard(layer, mesh=mesh["shards"])
        emptied(rank, module)
        for parameter in module.parameters():
            nn.init.constant_(parameter, 1337.0)
        for layer in module:
            layer.reset_parameters()
        assert all(bool((p.detach().to_local().abs() < 1).all()) for p in module.parameters())
        for name, parameter in module.named_parameters():
            placed = parameter.placements[1]
            tensor = given[name]
            if placed.is_shard():
                tensor = chunk(tensor, 2, mesh.get_local_rank("tensor"), placed.dim)
            parameter.detach().to_local().copy_(chunk(tensor, 2, part, 0))
        for _ in range(2):
            output = module(rows[part : part + 1])
            assert torch.equal(output, plain(rows[part : part + 1]))
            output.sum().backward()
        for name, gradient in replicate_fsdp.gradients(module).items():
            right: Any = plain.get_parameter(name).grad
            assert torch.equal(gradient, 2 * right.cpu()), name
        for model, rate in ((module, 0.5), (plain, 1.0)):
            torch.optim.SGD(model.parameters(), lr=rate, foreach=False).step()
        assert torch.equal(module(rows[part : part + 1]), plain(rows[part : part + 1])), "after a step"

    world.run(body)


def normed() -> nn.Sequential:
    """Create a layer whose rows two ranks divide, one whose rows they do not, and a norm with buffers."""
    return nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 3), nn.BatchNorm1d(3))


@requirement(
    "RFSDP-META-900",
    "A full state, of every rank or of rank 0, can be set on a model of which any parts are on the meta device.",
    source="torch.distributed.checkpoint.state_dict: set_model_state_dict, StateDictOptions.full_state_dict",
)
@requirement(
    "RFSDP-META-901",
    "A model's state dict has every parameter and buffer, of parts on the meta device as well.",
    source="torch.distributed.checkpoint.state_dict.get_model_state_dict",
)
@requirement(
    "RFSDP-META-902",
    "Parameters that get their memory from a full state keep no more than their own shard's.",
    source="torch.distributed.checkpoint.state_dict: set_model_state_dict, StateDictOptions.broadcast_from_rank0",
)
@pytest.mark.world(2)
def test_partly(world: World) -> None:
    """Each set of three layers is on the meta device; read the state, set a full one strictly or not, and read it."""
    parts = list(itertools.chain.from_iterable(itertools.combinations(range(3), count) for count in range(1, 4)))

    def body(rank: Rank) -> None:
        plain = normed().to(rank.device)
        given = {n: (numbers(*t.shape) if t.ndim else torch.tensor(3)).to(t) for n, t in plain.state_dict().items()}
        kinds = itertools.product((False, True), ways(rank).items(), (False, True))
        for on_meta, (broadcast, (way, managed), strict) in zip(itertools.cycle(parts), kinds, strict=False):
            module = normed().to(rank.device)
            what = f"{way}, {broadcast=}, {strict=}, {on_meta} on meta"
            for layer in on_meta:
                module[layer].to("meta")
            for layer in (*module, module):
                managed(layer)
            empty: Any = get_model_state_dict(module)
            assert list(empty) == list(given), what
            assert {name for name, t in empty.items() if t.is_meta} == {n for n in given if int(n[0]) in on_meta}, what
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast, strict=strict)
            set_model_state_dict(module, {} if broadcast and rank.index else dict(given), options=options)
            for name, value in module.state_dict().items():
                assert torch.equal(states.whole(value), given[name].cpu()), f"{what}: {name}"
            for name, parameter in module.named_parameters():
                local: Any = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                held, rows = local.untyped_storage().nbytes(), -(-len(parameter) // (2 if way == "sharded" else 1))
                needed = rows * parameter[0].numel() * parameter.element_size()
                assert held <= needed, f"{what}: {name} needs {needed} bytes and holds {held}"

    world.run(body)
