"""Parameters of one module that shard_placement_fn gives different meshes, as experts have beside dense layers."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard

from fixtures.tensors import numbers
from harness import Rank, World, requirement
from harness.stacks import replicate_fsdp
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
