# HYBRID_SHARD over one shard never averages its replicas
# https://github.com/pytorch/pytorch/issues/154888
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 tp_one_shard.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("replicas", "shards"))
model = FullyShardedDataParallel(
    nn.Linear(2, 1, bias=False),
    device_mesh=mesh,
    device_id=torch.device("cpu"),
    sharding_strategy=ShardingStrategy.HYBRID_SHARD,
    use_orig_params=True,
)
model(torch.full((1, 2), 1.0 + rank)).sum().backward()
gradient = next(model.parameters()).grad
report([1.5, 1.5] if size == 2 else [(size + 1) / 2] * 2, gradient.flatten().tolist())
