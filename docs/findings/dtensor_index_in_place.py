# index_add_, index_copy_ and masked_fill_ by a tensor are silently lost: a DTensor has placements unlike its part
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_index_in_place.py
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


mesh = init_device_mesh("cpu", (size,))
x = distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)])
index = distribute_tensor(torch.arange(4), mesh, [Replicate()])
update = distribute_tensor(torch.ones(4, 2), mesh, [Replicate()])
part, layout = x.to_local(), x.placements
try:
    x.index_add_(0, index, update)
    observed: object = (tuple(x.placements), part.tolist())
except RuntimeError as error:  # that says so is no defect
    print(error)
    observed = (layout, [[1.0] * 2] * len(part))
report((layout, [[1.0] * 2] * len(part)), observed)
