# On a mesh whose ranks are not in ascending order, full_tensor() puts shards together in the wrong order
# https://github.com/pytorch/pytorch/pull/193224
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_mesh_order.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


mesh = DeviceMesh("cpu", [1, 0])
whole = torch.arange(4.0)
sharded = distribute_tensor(whole, mesh, [Replicate()]).redistribute(placements=[Shard(0)])
report(whole.tolist(), sharded.full_tensor().tolist())
