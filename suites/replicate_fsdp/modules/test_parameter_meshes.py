"""Parameters of one module that shard_placement_fn gives different meshes, as experts have beside dense layers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DeviceMesh, Replicate, Shard, distribute_tensor

from fixtures.tensors import chunk, numbers
from harness import Rank, World, requirement
from harness.stacks import messages, replicate_fsdp
from harness.stacks.limit import runs_with

SOURCE = "torch.distributed.fsdp.fully_shard: shard_placement_fn, 'ShardPlacementResult'"
SHAPES = {"dense": (4, 2), "expert": (4, 4), "bias": (3,), "other": (2, 3)}
EXPERTS = {"expert": 1, "other": 0}
"""Which parameters have the other mesh, and the dimensions that shard them."""


class Layer(nn.Module):
    """Parameters whose gradients are the input."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(numbers(*shape)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input, plus nothing: the sum of each parameter times the input, less itself."""
        y: torch.Tensor = torch.stack([(p * x.detach()).sum() for p in self.parameters()]).sum()
        return x + y - y.detach()


@requirement(
    "RFSDP-PLACE-01",
    "Parameters to which shard_placement_fn gives another mesh are sharded over that mesh, which averages their "
    "gradients, and the others over the module's.",
    source=SOURCE,
)
@requirement(
    "RFSDP-PLACE-02",
    "A custom collective or all-reduce hook of a module whose parameters have several meshes raises an error.",
    source="torch.distributed.fsdp.FSDPModule: set_custom_all_gather, set_custom_reduce_scatter, set_all_reduce_hook",
)
@pytest.mark.skipif(runs_with("<2.13"), reason="before 2.13, parameters of a module share its mesh")
@pytest.mark.world(4)
def test_meshes(world: World) -> None:
    """Experts are sharded over pairs, with a replica or without, in two layers; accumulate, step, and run a part."""

    def body(rank: Rank) -> None:
        plane = rank.mesh(2, 2, names=("replicas", "shards"))
        for (over, mesh), kept in itertools.product({"pairs": plane["shards"], "all": plane}.items(), (False, True)):
            what = f"{over}, {kept=}"
            other = replicate_fsdp.sharder(mesh)
            model: Any = nn.Sequential(Layer(), Layer()).to(rank.device)
            for layer in model:
                experts = {layer.get_parameter(name): dim for name, dim in EXPERTS.items()}
                fully_shard(
                    layer,
                    mesh=rank.mesh(),
                    reshard_after_forward=not kept,
                    shard_placement_fn=lambda p, at=experts, of=other: of(at[p]) if p in at else None,
                )
                for name in "set_custom_all_gather", "set_custom_reduce_scatter", "set_all_reduce_hook":
                    with pytest.raises(ValueError, match="multiple param groups"):
                        getattr(layer, name)(print)
            fully_shard(model, mesh=rank.mesh())
            pair = rank.index // 2 * 2 + 1.5
            sgd = torch.optim.SGD(model.parameters(), lr=2.0, foreach=False)
            for step, (synced, graph) in enumerate([(True, True), (False, True), (True, False), (True, True)]):
                model.set_requires_gradient_sync(synced)
                x = torch.tensor(1.0 + rank.index, device=rank.device, requires_grad=graph)
                (model(x) if step < 3 else model[1](x)).backward()
                if not synced:
                    continue
                times = 2 if step == 2 else 1
                for full, parameter in model.named_parameters():
                    layer, _, name = full.partition(".")
                    where = f"{what}, step {step}: {full}"
                    if step == 3 and layer == "0":
                        assert parameter.grad is None, where
                        continue
                    right = times * (pair if name in EXPERTS and over == "pairs" else 2.5)
                    assert parameter.grad.placements == parameter.placements, where
                    assert parameter.placements[-1] == Shard(EXPERTS.get(name, 0)), where
                    assert parameter.placements[:-1] in ((), (Replicate(),)), where
                    assert parameter.device_mesh.size() == (2 if name in EXPERTS and over == "pairs" else 4), where
                    assert parameter.grad.full_tensor().unique().tolist() == [right], where
                if step == 0:
                    sgd.step()
                model.zero_grad()
            state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
            for full, value in state.items():
                name = full.partition(".")[2]
                mean = pair if name in EXPERTS and over == "pairs" else 2.5
                assert torch.equal(value.cpu(), numbers(*SHAPES[name]) - 2 * mean), f"{what}: {full}"

    world.run(body)


class Divided(nn.Module):
    """Dense parameters and experts that are DTensors over pairs of ranks; each gradient is the rank's own input."""

    def __init__(self, meshes: dict[str, Any], device: torch.device) -> None:
        super().__init__()
        for name, placement in DIVIDED.items():
            tensor = numbers(16, 8).to(device)
            placed = distribute_tensor(tensor, meshes["experts" if "expert" in name else "dense"], [placement])
            self.register_parameter(name, nn.Parameter(placed))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input times the sum of this rank's parts."""
        parts: list[Any] = list(self.parameters())
        result: torch.Tensor = x * torch.stack([p.to_local().sum() for p in parts]).sum()
        return result


DIVIDED = {"rows": Shard(0), "columns": Shard(1), "experts": Shard(0), "expert_columns": Shard(1)}


@requirement(
    "RFSDP-PLACE-3672",
    "Experts that are divided over one mesh and sharded over another train beside tensor-parallel parameters.",
    source=SOURCE,
)
@pytest.mark.skipif(runs_with("<2.13"), reason="before 2.13, parameters of a module share its mesh")
@pytest.mark.world(8)
def test_experts_beside_tensor_parallelism(world: World) -> None:
    """Divide over neighbors or over the two halves of the ranks; shard again after the forward or not."""

    def body(rank: Rank) -> None:
        dense = rank.mesh(4, 2, names=("data", "tensor"))
        experts = DeviceMesh(rank.device.type, torch.arange(8).reshape(2, 4).T, mesh_dim_names=("shards", "experts"))
        of_experts = replicate_fsdp.sharder(experts["shards"])
        for kept in (True, False):
            model: Any = Divided({"dense": dense["tensor"], "experts": experts["experts"]}, rank.device)
            theirs = {p for name, p in model.named_parameters() if "expert" in name}
            before = {name: p.to_local().detach().clone() for name, p in model.named_parameters()}
            fully_shard(
                model,
                mesh=dense["data"],
                reshard_after_forward=kept,
                shard_placement_fn=lambda p, at=theirs: of_experts(0) if p in at else None,
            )
            means = {
                "dense": sum(1.0 + r for r in range(8) if r % 2 == rank.index % 2) / 4,
                "experts": sum(1.0 + r for r in range(8) if r // 4 == rank.index // 4) / 4,
            }
            for step in range(2):
                output = model(torch.tensor(1.0 + rank.index, device=rank.device))
                assert output.item() == (1.0 + rank.index) * sum(p.sum().item() for p in before.values()), f"{kept=}"
                output.backward()
                for name, parameter in model.named_parameters():
                    what = f"{kept=}, step {step}: {name}"
                    kind, mesh = ("experts", experts) if "expert" in name else ("dense", dense)
                    shard = mesh.get_local_rank("shards" if kind == "experts" else "data")
                    assert parameter.grad.placements == parameter.placements, what
                    assert torch.equal(parameter.to_local().detach(), chunk(before[name], 4, shard)), what
                    assert parameter.grad.to_local().unique().tolist() == [means[kind] * (step + 1)], what

    world.run(body)


class Shared(nn.Module):
    """Parameters of several meshes, of which layer i has i + 1 elements on each rank; note when they are computed."""

    def __init__(self, ranks: dict[str, int], index: int, log: list[str], told: Callable[[], None]) -> None:
        super().__init__()
        for name, size in ranks.items():
            self.register_parameter(name, nn.Parameter(torch.ones(size * (index + 1))))
        self.log, self.told, self.name = log, told, str(index)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.told()
        self.log.append(f"f{self.name}")
        y: torch.Tensor = x * torch.stack([p.sum() for p in self.parameters()]).sum()
        return y * 1


@requirement(
    "RFSDP-PLACE-4105",
    "By default, all parameters of the next module are gathered once, before gradients are reduced, whatever their "
    "meshes.",
    source="torch.distributed.fsdp.FSDPModule.set_modules_to_backward_prefetch: 'the default backward pretching "
    "implementation that prefetches the next FSDP module'; fully_shard: shard_placement_fn",
)
@requirement(
    "RFSDP-PLACE-4106",
    "A module to prefetch is gathered once and with all its parameters, whatever their meshes.",
    source="torch.distributed.fsdp.FSDPModule: set_modules_to_forward_prefetch, set_modules_to_backward_prefetch",
)
@pytest.mark.skipif(runs_with("<2.13"), reason="before 2.13, parameters of a module share its mesh")
@pytest.mark.world(4)
def test_gathered_before(world: World) -> None:
    """Three layers have parameters of two meshes or of three; two later layers are prefetched, or none is named."""
    layers = range(3)

    def body(rank: Rank) -> None:
        plane = rank.mesh(2, 2, names=("across", "pairs"))
        meshes: dict[str, Any] = {"dense": rank.mesh(), "pairs": plane["pairs"], "across": plane["across"]}
        members = {tuple(dist.get_process_group_ranks(mesh.get_group())): name for name, mesh in meshes.items()}
        for kinds, named in itertools.product((("dense", "pairs"), tuple(meshes)), (False, True)):
            log, at = list[str](), [messages.mark()]

            def told(log: list[str] = log, at: list[Any] = at) -> None:
                for message in messages.since(at[0]):
                    gathers = "gather" in message.op
                    elements = message.shape[0] // (1 if gathers else len(message.members))
                    log.append(f"{'g' if gathers else 'r'}{elements - 1} {members[message.members]}")
                at[0] = messages.mark()

            model: Any = nn.Sequential(
                *(Shared({kind: meshes[kind].size() for kind in kinds}, i, log, told) for i in layers)
            ).to(rank.device)
            for layer in model:
                of = {layer.get_parameter(kind): replicate_fsdp.sharder(meshes[kind]) for kind in kinds}
                fully_shard(layer, mesh=meshes["dense"], shard_placement_fn=lambda p, of=of: of[p](0))
            fully_shard(model, mesh=meshes["dense"])
            if named:
                model[0].set_modules_to_forward_prefetch([model[1], model[2]])
                model[2].set_modules_to_backward_prefetch([model[1], model[0]])
            for step in range(2):
                what = f"{kinds}, {named=}, step {step}"
                loss = model(torch.ones(1, device=rank.device, requires_grad=True))
                told()
                forward = list(log)
                log.clear()
                loss.sum().backward()
                told()
                for events, other in ((forward, [f"f{i}" for i in layers]), (log, reduced(layers, kinds))):
                    right = sorted([f"g{i} {kind}" for i in layers for kind in kinds] + other)
                    assert sorted(events) == right, f"{what}: {events}"
                for i, kind in itertools.product(layers, kinds):
                    begins = forward.index(f"f{0 if named else i}")
                    assert forward.index(f"g{i} {kind}") < begins, f"{what}: {i}, {kind}, {forward}"
                    ends = min(log.index(event) for event in reduced([2 if named else min(i + 1, 2)], kinds))
                    assert log.index(f"g{i} {kind}") < ends, f"{what}: {i}, {kind}, {log}"
                log.clear()

    def reduced(of: Iterable[int], kinds: Iterable[str]) -> list[str]:
        """Return the events of the gradients of layers."""
        return [f"r{i} {kind}" for i in of for kind in kinds]

    world.run(body)
