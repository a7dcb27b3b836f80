"""Distributed state dicts of tensor-parallel models, alone and under fully_shard, with every option."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fixtures import states
from fixtures.clipping import check_clipping
from fixtures.scaling import check_scaling
from harness import Rank, World, assert_on_ranks, assert_same, requirement
from harness.stacks.dynamo import checkpointed

SOURCE = "torch.distributed.checkpoint.state_dict"


def parallel(rank: Rank, model: nn.Module) -> tuple[Any, int, int]:
    """Divide two layers over two ranks; of four ranks, shard the parts over the other dimension of the mesh."""
    plan: Any = {"first": ColwiseParallel(), "second": RowwiseParallel()}
    if rank.size == 2:
        return parallelize_module(model.to(rank.device), rank.mesh(), plan), 0, 1
    mesh = rank.mesh(2, 2, names=("dp", "tp"))
    parallelize_module(model.to(rank.device), mesh["tp"], plan)
    for name in "first", "second", "third":
        fully_shard(getattr(model, name), mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"]), rank.index // 2, 2


@requirement(
    "TP-DICT-01",
    "get_model_state_dict of a tensor-parallel model has one device's names and values with every option.",
    source=f"{SOURCE}: get_model_state_dict, StateDictOptions",
)
@pytest.mark.world(2, 4)
def test_model_states(world: World) -> None:
    """Combine full_state_dict, cpu_offload and ignore_frozen_params; rank 0 alone has a full state on the host."""
    world.run(lambda rank: states.check_model_states(rank, parallel))


@requirement(
    "TP-DICT-02",
    "get_optimizer_state_dict of a tensor-parallel model has one device's values with every option.",
    source=f"{SOURCE}: get_optimizer_state_dict, StateDictOptions",
)
@pytest.mark.world(2, 4)
def test_optimizer_states(world: World) -> None:
    """Get it before the first step and after steps; two groups have different learning rates."""
    world.run(lambda rank: states.check_optimizer_states(rank, parallel))


@requirement(
    "TP-DICT-03",
    "A tensor-parallel model and an optimizer that a state dict was loaded into train on as the saved ones.",
    source=f"{SOURCE}: set_state_dict, set_model_state_dict, set_optimizer_state_dict, StateDictOptions",
)
@pytest.mark.world(2, 4)
def test_loading(world: World) -> None:
    """Load sharded, full and flattened states, and a full one from rank 0, into a new and into a trained model."""
    world.run(lambda rank: states.check_loading(rank, parallel))


@requirement(
    "TP-DICT-04",
    "With strict=False, a tensor-parallel model loads the keys that there are, and otherwise the error names one.",
    source=f"{SOURCE}: set_model_state_dict, StateDictOptions.strict",
)
@pytest.mark.world(2, 4)
def test_strictness(world: World) -> None:
    """A key is missing and another unexpected."""
    world.run(lambda rank: states.check_strictness(rank, parallel))


@requirement(
    "TP-DICT-05",
    "get_state_dict of FSDP over tensor parallelism has one device's names and values, on the mesh of both.",
    source=f"{SOURCE}: get_state_dict; torch.distributed.fsdp.FullyShardedDataParallel",
)
@pytest.mark.world(4)
def test_states_of_fsdp(world: World) -> None:
    """Get them after two steps, flat or not, from layers that are sharded together or apart, and checkpointed then."""

    def body(rank: Rank) -> None:
        mesh = rank.mesh(2, 2, names=("dp", "tp"))
        options: Any = {"device_mesh": mesh["dp"], "device_id": rank.device, "use_orig_params": True}

        def made(factor: float, apart: bool, wrapped: bool) -> Any:
            net: Any = states.Net(factor).to(rank.device)
            parallelize_module(net, mesh["tp"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
            if wrapped:
                net.first = checkpointed(net.first)
            if apart:
                net.second = FullyShardedDataParallel(net.second, **options)
            return FullyShardedDataParallel(net, **options)

        for apart, flat in (False, True), (True, False):
            what = f"{apart=}, {flat=}"
            model = made(1.0, apart, apart)
            sgd = states.optimizer(model)
            for step in range(2):
                states.train(model, sgd, step, rank.index // 2, 2)
            found, found_sgd = get_state_dict(model, sgd, options=StateDictOptions(flatten_optimizer_state_dict=flat))
            expected, expected_sgd = states.alone(2)
            for name, value in found.items():
                if name != "scale":
                    assert isinstance(value, DTensor), f"{what}: {name}"
                    assert (value.device_mesh, value.placements[0]) == (mesh, Shard(0)), f"{what}: {name}"
            states.assert_equal(expected, states.whole(found), what)
            states.assert_equal(states.flattened(expected_sgd) if flat else expected_sgd, states.whole(found_sgd), what)
            other = made(-2.0, apart, False)  # PyTorch 2.13 refuses to load into a checkpointed layer
            set_model_state_dict(other, states.copied(found))
            states.assert_equal(expected, states.whole(get_model_state_dict(other)), f"{what}: loaded")

    world.run(body)


@requirement(
    "TP-DICT-03",
    "A tensor-parallel model and an optimizer that a state dict was loaded into train on as the saved ones.",
    source=f"{SOURCE}: set_state_dict, set_model_state_dict, set_optimizer_state_dict, StateDictOptions",
)
@pytest.mark.parametrize("source", ["every-rank", "rank-0"])
@pytest.mark.world(4)
def test_full_states_of_uneven_parts(world: World, source: str) -> None:
    """Two tensor-parallel ranks have three rows each, of which two data-parallel ranks have two and one."""

    def body(rank: Rank) -> None:
        mesh = rank.mesh(2, 2, names=("dp", "tp"))
        model = nn.Linear(4, 6, bias=False).to(rank.device)
        parallelize_module(model, mesh["tp"], ColwiseParallel())
        fully_shard(model, mesh=mesh["dp"])
        whole = torch.arange(24.0, device=rank.device).view(6, 4)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=source == "rank-0")
        given = {} if source == "rank-0" and rank.index else {"weight": whole}
        set_model_state_dict(model, given, options=options)
        weight: Any = model.weight
        assert_same(whole.cpu(), weight.full_tensor().detach(), "weight")

    world.run(body)


@requirement(
    "TP-CLIP-02",
    "Gradients that are sharded over two mesh dimensions are clipped as on one device by every kind of norm.",
    source="torch.nn.utils: clip_grad_norm_, get_total_norm, clip_grads_with_norm_, clip_grad_value_",
)
@pytest.mark.world(2, 4)
def test_clipping(world: World) -> None:
    """Use two layers, column-wise and row-wise, on two tensor-parallel ranks, with fully_shard over others or none."""
    world.run(lambda rank: check_clipping(rank, parallel, "first", "second"))


@requirement(
    "TP-SCALE-01",
    "A GradScaler unscales gradients that are sharded over one or two mesh dimensions as on one device.",
    source="torch.amp.GradScaler: scale, unscale_, step, update",
)
@requirement(
    "TP-SCALE-02",
    "With a GradScaler, an infinity or a NaN in one tensor-parallel shard skips the step on every rank.",
    source="torch.amp.GradScaler: step, update",
)
@pytest.mark.world(2, 4)
def test_scaling(world: World) -> None:
    """Use two layers, column-wise and row-wise, on two tensor-parallel ranks, with fully_shard over others or none."""
    world.run(lambda rank: check_scaling(rank, parallel, "first", "second"))


@requirement(
    "TP-SCALE-03",
    "With a GradScaler, an infinity in one shard skips the step on every rank, in whatever order gradients are.",
    source="torch.amp.GradScaler: step, update",
)
@pytest.mark.parametrize("order", [("weight", "bias"), ("bias", "weight")], ids=["sharded-first", "replicated-first"])
@pytest.mark.world(2, 4)
def test_order_of_gradients(world: World, order: tuple[str, str]) -> None:
    """A row-wise layer has a sharded weight and a replicated bias, both sharded by fully_shard over pairs of four."""

    def body(rank: Rank) -> list[float]:
        scales = []
        for spoiled in range(rank.size):
            layer = nn.Linear(4, 4).to(rank.device)
            if rank.size == 2:
                parallelize_module(layer, rank.mesh(), RowwiseParallel())
            else:
                mesh = rank.mesh(2, 2, names=("dp", "tp"))
                fully_shard(parallelize_module(layer, mesh["tp"], RowwiseParallel()), mesh=mesh["dp"])
            sgd = torch.optim.SGD([layer.get_parameter(name) for name in order], lr=0.25)
            scaler = torch.amp.GradScaler(rank.device.type, init_scale=16.0)
            scaler.scale(layer(torch.ones(2, 2, device=rank.device)).sum()).backward()
            if rank.index == spoiled:
                gradient: Any = layer.weight.grad
                gradient.to_local()[0, 0] = float("inf")
            scaler.step(sgd)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales

    assert_on_ranks([[8.0] * world.size] * world.size, world.run(body))
