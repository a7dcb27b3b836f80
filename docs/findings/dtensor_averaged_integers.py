# avg_pool1d, 2d or 3d of a pending sum of integers silently averages, and rounds, each rank's part
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_averaged_integers.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


part = torch.tensor([[[1, 2, 2, 4]]]) if rank == 0 else torch.tensor([[[0, 1, 0, 0]]])
pending = DTensor.from_local(part, init_device_mesh("cpu", (size,)), [Partial()])
try:
    found = torch.nn.functional.avg_pool1d(pending, 2).full_tensor().tolist()
except NotImplementedError:
    found = [[[2, 3]]]  # refused, as before 2.12
report([[[2, 3]]], found)
