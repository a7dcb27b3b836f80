# On the host, rand and randn of torch.distributed.tensor raise AssertionError, although rand_like works
# https://github.com/pytorch/pytorch/issues/138329
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_random_factories.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
import torch.distributed.tensor as dtensors
from torch.distributed.device_mesh import init_device_mesh

mesh = init_device_mesh("cpu", (2,))
like = torch.rand_like(dtensors.zeros(4, 3, device_mesh=mesh, placements=[dtensors.Shard(0)]))
try:
    made = dtensors.rand(4, 3, device_mesh=mesh, placements=[dtensors.Shard(0)])
    observed = str(tuple(made.to_local().shape))
except AssertionError:
    observed = "AssertionError"
expected = str(tuple(like.to_local().shape))
print(f"rank {dist.get_rank()}: expected a part of {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
