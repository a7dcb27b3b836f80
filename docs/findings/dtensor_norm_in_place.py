# A norm can't be added in place to a pending sum: AssertionError (since torch 2.14, and before 2.12)
# unreported
# Seen with torch 2.14.1+cu132, gloo, Python 3.11, Linux x86-64; not there in 2.13.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_norm_in_place.py
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


x = distribute_tensor(torch.arange(8.0), init_device_mesh("cpu", (size,)), [Shard(0)])
total = torch.linalg.vector_norm(x, 0).clone()
observed = "no error"
try:
    total.add_(torch.linalg.vector_norm(x, 2))
except AssertionError as error:
    observed = str(error)
report("no error", observed)
