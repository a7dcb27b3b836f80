# register_sharding silently has no effect on calls that repeat one from before it
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_registered_after_calls.py
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
x = distribute_tensor(torch.ones(2, 2), init_device_mesh("cpu", (size,)), [Shard(0)])
x.unsqueeze(1)


@register_sharding(torch.ops.aten.unsqueeze.default)
def replicated(x: Any, dim: int) -> list[Any]:
    """Offer only whole tensors."""
    return [([Replicate()], [Replicate(), None])]


expected = {dim: (Replicate(),) for dim in (1, 2)}
observed = {dim: x.unsqueeze(dim).placements for dim in (1, 2)}
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
