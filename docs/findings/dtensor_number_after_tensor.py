# A number is added to a pending sum once for each rank, if a tensor without dimensions was added to one before
# https://github.com/pytorch/pytorch/issues/163193
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_number_after_tensor.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

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
x = DTensor.from_local(torch.ones(3, dtype=torch.float64), mesh, [Partial()])
x + DTensor.from_local(torch.tensor(1.0, dtype=torch.float64), mesh, [Replicate()])
report([size + 1.0] * 3, (x + 1.0).full_tensor().tolist())
