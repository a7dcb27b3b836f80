# With NO_SHARD and original parameters, FSDP1 silently mixes up the gradient's elements of a channels-last weight
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 fsdp_no_shard_layouts.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
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


layer = nn.Conv2d(2, 1, (1, 2), bias=False).to(memory_format=torch.channels_last)
options = {"use_orig_params": True, "sharding_strategy": ShardingStrategy.NO_SHARD}  # right with another strategy
model = FullyShardedDataParallel(layer, device_id=torch.device("cpu"), **options)
# The gradient of a weight of one output is the input.
model(torch.tensor([[[[1.0, 2.0]], [[3.0, 4.0]]]])).sum().backward()
report([1.0, 2.0, 3.0, 4.0], next(model.parameters()).grad.flatten().tolist())
