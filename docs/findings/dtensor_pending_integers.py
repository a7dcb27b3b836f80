# A replicated tensor of integers is silently computed with as floats if the other operand is a pending sum
# https://github.com/pytorch/pytorch/pull/175317
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_pending_integers.py
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
whole = torch.tensor([16777217, 3])
pending = DTensor.from_local(whole if rank == 0 else torch.zeros_like(whole), mesh, [Partial()])
found = (pending + DTensor.from_local(torch.tensor([0, 1]), mesh, [Replicate()])).full_tensor()
report(("torch.int64", [16777217, 4]), (str(found.dtype), found.tolist()))
