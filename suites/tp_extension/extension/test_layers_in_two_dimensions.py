"""Layers that are tensor parallel and sharded: uneven features, groups of other rates, and what is communicated."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.input_reshard import input_reshard

from fixtures import states
from fixtures.placements import MORE_OPERATORS
from fixtures.tensors import numbers
from harness import Rank, World, requirement
from harness.stacks import messages
from harness.stacks.dynamo import checkpointed

pytestmark = pytest.mark.needs(torch=MORE_OPERATORS)
FULL = StateDictOptions(full_state_dict=True)


def layers(features: int) -> nn.Sequential:
    """Create layers of which tensor parallelism divides the features in between, and those of the last one."""
    model = nn.Sequential(nn.Linear(4, features), nn.ReLU(), nn.Linear(features, 5), nn.Linear(5, 3)).double()
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.copy_((numbers(*parameter.shape) * 3 + i) % 5 - 2)
    return model


def styles() -> dict[str, ParallelStyle]:
    return {
        "0": ColwiseParallel(use_local_output=False),
        "2": RowwiseParallel(),
        "3": ColwiseParallel(output_layouts=Replicate()),
    }


def rows(step: int) -> torch.Tensor:
    return ((numbers(2, 4).double() * 3 + step) % 5) - 1


def same(expected: Any, found: Any, what: str) -> None:
    """Assert that two nested states have the same keys, and the same tensors within float64's rounding."""
    if isinstance(expected, dict):
        assert set(expected) == set(found), what
        for key, value in expected.items():
            same(value, found[key], f"{what}: {key}")
    elif isinstance(expected, torch.Tensor):
        found = found.full_tensor() if isinstance(found, DTensor) else found
        torch.testing.assert_close(found.detach().cpu(), expected.detach(), rtol=1e-9, atol=1e-9, msg=what)


@requirement(
    "TP-GRAD-48",
    "Layers whose features tensor-parallel ranks do not divide train with Adam under fully_shard as on one device.",
    source="torch.distributed.fsdp.fully_shard; torch.distributed.tensor.parallel; test_2d_composability.py: "
    "test_train_parity_2d_mlp",
)
@requirement(
    "TP-DICT-35",
    "Full states of a model and of Adam load into a tensor-parallel model in uneven shards, which trains on as "
    "one device.",
    source="torch.distributed.checkpoint.state_dict: set_model_state_dict, set_optimizer_state_dict, full_state_dict; "
    "test_2d_composability.py: test_fully_shard_tp_2d_set_full_state_dict",
)
@pytest.mark.world(4)
def test_uneven_features(world: World) -> None:
    """Two ranks divide three or five features; after a step, the states of one device are loaded from rank 0."""

    def body(rank: Rank) -> None:
        mesh = rank.mesh(2, 2, names=("dp", "tp"))
        part = mesh["dp"].get_local_rank()

        def distributed(model: nn.Sequential) -> tuple[Any, torch.optim.Optimizer]:
            parallelize_module(model.to(rank.device), mesh["tp"], styles())
            for layer in (model[0], model[2], model[3], model):
                fully_shard(layer, mesh=mesh["dp"])
            return model, torch.optim.Adam(model.parameters(), lr=0.125, foreach=False)

        for features in 3, 5:
            what, alone = f"{features} features", layers(features)
            adam = torch.optim.Adam(alone.parameters(), lr=0.125, foreach=False)
            model, own = distributed(layers(features))
            for step in range(2):
                if step == 1:
                    same(alone.state_dict(), get_model_state_dict(model, options=FULL), what)
                    same(
                        get_optimizer_state_dict(alone, adam), get_optimizer_state_dict(model, own, options=FULL), what
                    )
                    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
                    saved = {} if rank.index else copy.deepcopy(alone.state_dict())
                    saved_adam: Any = {} if rank.index else copy.deepcopy(get_optimizer_state_dict(alone, adam))
                    model, own = distributed(layers(features))
                    with torch.no_grad():
                        for parameter in model.parameters():
                            parameter.zero_()
                    moved = {name: value.to(rank.device) for name, value in saved.items()}
                    set_model_state_dict(model, moved, options=options)
                    set_optimizer_state_dict(model, own, saved_adam, options=options)
                x = rows(step)
                alone(x).square().sum().backward()
                (model(x[part : part + 1].to(rank.device)).square().sum() * 2).backward()
                for optimizer in adam, own:
                    optimizer.step()
                    optimizer.zero_grad()
                same(dict(alone.named_parameters()), dict(model.named_parameters()), f"{what} after step {step}")

    world.run(body)


@requirement(
    "TP-GRAD-49",
    "Under FSDP over tensor parallelism, parameter groups of different rates train as on one device, also if "
    "activations are resharded or computed again.",
    source="torch.distributed.fsdp.FullyShardedDataParallel; torch.optim: parameter groups; "
    "torch.distributed.tensor.parallel.input_reshard; test_fsdp_2d_parallel.py",
)
@requirement(
    "TP-GRAD-50",
    "An FSDP module of tensor-parallel layers gathers and reduces its parameters once over FSDP's ranks, besides the "
    "collectives of tensor parallelism.",
    source="torch.distributed.fsdp.FullyShardedDataParallel; test_fsdp_tp_integration.py: test_fsdp_tp_extension_grad",
)
@pytest.mark.world(4)
def test_groups_and_collectives(world: World) -> None:
    """Wrap everything at once, or the first layer apart; take two steps of Adam."""

    def groups(model: nn.Module) -> torch.optim.Optimizer:
        parameters = list(model.parameters())
        slow: dict[str, Any] = {"params": parameters[3:], "lr": 0.0625, "weight_decay": 0.25}
        return torch.optim.Adam([{"params": parameters[:3], "lr": 0.5}, slow], foreach=False)

    def body(rank: Rank) -> None:
        mesh = rank.mesh(2, 2, names=("dp", "tp"))
        part, pair = mesh["dp"].get_local_rank(), tuple(int(i) for i in mesh["tp"].mesh)
        others = tuple(int(i) for i in mesh["dp"].mesh)
        for way in "plain", "apart", "resharded", "again", "both":
            alone, model = layers(6), layers(6).to(rank.device)
            parallelize_module(model, mesh["tp"], styles())
            given = rows(0)[part : part + 1].to(rank.device)
            at = messages.mark()
            model(given).square().sum().backward()
            expected = [(message.op, message.members) for message in messages.since(at)]
            model.zero_grad()
            inner: Any = checkpointed(model) if way in ("again", "both") else model
            inner = input_reshard(inner, mesh["tp"], 1) if way in ("resharded", "both") else inner
            options: Any = {"device_mesh": mesh["dp"], "device_id": rank.device, "use_orig_params": True}
            if way == "apart":
                model[0] = FullyShardedDataParallel(model[0], **options)
            whole = FullyShardedDataParallel(inner, **options)
            adam, own = groups(alone), groups(whole)
            for step in range(2):
                x, at = rows(step), messages.mark()
                whole(x[part : part + 1].to(rank.device)).square().sum().backward()
                sent = [(message.op, message.members) for message in messages.since(at)]
                (alone(x).square().sum() / 2).backward()
                if way in ("plain", "apart"):
                    assert [each for each in sent if each[1] == pair] == expected, way
                    assert all(members in (pair, others) for _, members in sent), way
                    count = sum(members == others for _, members in sent)
                    # the module apart is gathered again for its backward
                    assert count == {"plain": 2, "apart": 5}[way], f"{way}: {count}"
                for optimizer in adam, own:
                    optimizer.step()
                    optimizer.zero_grad()
            with FullyShardedDataParallel.summon_full_params(whole, writeback=False):
                found = list(whole.parameters())
                for (name, parameter), p in zip(alone.named_parameters(), found, strict=True):
                    same(parameter, p, f"{way}: {name}")

    world.run(body)


@requirement(
    "TP-GRAD-51",
    "fully_shard over one rank communicates nothing that the model does not without it.",
    source="torch.distributed.fsdp.fully_shard; test_2d_composability.py: test_tp_with_fsdp_offloading",
)
@pytest.mark.world(2)
def test_sharded_over_one_rank(world: World) -> None:
    """Two ranks are tensor parallel; forward, backward, a step and the norm of gradients, twice."""

    def body(rank: Rank) -> None:
        mesh = rank.mesh(1, 2, names=("dp", "tp"))
        sent = []
        for sharded in False, True:
            model = layers(6).to(rank.device)
            parallelize_module(model, mesh["tp"], styles())
            if sharded:
                for layer in (model[0], model[2], model[3], model):
                    fully_shard(layer, mesh=mesh["dp"])
            sgd, at = torch.optim.SGD(model.parameters(), lr=0.5, foreach=False), messages.mark()
            for step in range(2):
                model(rows(step).to(rank.device)).square().sum().backward()
                sgd.step()
                sgd.zero_grad()
            sent.append([(message.op, message.shape, message.members) for message in messages.since(at)])
        assert sent[0], "tensor parallelism communicates"
        assert sent[0] == sent[1]

    world.run(body)


@requirement(
    "TP-DICT-36",
    "Settings that were added to an optimizer's groups are saved and loaded with a tensor-parallel model, of empty "
    "groups as well.",
    source="torch.distributed.checkpoint.state_dict: get_optimizer_state_dict, set_optimizer_state_dict; "
    "test_state_dict.py: test_multi_param_groups",
)
@pytest.mark.world(2)
def test_settings(world: World) -> None:
    """Load settings into optimizers that have them or not, from flat, sharded and full states."""

    def parallel(rank: Rank, model: nn.Module) -> tuple[Any, int, int]:
        plan: Any = {"first": ColwiseParallel(), "second": RowwiseParallel()}
        return parallelize_module(model.to(rank.device), rank.mesh(), plan), 0, 1

    def body(rank: Rank) -> None:
        states.check_settings(rank, parallel)
        for how in "sharded", "full":
            states.check_setting(rank, parallel, how, scheduled=True)

    world.run(body)
