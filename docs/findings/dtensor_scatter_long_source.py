# scatter_add of a sharded DTensor silently adds wrong elements of a source that is longer than the positions
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_scatter_long_source.py
# It exits with 1 where the defect is there.

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


mesh = init_device_mesh("cpu", (size,))
whole, index, source = torch.zeros(1, 4), torch.zeros(1, 4, dtype=torch.int64), torch.arange(8.0).reshape(1, 8)
x = distribute_tensor(whole, mesh, [Shard(1)])
other = distribute_tensor(index, mesh, [Replicate()]), distribute_tensor(source, mesh, [Replicate()])
report(whole.scatter_add(0, index, source).tolist(), x.scatter_add(0, *other).full_tensor().tolist())
