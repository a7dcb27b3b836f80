# redistribute silently ignores another mesh if placements stay, and takes more placements than the mesh has dimensions
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_redistribute_unchecked.py
# It exits with 1 where the defect is there. With other placements, another mesh is a NotImplementedError.

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


mesh, turned = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [1, 0])
x = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
observed = {}
for name, arguments in {"mesh": (turned, [Shard(0)]), "placements": (mesh, [Shard(0), Replicate()])}.items():
    try:
        found = x.redistribute(*arguments)
        observed[name] = f"{found.placements} on {found.device_mesh.mesh.tolist()}"
    except (NotImplementedError, RuntimeError, ValueError):
        observed[name] = "an error"
report({"mesh": "an error", "placements": "an error"}, observed)
