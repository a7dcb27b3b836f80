# With static_graph, a backward of the module inside DDP keeps the next step from being averaged
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 replicate_static_inner.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()

model = DistributedDataParallel(nn.Linear(1, 1, bias=False), static_graph=True)
nn.init.ones_(model.module.weight)
x = torch.full((1, 1), 1.0 + rank)
observed = []
for _ in range(3):
    model.module(x).sum().backward()  # ranks have 1 and 2, and in the whole step 2 and 4
    model(x).sum().backward()
    observed.append(model.module.weight.grad.item())
    model.zero_grad()
print(f"rank {rank}: expected [3.0, 3.0, 3.0], observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(0 if observed == [3.0, 3.0, 3.0] else 1)
