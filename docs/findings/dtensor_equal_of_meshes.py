# torch.equal of DTensors reduces its answer over the world: a mesh of some ranks silently gets that of other meshes
# https://github.com/pytorch/pytorch/pull/99014
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_equal_of_meshes.py
# It exits with 1 where the defect is there. Where only the ranks of a mesh compare, they wait for the others.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

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
x, y = (DTensor.from_local(torch.ones(2) * by, meshes[rank], [Shard(0)]) for by in (1, 1 + rank))
report(rank == 0, torch.equal(x, y))
