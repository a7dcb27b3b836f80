# An operator of register_sharding silently keeps the placements of its first call, whatever list, truth or text it gets
# unreported; https://github.com/pytorch/pytorch/pull/171248 would let callers say which arguments count
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_registered_cached.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import register_sharding

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (size,))
library = torch.library.Library("own", "FRAGMENT")
library.define("flip(Tensor x, int[] dims) -> Tensor")
library.impl("flip", lambda x, dims: x.flip(dims), "CompositeExplicitAutograd")


@register_sharding(torch.ops.own.flip.default)
def other_dimensions(x, dims):
    kept = [Shard(dim) for dim in range(2) if dim not in dims]
    return [([Replicate()], [Replicate(), None]), *(([shard], [shard, None]) for shard in kept)]


whole = torch.arange(8.0).view(2, 4)
x = distribute_tensor(whole, mesh, [Shard(1)])
expected, observed = {}, {}
for dim in 0, 1:  # the second call needs whole rows
    expected[dim] = whole.flip(dim).tolist()
    observed[dim] = torch.ops.own.flip(x, [dim]).full_tensor().tolist()
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
