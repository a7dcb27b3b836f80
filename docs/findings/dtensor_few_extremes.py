# amax, amin, max, min and the infinity norm of a DTensor raise on a rank without elements alone
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_few_extremes.py
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


mesh = init_device_mesh("cpu", (size,))
row = distribute_tensor(torch.tensor([[3.0, -4.0]]), mesh, [Shard(0)])
observed = []
for operator in (torch.amax, torch.max, lambda x: x.amin(0), lambda x: torch.linalg.vector_norm(x, float("inf"))):
    try:
        operator(row)
    except (IndexError, RuntimeError) as error:
        observed.append(str(error).splitlines()[0])
report([], observed)
