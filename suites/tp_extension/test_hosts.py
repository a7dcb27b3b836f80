"""Two-dimensional meshes over ranks of several hosts, and checkpoints without a file system that hosts share."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardedStateDictConfig, ShardingStrategy, StateDictType
from torch.distributed.tensor.parallel import parallelize_module

from fixtures.models import TwoLayers, batch
from harness import Rank, World, assert_on_ranks, assert_same, requirement, unsupported
from harness.oracles.baseline import Step, assert_same_training, train
from harness.results import HostsLack
from harness.stacks import tp_extension

STEPS, ROWS_PER_PART = 3, 2
SOURCE = "torch/distributed/tensor/parallel/fsdp.py: DTensorExtensions"


def placed(rank: Rank, tensor: str) -> tuple[DeviceMesh, int]:
    """Return a mesh whose tensor-parallel dimension is within hosts or across them, and this rank's part of a batch."""
    ranks = torch.arange(4).reshape(2, 2)
    mesh = DeviceMesh(rank.device.type, ranks if tensor == "within" else ranks.T, mesh_dim_names=("dp", "tp"))
    return mesh, rank.host if tensor == "within" else rank.index % 2


def sharded(rank: Rank, mesh: DeviceMesh) -> FullyShardedDataParallel:
    """Return a model in two dimensions: tensor parallel, and FSDP over the rest."""
    styles = {name: tp_extension.STYLES[how]() for name, how in tp_extension.PLAN.items()}
    module = parallelize_module(TwoLayers().to(rank.device), mesh["tp"], styles)
    return FullyShardedDataParallel(module, device_mesh=mesh["dp"], device_id=rank.device, use_orig_params=True)


def train_on_rank(rank: Rank, tensor: str) -> list[Step]:
    mesh, part = placed(rank, tensor)
    batches = [batch(2 * ROWS_PER_PART, step).part(part, 2) for step in range(STEPS)]
    return train(
        sharded(rank, mesh), batches, scale=2, gradients=tp_extension.gradients, parameters=tp_extension.parameters
    )


@requirement(
    "TP-HOST-01",
    "A model trains as on one device, whether its tensor parallelism is within hosts or across them.",
    source=SOURCE,
)
@pytest.mark.parametrize("tensor", ["within", "across"])
@pytest.mark.world(4, hosts=2)
def test_two_dimensions(world: World, tensor: str) -> None:
    """Three steps of SGD on ranks equal three steps on one device, bit for bit."""
    ranks = world.run(train_on_rank, tensor)
    alone = train(TwoLayers(), [batch(2 * ROWS_PER_PART, step) for step in range(STEPS)])
    assert_same_training(alone, ranks, [0, 0, 1, 1] if tensor == "within" else [0, 1, 0, 1])


def train_hybrid(rank: Rank, shards: str) -> list[Step]:
    ranks = torch.arange(4).reshape(2, 2)
    names = ("replicas", "shards")
    mesh = DeviceMesh(rank.device.type, ranks if shards == "within" else ranks.T, mesh_dim_names=names)
    module = FullyShardedDataParallel(
        TwoLayers().to(rank.device),
        device_mesh=mesh,
        device_id=rank.device,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        use_orig_params=True,
    )
    batches = [batch(4 * ROWS_PER_PART, step).part(rank.index, 4) for step in range(STEPS)]
    return train(module, batches, scale=4, gradients=tp_extension.gradients, parameters=tp_extension.parameters)


@requirement(
    "TP-HOST-02",
    "A model trains as on one device, whether hybrid sharding has its shards or its replicas within hosts.",
    source="torch/distributed/fsdp/fully_sharded_data_parallel.py: ShardingStrategy",
)
@pytest.mark.parametrize("shards", ["within", "across"])
@pytest.mark.needs(features=["hybrid"])
@pytest.mark.world(4, hosts=2)
def test_hybrid(world: World, shards: str) -> None:
    """Three steps of SGD on ranks equal three steps on one device, bit for bit."""
    ranks = world.run(train_hybrid, shards)
    alone = train(TwoLayers(), [batch(4 * ROWS_PER_PART, step) for step in range(STEPS)])
    assert_same_training(alone, ranks)


def saved_and_loaded(rank: Rank, tensor: str) -> list[bool]:
    """Save in a folder that only this host has, train on, and load."""
    mesh, part = placed(rank, tensor)
    first = rank.index % 2 == 0
    told = dist.PrefixStore("folders", rank.store)
    folder = Path(tempfile.mkdtemp(prefix="concord-")) if first else Path()
    if first:
        told.set(str(rank.host), str(folder))
    folder = Path(told.get(str(rank.host)).decode())
    module = sharded(rank, mesh)
    config = ShardedStateDictConfig(offload_to_cpu=True)
    try:
        with FullyShardedDataParallel.state_dict_type(module, StateDictType.SHARDED_STATE_DICT, config):
            checkpoint.save(module.state_dict(), checkpoint_id=folder, use_collectives=False)
            before = tp_extension.parameters(module)
            train(module, [batch(2 * ROWS_PER_PART, 0).part(part, 2)], scale=2)
            moved = tp_extension.parameters(module)
            state = module.state_dict()
            checkpoint.load(state, checkpoint_id=folder)
            module.load_state_dict(state)
        after = tp_extension.parameters(module)
    finally:
        dist.barrier()
        if first:
            shutil.rmtree(folder, ignore_errors=True)
    return [
        all(torch.equal(before[name], after[name]) for name in before),
        any(not torch.equal(before[name], moved[name]) for name in before),
    ]


@requirement(
    "TP-HOST-03",
    "Without a file system that hosts share, each host saves the sharded state of its ranks and loads it unchanged.",
    source="torch.distributed.checkpoint.save: use_collectives",
)
@pytest.mark.parametrize("tensor", ["within", "across"])
@pytest.mark.world(4, hosts=2)
def test_checkpoint_of_each_host(world: World, tensor: str) -> None:
    """Every host has a folder of its own; the model is trained between saving and loading."""
    assert_on_ranks([[True, True]] * 4, world.run(saved_and_loaded, tensor))


def shared_folder(rank: Rank, parent: str) -> tuple[str, bool]:
    """Return a new folder that the first rank has made, and whether this rank sees it."""
    told = dist.PrefixStore("shared folder", rank.store)
    if rank.index == 0:
        try:
            told.set("folder", tempfile.mkdtemp(prefix=".concord-", dir=parent))
        except OSError:
            told.set("folder", "")
    folder = told.get("folder").decode()
    return folder, bool(folder) and Path(folder).is_dir()


def saved_and_loaded_elsewhere(rank: Rank, folder: str) -> list[dict[str, torch.Tensor]]:
    """Save what is tensor parallel within hosts, and load it into what is tensor parallel across them."""
    (first, part), (second, _) = placed(rank, "within"), placed(rank, "across")
    saved, loaded = sharded(rank, first), sharded(rank, second)
    config = ShardedStateDictConfig(offload_to_cpu=True)
    train(saved, [batch(2 * ROWS_PER_PART, 0).part(part, 2)], scale=2)
    with FullyShardedDataParallel.state_dict_type(saved, StateDictType.SHARDED_STATE_DICT, config):
        checkpoint.save(saved.state_dict(), checkpoint_id=folder)
    before = tp_extension.parameters(loaded)
    with FullyShardedDataParallel.state_dict_type(loaded, StateDictType.SHARDED_STATE_DICT, config):
        state = loaded.state_dict()
        checkpoint.load(state, checkpoint_id=folder)
        loaded.load_state_dict(state)
    return [tp_extension.parameters(saved), before, tp_extension.parameters(loaded)]


@requirement(
    "TP-HOST-04",
    "On a file system that hosts share, a sharded state that all ranks saved loads into a model that is tensor "
    "parallel across hosts instead of within them.",
    source="torch.distributed.checkpoint.save, load",
)
@pytest.mark.world(4, hosts=2)
def test_checkpoint_of_all_hosts(world: World) -> None:
    """The ranks save in one folder and read one another's files."""
    made = world.run(shared_folder, os.getcwd())
    folder = made[0][0]
    try:
        if not all(seen for _, seen in made):
            unsupported(HostsLack("folder that all of them see"))
        found = world.run(saved_and_loaded_elsewhere, folder)
    finally:
        world.run(lambda rank, folder: shutil.rmtree(folder, ignore_errors=True) if rank.index == 0 else None, folder)
    for index, (saved, before, loaded) in enumerate(found):
        assert not all(torch.equal(saved[name], before[name]) for name in saved), f"rank {index}: nothing was trained"
        for name, value in saved.items():
            assert_same(value, loaded[name], f"rank {index}, {name}")
