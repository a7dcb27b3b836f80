# register_sharding of cumsum is silently ignored, although it should override what DTensor has
# unreported
# Seen with torch 2.15.0+cu132, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_registered_scan.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import register_sharding

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


@register_sharding(torch.ops.aten.cumsum.default)
def replicated(x: Any, dim: int) -> list[Any]:
    """Offer only whole tensors."""
    return [([Replicate()], [Replicate(), None])]


mesh = init_device_mesh("cpu", (size,))
result = distribute_tensor(torch.ones(2, 2), mesh, [Shard(1)]).cumsum(0)
report((Replicate(),), result.placements)
