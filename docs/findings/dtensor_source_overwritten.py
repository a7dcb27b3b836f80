# distribute_tensor to replicas silently overwrites the tensors that it is given on other ranks with the first rank's
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_source_overwritten.py
# It exits with 1 where the defect is there. To shards, or of a transposed tensor, it leaves them as they are.

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

dist.init_process_group("gloo")
rank = dist.get_rank()
given = torch.full((2,), float(rank))
distribute_tensor(given, init_device_mesh("cpu", (dist.get_world_size(),)), [Replicate()])
expected, observed = [float(rank)] * 2, given.tolist()
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
