# The sum of norms over a sharded dimension is the norm of the ranks' sums of norms
# https://github.com/pytorch/pytorch/pull/172288
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_sum_of_norms.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


own = distribute_tensor(torch.tensor([[3.0, 5.0], [4.0, 12.0]]), init_device_mesh("cpu", (size,)), [Shard(0)])
norms = torch.linalg.vector_norm(own, dim=0)
report(18.0, round(norms.sum().full_tensor().item(), 3))  # of 5 and 13
