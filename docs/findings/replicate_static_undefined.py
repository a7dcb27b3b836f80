# With static_graph, gradients are never averaged if the first backward gives undefined ones
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 replicate_static_undefined.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Undefined(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return None


dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()

model = DistributedDataParallel(nn.Linear(1, 1, bias=False), static_graph=True)
x = torch.full((1, 1), 1.0 + rank)
Undefined.apply(model(x)).sum().backward()
observed = []
try:
    for _ in range(2):
        model.zero_grad()
        model(x).sum().backward()
        observed.append(model.module.weight.grad.item())
except RuntimeError as e:  # an error is right, too
    observed = [1.5, 1.5]
    print(f"rank {rank}: {e}", flush=True)
print(f"rank {rank}: expected [1.5, 1.5] or an error, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(0 if observed == [1.5, 1.5] else 1)
