# any() of a DTensor is silently the sum of what its ranks find: wrong for pending sums, and for bytes their number
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_any.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
terms = DTensor.from_local(torch.full((4,), 1.0 if dist.get_rank() else -1.0), mesh, [Partial()])
digits = distribute_tensor(torch.arange(1, 9, dtype=torch.uint8), mesh, [Shard(0)])
observed = {"zeros, pending": terms.any().full_tensor().item(), "bytes": digits.any().full_tensor().item()}
expected = {"zeros, pending": False, "bytes": 1}
print(f"rank {dist.get_rank()}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
