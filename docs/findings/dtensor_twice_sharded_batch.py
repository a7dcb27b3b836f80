# The product of a batch that two mesh dimensions shard unevenly by a matrix raises an error about an invalid shape
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=4 dtensor_twice_sharded_batch.py
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


mesh = init_device_mesh("cpu", (2, 2))
batch = distribute_tensor(torch.ones(2, 5, 6), mesh, [Shard(0), Shard(0)])
matrix = distribute_tensor(torch.ones(6, 3), mesh, [Replicate(), Replicate()])
try:
    found = torch.matmul(batch, matrix).full_tensor().unique().tolist()
except RuntimeError as error:
    found = str(error)
report([6.0], found)
