"""Optimizer states under FSDP over tensor-parallel layers, which are unsharded when saved and sharded when loaded."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from torch.distributed.tensor import DTensor

from fixtures.wrapped import HYBRIDS, STRATEGIES, assert_as_alone, gathered, wrapped
from harness import Rank, World, assert_on_ranks, assert_same, assert_same_all, dyadic, requirement
from harness.stacks import tp_extension

SOURCE = "torch/distributed/fsdp: FullyShardedDataParallel.optim_state_dict"
HIDDEN = 12
"""A number of features that one to four tensor-parallel ranks divide."""


def layers() -> nn.Sequential:
    """Create a column-wise layer, a row-wise one, and a plain one that FSDP shards unevenly."""
    model = nn.Sequential(nn.Linear(2, HIDDEN), nn.Linear(HIDDEN, 2), nn.Linear(2, 3))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(dyadic(*parameter.shape, key=name, dtype=parameter.dtype))
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *steps: int) -> None:
    """Train on the same data on every rank; the average of two or four equal gradients is exact."""
    device = next(model.parameters()).device
    for step in steps:
        optimizer.zero_grad()
        model(dyadic(2, 2, key=("input", step), dtype=torch.float32).to(device)).sum().backward()
        optimizer.step()


def momenta(state: Any) -> dict[str, torch.Tensor]:
    """Return the unsharded momentum buffers by parameter name."""
    buffers = {name: of["momentum_buffer"] for name, of in state.items()}
    return {name: gathered(t) if isinstance(t, DTensor) else t for name, t in sorted(buffers.items())}


@requirement(
    "TP-STATE-11",
    "A saved optimizer state has the sizes and values of whole parameters, whatever the tensor-parallel size.",
    source=f"{SOURCE}; pytorch/pytorch#115105",
)
@pytest.mark.world(2, 4, 6, 8)
def test_tensor_parallel_sizes(world: World) -> None:
    """Use two data-parallel by one to four tensor-parallel ranks, with original parameters."""
    alone = layers()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.5, momentum=0.5)
    train(alone, optimizer, 0, 1)
    names = {p: name for name, p in alone.named_parameters()}
    expected = momenta({names[p]: state for p, state in optimizer.state.items()})

    def body(rank: Rank) -> None:
        plan = {"0": "columns", "1": "rows"}
        model = tp_extension.apply(layers(), rank, plan=plan, shape=(2, rank.size // 2), use_orig_params=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
        train(model, optimizer, 0, 1)
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            saved = FullyShardedDataParallel.optim_state_dict(model, optimizer)
        assert_same_all(expected, momenta(saved["state"]), "momentum")

    world.run(body)


@requirement(
    "TP-STATE-12",
    "Optimizer state created before sharding has the shapes of the sharded parameters after loading.",
    source=f"{SOURCE}_to_load, rekey_optim_state_dict; huggingface/accelerate#4142",
)
@requirement(
    "TP-STATE-16",
    "Training from optimizer state created before sharding continues as on one device.",
    source=f"{SOURCE}_to_load, rekey_optim_state_dict; huggingface/accelerate#4142",
)
@pytest.mark.parametrize("original", [True, False], ids=["original", "flat"])
@pytest.mark.parametrize("trained", [0, 1], ids=["new", "trained"])
@pytest.mark.world(2, 4)
def test_made_before(world: World, trained: int, original: bool) -> None:
    """Adagrad has state for each parameter from the start; before or after its first step."""

    def adagrad(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(model.parameters(), lr=0.5, initial_accumulator_value=0.25)

    def alone(device: torch.device) -> dict[str, torch.Tensor]:
        model = layers().to(device)
        train(model, adagrad(model), *range(trained + 2))
        return {name: p.detach().cpu() for name, p in model.named_parameters()}

    expected = alone(torch.device("cpu"))

    def body(rank: Rank) -> None:
        module = layers().to(rank.device)
        before = adagrad(module)
        train(module, before, *range(trained))
        names = OptimStateKeyType.PARAM_NAME
        state = FullyShardedDataParallel.rekey_optim_state_dict(before.state_dict(), names, module)
        model = tp_extension.apply(module, rank, plan={}, shape=(rank.size, 1), use_orig_params=original)
        optimizer = adagrad(model)
        optimizer.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, state))
        nonempty = [p for p in model.parameters() if p.numel()]
        assert [optimizer.state[p]["sum"].shape for p in nonempty] == [p.shape for p in nonempty]
        train(model, optimizer, trained, trained + 1)
        parameters = tp_extension.parameters(model)
        there = alone(rank.device)
        assert_as_alone(expected, there, parameters, "parameter", rounded=True)

    world.run(body)


@requirement(
    "TP-STATE-14",
    "A full optimizer state with rank0_only=True is empty on every other rank.",
    source=f"{SOURCE}, optim_state_dict_to_load; FullOptimStateDictConfig",
)
@requirement(
    "TP-STATE-17",
    "Loading a full optimizer state from rank 0 gives every rank its part.",
    source=f"{SOURCE}, optim_state_dict_to_load; FullOptimStateDictConfig",
)
@pytest.mark.parametrize("offload", [False, True], ids=["there", "offloaded"])
@pytest.mark.world(2, 3)
def test_first_rank_only(world: World, offload: bool) -> None:
    """Load the momentum after two steps into an optimizer without state."""

    def body(rank: Rank) -> None:
        model = tp_extension.apply(layers(), rank, plan={}, shape=(rank.size, 1), use_orig_params=False)
        optimizer, fresh = (torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5) for _ in range(2))
        train(model, optimizer, 0, 1)
        configs = FullStateDictConfig(), FullOptimStateDictConfig(offload_to_cpu=offload, rank0_only=True)
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, *configs):
            saved = FullyShardedDataParallel.optim_state_dict(model, optimizer)
            assert (sorted(saved) == ["param_groups", "state"]) if rank.index == 0 else saved == {}
            names = [name for name, _ in layers().named_parameters()]
            assert list(saved.get("state", names)) == names
            fresh.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(model, fresh, saved))
        assert list(fresh.state) == list(optimizer.state)
        for parameter, state in optimizer.state.items():
            assert_same_all(state, fresh.state[parameter], "state")

    world.run(body)


@requirement(
    "TP-STATE-17",
    "Loading a full optimizer state from rank 0 gives every rank its part.",
    source=f"{SOURCE}, optim_state_dict_to_load; FullOptimStateDictConfig",
)
@pytest.mark.needs(features=["hybrid"])
@pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
@pytest.mark.world(4)
def test_first_rank_of_replicas(world: World, original: bool) -> None:
    """Shard over two of four ranks with each hybrid strategy, or over all of them, and load Adam's state."""

    def body(rank: Rank) -> None:
        for strategy, mesh in (*((s, rank.mesh(2, 2)) for s in HYBRIDS), (STRATEGIES[0], rank.mesh(4))):
            options: Any = {"sharding_strategy": strategy, "use_orig_params": original, "device_mesh": mesh}
            model = wrapped(rank, layers(), **options)
            adam, fresh = (torch.optim.Adam(model.parameters(), foreach=False) for _ in range(2))
            train(model, adam, 0)
            configs = FullStateDictConfig(), FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=True)
            with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, *configs):
                saved = FullyShardedDataParallel.optim_state_dict(model, adam)
                given = saved if rank.index == 0 else {}
                fresh.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(model, fresh, given))
            for parameter, state in adam.state.items():
                found = {name: fresh.state[parameter][name] for name in state}
                assert_same_all(state, found, f"{strategy}")

    world.run(body)


@requirement(
    "TP-STATE-201",
    "An optimizer that loaded a full state of FSDP counts each of its steps once for each parameter.",
    source=f"{SOURCE}, rekey_optim_state_dict; pytorch/pytorch#96260",
)
@pytest.mark.parametrize("original", [True, False], ids=["original", "flat"])
@pytest.mark.world(2)
def test_step_counts(world: World, original: bool) -> None:
    """Load the state after two steps into Adam of a model that is not distributed, and train both for a step."""

    def body(rank: Rank) -> list[float]:
        model = tp_extension.apply(layers(), rank, plan={}, shape=(rank.size, 1), use_orig_params=original)
        alone = layers().to(rank.device)
        adam, fresh = (torch.optim.Adam(m.parameters(), lr=0.5, foreach=False) for m in (model, alone))
        train(model, adam, 0, 1)
        saved = FullyShardedDataParallel.optim_state_dict(model, adam)
        numbered = FullyShardedDataParallel.rekey_optim_state_dict(saved, OptimStateKeyType.PARAM_ID, alone)
        fresh.load_state_dict(numbered)
        train(alone, fresh, 2)
        return [float(state["step"]) for state in fresh.state.values()]

    assert_on_ranks([[3.0] * 6] * world.size, world.run(body))


@requirement(
    "TP-STATE-3452",
    "The state dict that FSDP makes of an optimizer of shards stays as it is when the optimizer goes on.",
    source=SOURCE,
)
@requirement(
    "TP-STATE-9135",
    "The moments in a state dict that optim_state_dict_to_load is given keep their values when the optimizer that "
    "loads them goes on.",
    source="torch.distributed.fsdp.FullyShardedDataParallel.optim_state_dict_to_load: 'the sharded optimizer state'",
)
@pytest.mark.parametrize("original", [True, False], ids=["original", "flat"])
@pytest.mark.world(2)
def test_kept(world: World, original: bool) -> None:
    """Save full and sharded states after two steps, offloaded or not, train on, load them and train on."""

    def values(saved: dict[str, Any]) -> dict[str, dict[str, torch.Tensor]]:
        return {
            name: {key: (t.to_local() if isinstance(t, DTensor) else t).clone() for key, t in of.items()}
            for name, of in saved["state"].items()
        }

    def body(rank: Rank) -> None:
        mesh = rank.mesh(rank.size)
        kinds = (
            (StateDictType.FULL_STATE_DICT, FullStateDictConfig, FullOptimStateDictConfig),
            (StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig, ShardedOptimStateDictConfig),
        )
        for strategy, (kind, of_model, config), offload in itertools.product(STRATEGIES[:2], kinds, (True, False)):
            what = f"{strategy}, {kind}, {offload=}"
            model = wrapped(rank, layers(), sharding_strategy=strategy, use_orig_params=original, device_mesh=mesh)
            adam = torch.optim.Adam(model.parameters(), lr=0.5)
            train(model, adam, 0, 1)
            with FullyShardedDataParallel.state_dict_type(model, kind, of_model(), config(offload_to_cpu=offload)):
                saved = FullyShardedDataParallel.optim_state_dict(model, adam)
            before = values(saved)
            train(model, adam, 2)
            assert {float(of["step"]) for of in saved["state"].values()} == {2.0}, what
            for name, state in values(saved).items():
                assert_same_all(before[name], state, f"{what}: {name}")
            with FullyShardedDataParallel.state_dict_type(model, kind, of_model(), config()):
                adam.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(model, adam, saved))
            train(model, adam, 2)
            for name, state in values(saved).items():
                for moment in "exp_avg", "exp_avg_sq":  # any optimizer shares the step with what it has loaded
                    assert_same(before[name][moment], state[moment], f"{what}, loaded: {moment} of {name}")

    world.run(body)


@requirement(
    "TP-STATE-15",
    "A sharded optimizer state offloaded to the host has the same values and can be loaded.",
    source=f"{SOURCE}; ShardedOptimStateDictConfig",
)
@pytest.mark.parametrize("original", [True, False], ids=["original", "flat"])
@pytest.mark.world(2, 4)
def test_offloaded(world: World, original: bool) -> None:
    """Compare the momentum after two steps, of layers that are not tensor parallel."""

    def body(rank: Rank) -> None:
        model = tp_extension.apply(layers(), rank, plan={}, shape=(rank.size // 2, 2), use_orig_params=original)
        optimizer, fresh = (torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5) for _ in range(2))
        train(model, optimizer, 0, 1)
        saved_momenta = []
        for offload in (True, False):
            configs = ShardedStateDictConfig(), ShardedOptimStateDictConfig(offload_to_cpu=offload)
            with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, *configs):
                saved = FullyShardedDataParallel.optim_state_dict(model, optimizer)
                saved_momenta.append(momenta(saved["state"]))
                assert all(of["momentum_buffer"].device.type == "cpu" or not offload for of in saved["state"].values())
                fresh.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(model, fresh, saved))
        assert_same_all(*saved_momenta, "momentum")
        for parameter, state in optimizer.state.items():
            assert_same_all(state, fresh.state[parameter], "state")

    world.run(body)


@requirement(
    "TP-STATE-3201",
    "The tensors that optim_state_dict_to_load returns hold memory for their own elements alone.",
    source="torch.distributed.fsdp.FullyShardedDataParallel.optim_state_dict_to_load: 'the sharded optimizer state'",
)
@pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
@pytest.mark.world(2)
def test_memory(world: World, original: bool) -> None:
    """Load full and sharded states of two momenta, of layers that are wrapped together, with each strategy."""

    def body(rank: Rank) -> None:
        for strategy, sharded in itertools.product(STRATEGIES, (False, True)):
            options: Any = {"sharding_strategy": strategy, "use_orig_params": original, "device_mesh": rank.mesh(2)}
            model = wrapped(rank, layers(), **options)
            adam = torch.optim.Adam(model.parameters(), foreach=False)
            train(model, adam, 0)
            configs = (
                (StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(), ShardedOptimStateDictConfig())
                if sharded
                else (StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig(rank0_only=False))
            )
            with FullyShardedDataParallel.state_dict_type(model, *configs):
                saved = FullyShardedDataParallel.optim_state_dict(model, adam)
                loaded = FullyShardedDataParallel.optim_state_dict_to_load(model, adam, saved)
            for number, state in loaded["state"].items():
                for name, value in state.items():
                    what = f"{strategy}, {sharded=}: {name} of {number}"
                    assert value.untyped_storage().nbytes() == value.numel() * value.itemsize, what

    world.run(body)
