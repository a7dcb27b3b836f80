# argmax of a DTensor silently has the wrong placements over a dimension that the first of two mesh dimensions shards
# unreported
# Seen with torch 2.15.0+cu130, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=4 dtensor_extremes_mislabelled.py
# It exits with 1 where the defect is there (since 2.14). What follows is wrong: a sum counts replicas as shards.

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
whole = torch.eye(4).flip(0)
extremes = distribute_tensor(whole, mesh, [Shard(0), Replicate()]).argmax(0)
expected = whole.argmax(0).sum().item()
observed = extremes.sum().full_tensor().item()
print(f"rank {dist.get_rank()}: {extremes.placements} of {len(extremes.to_local())} of {len(extremes)} elements")
print(f"rank {dist.get_rank()}: expected a sum of {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
