# torch.func.jvp of a module under DDP fails in every step but the first
# https://github.com/pytorch/pytorch/issues/102197
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 replicate_jvp_again.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()

model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
x = torch.full((1, 1), 1.0 + rank)
observed = []
for _ in range(2):
    model.zero_grad()
    try:
        output, derivative = torch.func.jvp(model, (x,), (torch.ones_like(x),))
        (output + 3 * derivative).sum().backward()  # ranks have gradients 1 + 3 and 2 + 3
        observed.append(model.module.weight.grad.item())
    except RuntimeError as e:
        observed.append(f"RuntimeError: {e}".splitlines()[0])
print(f"rank {rank}: expected [4.5, 4.5], observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(0 if observed == [4.5, 4.5] else 1)
