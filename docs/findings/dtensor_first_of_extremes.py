# argmax and argmin of a DTensor silently give another than the first of equal extremes if they lie in several shards
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_first_of_extremes.py
# It exits with 1 where the defect is there. Along a dimension, so it is if two mesh dimensions shard it.

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
whole = torch.tensor([[0.0, 0.0, 0.0, 5.0], [5.0, 0.0, 0.0, 0.0]])
expected = whole.argmax().item()
observed = distribute_tensor(whole, mesh, [Shard(1)]).argmax().full_tensor().item()
print(f"rank {dist.get_rank()}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
