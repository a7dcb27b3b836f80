# A DTensor silently keeps its shape when squeeze_ removes a dimension, while its local tensor loses it
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_squeezed_in_place.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
x = distribute_tensor(torch.arange(4.0).reshape(4, 1), mesh, [Shard(0)])
x.squeeze_(1)
observed = {"shape": tuple(x.shape), "local shape": tuple(x.to_local().shape)}
expected = {"shape": (4,), "local shape": (2,)}
print(f"rank {dist.get_rank()}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
