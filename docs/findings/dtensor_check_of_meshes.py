# from_local with run_check compares the parts of all ranks of the world, and not those of its mesh
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_check_of_meshes.py
# It exits with 1 where the defect is there. Where only the ranks of a mesh call it, they wait for the others.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


meshes = [DeviceMesh("cpu", [i]) for i in range(size)]  # each rank has a mesh of its own
dtype = (torch.float32, torch.float64)[rank]
try:
    DTensor.from_local(torch.ones(2, dtype=dtype), meshes[rank], [Replicate()], run_check=True)
    report("a DTensor", "a DTensor")
except ValueError as error:
    report("a DTensor", str(error))
