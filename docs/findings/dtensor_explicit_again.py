# An ExplicitRedistributionContext that is entered within itself silently stays in effect after all blocks
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_explicit_again.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor._utils import ExplicitRedistributionContext

dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (2,))
rows = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
context = ExplicitRedistributionContext()
with context, context:
    pass
try:
    rows @ rows
    observed = "a product"
except RuntimeError as error:
    observed = str(error)[:60]
print(f"rank {rank}: expected a product after the blocks, observed: {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != "a product")
