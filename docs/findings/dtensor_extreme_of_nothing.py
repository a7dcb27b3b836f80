# argmax and argmin of all elements of a DTensor raise on a rank without elements alone, so that the others wait for it
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_extreme_of_nothing.py
# It exits with 1 where the defect is there. Ranks that wait give up after some seconds.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo", timeout=timedelta(seconds=5))
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
x = distribute_tensor(torch.tensor([7.0]), mesh, [Shard(0)])
try:
    found = x.argmax()
    observed = str(found.full_tensor().item())
except RuntimeError as e:
    observed = f"RuntimeError: {str(e).splitlines()[0]}"
print(f"rank {dist.get_rank()}: expected 0, observed {observed}", flush=True)
sys.exit(observed != "0")
