# A view that regroups the columns of a DTensor whose columns are sharded is silently a copy: writes are lost
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_view_gathered.py
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


x = distribute_tensor(torch.zeros(4, 6), init_device_mesh("cpu", (size,)), [Shard(1)])
try:
    view = x.view(6, 4)
except RuntimeError:
    report("a view, or an error", "a view, or an error")  # as before 2.13
view.fill_(1)
report([[1.0] * 6] * 4, x.full_tensor().tolist())
