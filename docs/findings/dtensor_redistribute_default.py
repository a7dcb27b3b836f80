# DTensor.redistribute() without placements raises RuntimeError: it documents to replicate on all mesh dimensions then
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_redistribute_default.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
x = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
expected = str((Replicate(),))
try:
    observed = str(x.redistribute().placements)
except RuntimeError as error:
    observed = f"RuntimeError: {error}"
print(f"rank {dist.get_rank()}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
