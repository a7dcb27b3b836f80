# With NO_SHARD, FSDP1 does not average the gradients of a second backward: of the same forward, or of one of two
# https://github.com/pytorch/pytorch/issues/106637
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 fsdp_second_backward.py
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


model = nn.Linear(1, 1, bias=False)
model = FullyShardedDataParallel(
    model, sharding_strategy=ShardingStrategy.NO_SHARD, device_id=torch.device("cpu"), use_orig_params=True
)
losses = [model(torch.tensor([[float(rank + 1)]])).sum() for _ in range(2)]
for loss in losses:
    loss.backward()
report([3.0], [value for p in model.parameters() for value in p.grad.flatten().tolist()])
