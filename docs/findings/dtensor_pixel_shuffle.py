# pixel_shuffle of uneven rows of pixels silently gives ranks parts that are not those of its placements, or raises
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_pixel_shuffle.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional

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
image = torch.arange(80.0).reshape(1, 4, 5, 4)
expected = functional.pixel_shuffle(image, 2)
found = functional.pixel_shuffle(distribute_tensor(image, mesh, [Shard(2)]), 2)
layout = found.placements[0]
rows = expected.chunk(size, layout.dim)[rank] if isinstance(layout, Shard) else expected
report(tuple(rows.shape), tuple(found.to_local().shape))
