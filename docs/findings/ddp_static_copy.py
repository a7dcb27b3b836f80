# Gradients are silently never averaged in a copy of a DDP module with static_graph that was trained before
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 ddp_static_copy.py
# It exits with 1 where the defect is there.

import copy
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()

model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False), static_graph=True)
model(torch.ones(1, 1)).sum().backward()
copied = copy.deepcopy(model)
observed = []
for _ in range(3):
    copied.zero_grad()
    copied(torch.full((1, 1), 1.0 + rank)).sum().backward()
    observed.append(copied.module.weight.grad.item())
expected = [1.5] * 3
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
