# In inference mode, unflatten, expand_as, view_as and others of a DTensor silently take sizes of a rank's own part
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_inference_sizes.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
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


mesh = init_device_mesh("cpu", (2,))
whole = torch.arange(16.0).reshape(2, 8)
with torch.inference_mode():
    columns, rows = distribute_tensor(whole, mesh, [Shard(1)]), distribute_tensor(whole, mesh, [Shard(0)])
    first = distribute_tensor(whole[:, :1].contiguous(), mesh, [Replicate()])
    observed = {
        "unflatten": tuple(columns.unflatten(1, (2, -1)).to_local().shape),  # of (2, 2, 4), a half: [Shard(1)]
        "expand_as": tuple(first.expand_as(columns).to_local().shape),  # of (2, 8), all: [Replicate()]
        "view_as": tuple(rows.view_as(columns).to_local().shape),  # of (2, 8), a half: [Shard(0)]
    }
report({"unflatten": (2, 1, 4), "expand_as": (2, 8), "view_as": (1, 8)}, observed)
