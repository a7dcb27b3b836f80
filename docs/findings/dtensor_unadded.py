# addmv and addr of DTensors with beta=0 raise an error, or on some ranks alone, although they ignore a tensor then
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_unadded.py
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
first, matrix, vector = torch.ones(4), torch.arange(24.0).reshape(4, 6), torch.arange(6.0)
rows = distribute_tensor(matrix, mesh, [Shard(0)])
ignored, other = (distribute_tensor(v, mesh, [Replicate()]) for v in (first, vector))
try:
    observed = torch.addmv(ignored, rows, other, beta=0).full_tensor().tolist()
except RuntimeError as error:
    observed = f"RuntimeError: {error}".splitlines()[0]
report(torch.addmv(first, matrix, vector, beta=0).tolist(), observed)
