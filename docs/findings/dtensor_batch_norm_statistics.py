# A batch norm silently loses the new statistics of channels that are sharded if its buffers are replicated
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_batch_norm_statistics.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


mesh = init_device_mesh("cpu", (size,))
batch = torch.arange(24.0).reshape(6, 4)
plain, norm = nn.BatchNorm1d(4), distribute_module(nn.BatchNorm1d(4), mesh)
plain(batch)
norm(distribute_tensor(batch, mesh, [Shard(1)]))
report(plain.running_mean.tolist(), norm.running_mean.full_tensor().tolist())
