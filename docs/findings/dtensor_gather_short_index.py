# gather of a sharded DTensor by an index with fewer rows silently takes from other rows
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_gather_short_index.py
# It exits with 1 where the defect is there. The gradient of scatter_add's source is a gather, and as wrong.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


mesh, index = init_device_mesh("cpu", (size,)), torch.tensor([[0], [1], [2]])
x = distribute_tensor(torch.arange(20.0).view(5, 4), mesh, [Shard(0)])
found = x.gather(1, distribute_tensor(index, mesh, [Replicate()])).full_tensor()
report([[0.0], [5.0], [10.0]], found.tolist())
