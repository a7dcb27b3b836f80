"""State dicts of FSDP over tensor-parallel layers: what they hold, and loading them."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    LocalStateDictConfig,
    MixedPrecision,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from fixtures.copying import reloaded
from harness import Rank, World, assert_on_ranks, assert_same, assert_same_all, dyadic, requirement
from harness.stacks import tp_extension

SOURCE = "torch/distributed/fsdp: FullyShardedDataParallel.state_dict, optim_state_dict"
PLAN = {"first": "columns", "second": "rows"}


class Layers(nn.Module):
    """Two tensor-parallel layers that FSDP shards unevenly, a plain layer, and a buffer."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 6, dtype=dtype), nn.Linear(6, 5, dtype=dtype)
        self.plain = nn.Linear(5, 1, dtype=dtype)
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 4.0, 0.5, 1.0], dtype=dtype))
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(dyadic(*parameter.shape, key=name, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.plain(self.second(self.first(x).relu()) * self.scale)
        return output


def sharded(rank: Rank, model: nn.Module | None = None, **options: Any) -> Any:
    options.setdefault("plan", PLAN)
    return tp_extension.apply(model or Layers(), rank, **{"use_orig_params": rank.size > 2, **options})


def train(model: Any, optimizer: torch.optim.Optimizer, rank: Rank, steps: int = 2) -> None:
    """Train with different data on each data-parallel rank."""
    part = tp_extension.parts(rank.size)[rank.index]
    for step in range(steps):
        x = dyadic(2, 3, key=("input", step, part), dtype=next(model.parameters()).dtype)
        model(x.to(rank.device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def kept(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Copy the tensors of a state dict, unsharded."""
    whole = {name: v.full_tensor() if isinstance(v, DTensor) else v for name, v in state.items()}
    return {name: value.detach().clone() for name, value in whole.items()}


def state_type(model: Any, kind: str, **options: Any) -> Any:
    warnings.simplefilter("ignore")
    sharded_optimizer, full_optimizer = ShardedOptimStateDictConfig(), FullOptimStateDictConfig(rank0_only=False)
    if kind == "full":
        config = FullStateDictConfig(**options)
        return FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, config, full_optimizer)
    if kind == "local":
        local = LocalStateDictConfig(**options)
        return FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT, local)
    shards = ShardedStateDictConfig(**options)
    return FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, shards, sharded_optimizer)


@requirement(
    "TP-STATE-04",
    "A sharded or full state dict holds whole parameters in their dtype, unaffected by further training.",
    source=SOURCE,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("kind", ["sharded", "full"])
@pytest.mark.world(2, 3, 4)
@pytest.mark.each_choice
def test_saved(world: World, kind: str, dtype: torch.dtype) -> None:
    """Save after two steps, read after two more."""

    def body(rank: Rank) -> None:
        plan = PLAN if kind == "sharded" else {}
        model = sharded(rank, Layers(dtype), plan=plan)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        train(model, optimizer, rank)
        expected = {name: p.clone() for name, p in tp_extension.parameters(model).items()}
        with state_type(model, kind):
            state = model.state_dict()
        assert all(isinstance(value, DTensor) == (kind == "sharded") for n, value in state.items() if n != "scale")
        train(model, optimizer, rank)
        saved = kept(state)
        assert_same(torch.tensor([1.0, 2.0, 4.0, 0.5, 1.0], dtype=dtype), saved.pop("scale"), "buffer")
        assert_same_all(expected, saved, "parameter")

    world.run(body)


@requirement(
    "TP-STATE-05",
    "Loading a sharded, full or local state dict, offloaded or not, restores the saved values.",
    source=SOURCE,
)
@pytest.mark.parametrize("offload", [False, True], ids=["there", "offloaded"])
@pytest.mark.parametrize("kind", ["sharded", "full", "local"])
@pytest.mark.world(2, 3, 4)
@pytest.mark.each_choice
def test_loaded(world: World, kind: str, offload: bool) -> None:
    """Save to a file, but for local states, train two more steps, then load."""

    def body(rank: Rank) -> None:
        if kind == "local":  # accepts no mesh
            model: Any = FullyShardedDataParallel(Layers().to(rank.device), device_id=rank.device)
        else:
            model = sharded(rank, plan=PLAN if kind == "sharded" else {})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        train(model, optimizer, rank)
        expected = {name: p.clone() for name, p in tp_extension.parameters(model).items()}
        with state_type(model, kind, offload_to_cpu=offload):
            state = {name: value.clone() for name, value in model.state_dict().items()}
            assert not offload or {value.device.type for value in state.values()} == {"cpu"}
            state = state if kind == "local" else reloaded(state, weights_only=True)
        train(model, optimizer, rank)
        with state_type(model, kind, offload_to_cpu=offload):
            model.load_state_dict(state)
        assert_same_all(expected, tp_extension.parameters(model), "parameter")

    world.run(body)


@requirement(
    "TP-STATE-06",
    "A full state dict with rank0_only=True is empty on every other rank.",
    source=SOURCE,
)
@pytest.mark.parametrize("offload", [False, True], ids=["there", "offloaded"])
@pytest.mark.parametrize("original", [True, False], ids=["original", "flat"])
@pytest.mark.world(2, 3)
def test_first_rank_only(world: World, original: bool, offload: bool) -> None:
    """Keep the state on the device or offload it to the host."""

    def body(rank: Rank) -> list[str]:
        model = sharded(rank, plan={}, use_orig_params=original)
        with state_type(model, "full", rank0_only=True, offload_to_cpu=offload):
            return sorted(model.state_dict())

    names = sorted(Layers().state_dict())
    assert_on_ranks([names] + [[]] * (world.size - 1), world.run(body))


@requirement(
    "TP-STATE-07",
    "With mixed precision, parameters and buffers are saved in their original dtype.",
    source=f"{SOURCE}; MixedPrecision",
)
@pytest.mark.parametrize("kind", ["sharded", "full"])
@pytest.mark.world(2, 3)
def test_mixed_precision(world: World, kind: str) -> None:
    """Compute one step entirely in bfloat16."""

    def body(rank: Rank) -> set[torch.dtype]:
        low = torch.bfloat16
        model = sharded(rank, plan={}, mixed_precision=MixedPrecision(low, low, low))
        model(dyadic(2, 3, key=rank.index, dtype=torch.float32).to(rank.device)).sum().backward()
        with state_type(model, kind):
            return {value.dtype for value in model.state_dict().values()}

    assert_on_ranks([{torch.float32}] * world.size, world.run(body))


@requirement(
    "TP-STATE-08",
    "Loading a saved optimizer state into a new optimizer restores every tensor, step count and group setting.",
    source=f"{SOURCE}, optim_state_dict_to_load",
)
@requirement(
    "TP-STATE-81",
    "In a sharded state dict, each tensor of an optimizer's state has the mesh and placements of its parameter.",
    source=f"{SOURCE}; test_fsdp_dtensor_state_dict.py: test_fsdp_init_with_device_mesh",
)
@pytest.mark.parametrize("original", [True, False], ids=["original", "flat"])
@pytest.mark.parametrize("kind", ["sharded", "full"])
@pytest.mark.world(2, 3)
def test_optimizer(world: World, kind: str, original: bool) -> None:
    """Use Adam with two groups, after two steps and two more; the new optimizer gets its state from a file."""

    def made(model: Any) -> torch.optim.Optimizer:
        parameters = list(model.parameters())
        groups = [{"params": parameters[:1], "lr": 0.5}]
        groups += [{"params": parameters[1:], "lr": 0.25, "weight_decay": 0.125}] if parameters[1:] else []
        return torch.optim.Adam(groups)

    def body(rank: Rank) -> None:
        model = sharded(rank, plan={}, use_orig_params=original)
        optimizer = made(model)
        for _ in range(2):
            train(model, optimizer, rank)
            with state_type(model, kind):
                saved = FullyShardedDataParallel.optim_state_dict(model, optimizer)
                if kind == "sharded":
                    weights = model.state_dict()
                    for name, of in saved["state"].items():
                        for key, value in of.items():
                            at = (value.device_mesh, value.placements) if isinstance(value, DTensor) else None
                            weight = weights[name]
                            assert at == ((weight.device_mesh, weight.placements) if key != "step" else None), name
                fresh = made(model)
                read = reloaded(saved, weights_only=True)
                loaded = FullyShardedDataParallel.optim_state_dict_to_load(model, fresh, read)
                fresh.load_state_dict(loaded)
            before, after = optimizer.state_dict(), fresh.state_dict()
            for one, other in zip(before["param_groups"], after["param_groups"], strict=True):
                assert {k: v for k, v in one.items() if k != "params"} == {
                    k: v for k, v in other.items() if k != "params"
                }
            assert list(before["state"]) == list(after["state"])
            for index, state in before["state"].items():
                again = {name: after["state"][index][name] for name in state}
                assert len(again) == len(after["state"][index])
                assert_same_all(state, again, f"state of parameter {index}")
            optimizer = fresh

    world.run(body)


@requirement(
    "TP-STATE-09",
    "Values written to summoned full parameters are kept with writeback=True and discarded without it.",
    source="torch/distributed/fsdp: FullyShardedDataParallel.summon_full_params",
)
@pytest.mark.parametrize("original", [True, False], ids=["original", "flat"])
@pytest.mark.world(2, 3, 4)
def test_written(world: World, original: bool) -> None:
    """Write with and without writeback."""

    def body(rank: Rank) -> None:
        model = sharded(rank, plan={}, use_orig_params=original)
        expected = {name: p.clone() * 2 for name, p in tp_extension.parameters(model).items()}
        for writeback in (True, False):
            with FullyShardedDataParallel.summon_full_params(model, writeback=writeback), torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(2)
        assert_same_all(expected, tp_extension.parameters(model), "parameter")

    world.run(body)


@requirement(
    "TP-STATE-10",
    "With a hybrid strategy on a three-dimensional mesh, sharded state survives a save and load unchanged.",
    source="torch/distributed/tensor/parallel/fsdp.py: DTensorExtensions",
)
@pytest.mark.parametrize("shape", [(2, 2, 1), (1, 2, 2)], ids=str)
@pytest.mark.world(4)
def test_three_dimensions(world: World, shape: tuple[int, int, int]) -> None:
    """Use tensor parallelism over one rank or two."""

    def body(rank: Rank) -> None:
        mesh = rank.mesh(*shape, names=("replicas", "shards", "tp"))
        styles = {name: tp_extension.STYLES[how]() for name, how in PLAN.items()}
        model = FullyShardedDataParallel(
            parallelize_module(Layers().to(rank.device), mesh["tp"], styles),
            device_mesh=mesh["replicas", "shards"],
            device_id=rank.device,
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        )
        expected = {name: p.clone() for name, p in tp_extension.parameters(model).items()}
        assert_same_all(dict(Layers().named_parameters()), expected, "parameter")
        with state_type(model, "sharded"):
            state = {name: value.clone() for name, value in model.state_dict().items()}
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            model.load_state_dict(state)
        assert_same_all(expected, tp_extension.parameters(model), "parameter")
        saved = kept(state)
        saved.pop("scale")
        assert_same_all(expected, saved, "saved")

    world.run(body)


@requirement(
    "TP-STATE-18",
    "A full state dict keeps its values, whatever the model does afterwards.",
    source=SOURCE,
)
@pytest.mark.world(4)
def test_full_state_stays(world: World) -> None:
    """Train after taking it, and read it then."""

    def body(rank: Rank) -> None:
        model = sharded(rank)
        with state_type(model, "full"):
            state = model.state_dict()
        train(model, torch.optim.SGD(model.parameters(), lr=0.5), rank)
        for name, parameter in Layers().named_parameters():
            assert_same(parameter.detach(), kept(state)[name].cpu(), name)

    world.run(body)


@requirement(
    "TP-STATE-19",
    "A sharded state dict of a hybrid strategy is sharded over the shards, and replicated over the replicas.",
    source=SOURCE,
)
@pytest.mark.world(4)
def test_hybrid_placements(world: World) -> None:
    """The mesh has two replicas of two shards; load the parameters and the optimizer's state, offloaded or not."""

    def body(rank: Rank) -> list[list[str]]:
        mesh = rank.mesh(2, 2, names=("replicas", "shards"))
        layer = nn.Linear(4, 5, bias=False).to(rank.device)
        with torch.no_grad():
            layer.weight.copy_(dyadic(5, 4, key="weight", dtype=torch.float32))
        strategy = ShardingStrategy.HYBRID_SHARD
        model = FullyShardedDataParallel(layer, device_mesh=mesh, device_id=rank.device, sharding_strategy=strategy)
        optimizer, fresh = (torch.optim.Adam(model.parameters(), lr=0.5, foreach=False) for _ in range(2))
        for step in range(2):
            model(dyadic(1, 4, key=("input", step), dtype=torch.float32).to(rank.device)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        expected = tp_extension.parameters(model)["weight"].clone()
        for offload in False, True:
            shards = ShardedStateDictConfig(offload_to_cpu=offload)
            settings = StateDictType.SHARDED_STATE_DICT, shards, ShardedOptimStateDictConfig(offload_to_cpu=offload)
            with FullyShardedDataParallel.state_dict_type(model, *settings):
                weights = {"weight": model.state_dict()["weight"]}
                saved = FullyShardedDataParallel.optim_state_dict(model, optimizer)
                fresh.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(model, fresh, saved))
                weights |= {key: saved["state"]["weight"][key] for key in ("exp_avg", "exp_avg_sq")}
                kinds = {value.device.type for value in weights.values()}
                assert kinds == {"cpu" if offload else rank.device.type}
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.zero_()
                model.load_state_dict({"weight": weights["weight"]})
            for parameter, state in optimizer.state.items():
                assert_same_all(state, {name: fresh.state[parameter][name] for name in state}, f"state, {offload=}")
            assert_same(expected, tp_extension.parameters(model)["weight"], f"loaded, {offload=}")
            assert all(isinstance(value, DTensor) and value.device_mesh == mesh for value in weights.values())
        return [[str(placement) for placement in value.placements] for value in weights.values()]

    assert_on_ranks([[["R", "S(0)"]] * 3] * 4, world.run(body))


@requirement(
    "TP-STATE-20",
    "A tensor-parallel FSDP module changes nothing about other FSDP modules in the process.",
    source="torch/distributed/fsdp/_init_utils.py: _init_extension",
)
@pytest.mark.world(4)
def test_plain_module_beside(world: World) -> None:
    """Make a plain module after a tensor-parallel one, with a mesh, and read its sharded state dict."""

    def body(rank: Rank) -> list[str]:
        tensor_parallel = sharded(rank)
        plain = FullyShardedDataParallel(
            nn.Linear(4, 4, bias=False).to(rank.device), device_mesh=rank.mesh(4), device_id=rank.device
        )
        with state_type(plain, "sharded"):
            weight = plain.state_dict()["weight"]
        assert any("first" in name for name, _ in tensor_parallel.named_modules())
        return [type(weight).__name__, *(str(placement) for placement in weight.placements)]

    assert_on_ranks([["DTensor", "S(0)"]] * 4, world.run(body))
