# local_map silently gives its function a DTensor, and ignores out_placements, if the DTensor is an argument by name
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_local_map_keywords.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
given = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
kinds = []


def total(x):
    kinds.append(type(x).__name__)
    return x.sum()


mapped = local_map(total, [Partial()])
mapped(given)
mapped(x=given)
expected = ["Tensor", "Tensor"]
print(f"rank {dist.get_rank()}: expected {expected}, observed {kinds}", flush=True)
dist.destroy_process_group()
sys.exit(kinds != expected)
