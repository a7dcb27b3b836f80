# in a mesh whose ranks are not in ascending order the local rank is not the coordinate
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=3 mesh_order.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


mesh = DeviceMesh("cpu", [2, 0, 1])
report([2, 0, 1].index(rank), mesh.get_local_rank())
