"""Corner cases of FSDP over tensor parallelism: frozen, unused or empty layers, accumulation, clipping, and state."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, StateDictType
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks import tp_extension

SOURCE = "torch/distributed/tensor/parallel/fsdp.py: DTensorExtensions"
COLUMNS = {"0": "replicated_columns"}


def linears(*sizes: int, bias: bool = True, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Create linear layers between consecutive sizes, whose parameters are ones."""
    module = nn.Sequential(*(nn.Linear(a, b, bias=bias, dtype=dtype) for a, b in pairwise(sizes)))
    for parameter in module.parameters():
        nn.init.ones_(parameter)
    return module


def sharded(module: nn.Module, rank: Rank, plan: Mapping[str, str] = COLUMNS, **options: Any) -> Any:
    return tp_extension.apply(module, rank, plan=plan, **options)


def backward(module: nn.Module, *shape: int, dtype: torch.dtype = torch.float32) -> None:
    module(torch.ones(shape, dtype=dtype, device=next(module.parameters()).device)).sum().backward()


@requirement(
    "TP-GRAD-04",
    "A parameter that requires no gradient before sharding requires none after it.",
    source=SOURCE,
)
@pytest.mark.world(2, 4)
@pytest.mark.parametrize("parallel", [True, False], ids=["tensor-parallel", "plain"])
def test_frozen(world: World, parallel: bool) -> None:
    """The first of two layers is frozen; both are tensor parallel, or only the other one."""

    def body(rank: Rank) -> list[bool]:
        module = linears(4, 4, 4)
        module[0].requires_grad_(False)
        plan = COLUMNS if parallel else {"1": COLUMNS["0"]}
        return [p.requires_grad for p in sharded(module, rank, plan, use_orig_params=True).parameters()]

    assert_on_ranks([[False, False, True, True]] * world.size, world.run(body))


@requirement(
    "TP-GRAD-05",
    "With original parameters, gradients accumulate without synchronization.",
    source=SOURCE,
)
@pytest.mark.world(2, 4)
@pytest.mark.parametrize("plan", [COLUMNS, {}], ids=["tensor-parallel", "plain"])
def test_no_sync(world: World, plan: dict[str, str]) -> None:
    """Run a backward in ``no_sync()``, then one outside, with a tensor-parallel layer or a plain one."""

    def body(rank: Rank) -> float:
        module = sharded(linears(4, 4), rank, plan, use_orig_params=True)
        with module.no_sync():
            backward(module, 1, 4)
        backward(module, 1, 4)
        gradients = tp_extension.gradients(module)
        assert gradients is not None
        return sum(float(g.sum()) for g in gradients.values())

    assert_on_ranks([40.0] * world.size, world.run(body))


@requirement(
    "TP-GRAD-06",
    "Original parameters are supported where parameters are not sharded.",
    source=SOURCE,
)
@pytest.mark.world(1, 2)
@pytest.mark.parametrize("plan", [COLUMNS, {}], ids=["tensor-parallel", "plain"])
def test_no_shard(world: World, plan: dict[str, str]) -> None:
    """Use ``NO_SHARD``, as with one data-parallel rank, with a tensor-parallel layer or a plain one."""

    def body(rank: Rank) -> None:
        options = {"use_orig_params": True, "sharding_strategy": ShardingStrategy.NO_SHARD}
        backward(sharded(linears(4, 4), rank, plan, **options), 1, 4)

    world.run(body)


@requirement(
    "TP-GRAD-07",
    "Whole gradients are available in every dtype, even if only some ranks hold a part.",
    source=SOURCE,
)
@pytest.mark.world(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=lambda d: str(d)[6:])
def test_gradient_dtype(world: World, dtype: torch.dtype) -> None:
    """The shard of rank 0 is entirely frozen."""

    def body(rank: Rank) -> list[torch.dtype]:
        module = linears(4, 4, 4, dtype=dtype)
        module[0].requires_grad_(False)
        module = sharded(module, rank, plan={}, use_orig_params=True)
        backward(module, 1, 4, dtype=dtype)
        gradients = tp_extension.gradients(module)
        assert gradients is not None
        return [g.dtype for g in gradients.values() if g.any()]

    assert_on_ranks([[dtype, dtype]] * world.size, world.run(body))


@requirement(
    "TP-GRAD-08",
    "A tensor-parallel layer with one feature trains.",
    source=SOURCE,
)
@pytest.mark.world(2)
@pytest.mark.parametrize("bias", [True, False], ids=["with-bias", "without-bias"])
def test_one_feature(world: World, bias: bool) -> None:
    """Use tensor parallelism over one rank."""
    world.run(lambda rank: backward(sharded(linears(4, 1, bias=bias), rank), 1, 4))


@requirement(
    "TP-GRAD-09",
    "A layer trains even if its shard on some tensor-parallel rank is empty.",
    source=SOURCE,
)
@pytest.mark.world(4)
def test_empty_shard(world: World) -> None:
    """Split one feature over two ranks."""
    world.run(lambda rank: backward(sharded(linears(4, 1), rank), 1, 4))


@requirement(
    "TP-GRAD-10",
    "A forward and backward on inputs without rows works.",
    source=SOURCE,
)
@pytest.mark.world(2, timeout=6)
@pytest.mark.parametrize("shape", [(4,), (2, 4), (4, 4)], ids=["features", "sequences", "square"])
def test_no_rows(world: World, shape: tuple[int, ...]) -> None:
    """All ranks have inputs without rows."""
    world.run(lambda rank: backward(sharded(linears(4, 4), rank), 0, *shape))


@requirement(
    "TP-GRAD-11",
    "Gradients are clipped by the norm of all gradients.",
    source=SOURCE,
)
@pytest.mark.world(2, 4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=lambda d: str(d)[6:])
def test_clipping(world: World, dtype: torch.dtype) -> None:
    """Sixteen gradients are one."""

    def body(rank: Rank) -> float:
        module = sharded(linears(4, 4, bias=False, dtype=dtype), rank)
        backward(module, 1, 4, dtype=dtype)
        return round(float(module.clip_grad_norm_(1.0)), 3)

    assert_on_ranks([4.0] * world.size, world.run(body))


class Asked(nn.Module):
    """A module that always uses one layer, and the other on request."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.asked = linears(2, 2, 2, bias=False)

    def forward(self, x: torch.Tensor, asked: bool) -> Any:
        return self.always(self.asked(x) if asked else x)


def asked(rank: Rank, **options: Any) -> Any:
    """Create a module whose two layers are sharded in separate FSDP units."""
    module = Asked()
    module.always = sharded(module.always, rank, plan={}, **options)
    return sharded(module, rank, plan={}, **options)


@requirement(
    "TP-GRAD-12",
    "A backward that skips parameters leaves their gradients unchanged.",
    source=SOURCE,
)
@pytest.mark.world(2)
@pytest.mark.parametrize("original", [True, False], ids=["original", "flat"])
def test_idle_gradient(world: World, original: bool) -> None:
    """A layer is used only in the first of two backwards."""

    def body(rank: Rank) -> bool:
        module = asked(rank, use_orig_params=original)
        for used in (True, False):
            module(torch.ones(1, 2, device=rank.device), used).sum().backward()
        return all(p.grad is not None for p in module.parameters())

    assert_on_ranks([True] * world.size, world.run(body))


@requirement(
    "TP-STATE-01",
    "state_dict() includes parameters that the last backward skipped.",
    source=SOURCE,
)
@pytest.mark.world(2)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_idle_unit(world: World, strategy: str) -> None:
    """With original parameters, one layer is not used."""

    def body(rank: Rank) -> list[str]:
        module = asked(rank, use_orig_params=True, sharding_strategy=ShardingStrategy[strategy])
        module(torch.ones(1, 2, device=rank.device), False).sum().backward()
        return sorted(module.state_dict())

    assert_on_ranks([["always.weight", "asked.weight"]] * world.size, world.run(body))


@requirement(
    "TP-STATE-02",
    "Sharded state dicts have the sizes of whole parameters.",
    source=SOURCE,
)
@pytest.mark.world(2, 4)
@pytest.mark.parametrize("features", [4, 5], ids=["even", "uneven"])
def test_sharded_state(world: World, features: int) -> None:
    """Two tensor-parallel ranks divide the features evenly or not."""

    def body(rank: Rank) -> list[list[int]]:
        module = sharded(linears(4, features), rank)
        with FullyShardedDataParallel.state_dict_type(module, StateDictType.SHARDED_STATE_DICT):
            return [list(value.shape) for value in module.state_dict().values()]

    assert_on_ranks([[[features, 4], [features]]] * world.size, world.run(body))


@requirement(
    "TP-STATE-03",
    "Optimizer states survive a save and load unchanged.",
    source=SOURCE,
)
@pytest.mark.world(2, 4)
@pytest.mark.parametrize("original", [True, False], ids=["original", "flat"])
def test_optimizer_state(world: World, original: bool) -> None:
    """Compare the momentum after one step."""

    def body(rank: Rank) -> bool:
        module = sharded(linears(4, 4, bias=False), rank, use_orig_params=original)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.5)
        module(torch.ones(1, 4, device=rank.device)).mul(torch.arange(4.0, device=rank.device)).sum().backward()
        optimizer.step()
        with FullyShardedDataParallel.state_dict_type(module, StateDictType.SHARDED_STATE_DICT):
            saved = FullyShardedDataParallel.optim_state_dict(module, optimizer)
            loaded = FullyShardedDataParallel.optim_state_dict_to_load(module, optimizer, saved)
        before = [state["momentum_buffer"].cpu() for state in optimizer.state.values()]
        after = [state["momentum_buffer"].cpu() for state in loaded["state"].values()]
        return all(map(torch.equal, before, after))

    assert_on_ranks([True] * world.size, world.run(body))


@requirement(
    "TP-HYB-01",
    "A hybrid sharding strategy averages gradients over replicas, whatever the number of shards.",
    source="torch/distributed/fsdp/fully_sharded_data_parallel.py: ShardingStrategy; pytorch/pytorch#154888",
)
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.world(4)
def test_hybrid(world: World, shards: int) -> None:
    """Every rank has its own gradient in each of two steps."""

    def body(rank: Rank) -> list[float]:
        mesh = rank.mesh(rank.size // shards, shards, names=("replicas", "shards"))
        model = FullyShardedDataParallel(
            linears(2, 1, bias=False).to(rank.device),
            device_mesh=mesh,
            device_id=rank.device,
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
            use_orig_params=True,
        )
        gradients: list[float] = []
        for step in range(2):
            model.zero_grad()
            model(torch.full((1, 2), 1.0 + rank.index + step, device=rank.device)).sum().backward()
            with FullyShardedDataParallel.summon_full_params(model, writeback=False, with_grads=True):
                gradients += [float(x) for p in model.parameters() if p.grad is not None for x in p.grad.flatten()]
        return gradients

    assert_on_ranks([[2.5, 2.5, 3.5, 3.5]] * 4, world.run(body))


@requirement(
    "TP-DIM-02",
    "A row-wise layer with one input feature accepts inputs of any number of dimensions.",
    source=SOURCE,
)
@pytest.mark.parametrize("shape", [(2, 1), (2, 3, 1), (2, 1, 1)], ids=["rows", "sequences", "sequences-of-one"])
@pytest.mark.world(2)
def test_one_column(world: World, shape: tuple[int, ...]) -> None:
    """Use a tensor-parallel group of one rank."""

    def body(rank: Rank) -> list[int]:
        mesh = rank.mesh(rank.size, 1, names=("dp", "tp"))
        rows = RowwiseParallel(input_layouts=Replicate())
        model = parallelize_module(linears(1, 2).to(rank.device), mesh["tp"], {"0": rows})
        return list(model(torch.ones(shape, device=rank.device)).shape)

    assert_on_ranks([[*shape[:-1], 2]] * 2, world.run(body))


@requirement(
    "TP-MEM-01",
    "No memory of a model remains in use once nothing references the model.",
    source=SOURCE,
)
@pytest.mark.world(1, 2)
def test_memory(world: World) -> None:
    """Run one backward with flat parameters, then drop the model."""

    def body(rank: Rank) -> bool:
        module = sharded(linears(4, 4), rank, plan={}, use_orig_params=False)
        backward(module, 1, 4)
        flat = weakref.ref(next(module.parameters()))
        del module
        gc.collect()
        return flat() is not None

    assert_on_ranks([False] * world.size, world.run(body))


@requirement(
    "TP-GRAD-13",
    "Gradients of synchronized backwards accumulate, whatever the size of a parameter.",
    source=SOURCE,
)
@pytest.mark.parametrize("features", [1, 2])
@pytest.mark.world(2, 3)
def test_one_element(world: World, features: int) -> None:
    """Run two backwards of a flat parameter with one element or more, then a step with their sum."""

    def body(rank: Rank) -> list[float]:
        module = linears(features, 1, bias=False).to(rank.device)
        module = FullyShardedDataParallel(module, device_mesh=rank.mesh(rank.size), device_id=rank.device)
        for first in (1.0, 2.0):
            module(torch.full((1, features), first + rank.index, device=rank.device)).sum().backward()
        torch.optim.SGD(module.parameters(), lr=1.0).step()
        with FullyShardedDataParallel.summon_full_params(module, writeback=False):
            return [float(x) for p in module.parameters() for x in p.flatten()]

    assert_on_ranks([[1.0 - (2.0 + world.size)] * features] * world.size, world.run(body))
