# Under DDP, backward(create_graph=True) fails if two gradients depend on parameters
# https://github.com/pytorch/pytorch/issues/63929
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 replicate_create_graph.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()

module = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
for parameter in module.parameters():
    nn.init.ones_(parameter)
model = DistributedDataParallel(module)
try:
    model(torch.full((1, 1), 1.0 + rank)).sum().backward(create_graph=True)
    observed = [p.grad.item() for p in module.parameters()]
except RuntimeError as e:
    observed = f"RuntimeError: {e}".splitlines()[0]
print(f"rank {rank}: expected [1.5, 1.5], observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(0 if observed == [1.5, 1.5] else 1)
