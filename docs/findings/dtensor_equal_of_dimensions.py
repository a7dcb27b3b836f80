# torch.equal of DTensors raises if one is sharded along a dimension that the other lacks
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_equal_of_dimensions.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
matrix = distribute_tensor(torch.ones(2, 2), mesh, [Shard(1)])
vector = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
try:
    observed = str(torch.equal(matrix, vector))
except IndexError as e:
    observed = f"IndexError: {e}"
print(f"rank {dist.get_rank()}: expected False, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != "False")
