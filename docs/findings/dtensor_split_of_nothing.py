# split of a DTensor into parts of a size along a dimension without elements raises an error
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_split_of_nothing.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo")
rank = dist.get_rank()
plain = torch.ones(0, 4)
expected: object = [tuple(part.shape) for part in plain.split(2)]
try:
    parts = distribute_tensor(plain, init_device_mesh("cpu", (2,)), [Shard(1)]).split(2)
    observed: object = [tuple(part.shape) for part in parts]
except RuntimeError as error:
    observed = f"RuntimeError: {str(error).splitlines()[0]}"
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
