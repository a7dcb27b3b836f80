# If functional_call makes the first forward of a replicated module, gradients are never averaged
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 replicate_functional_first.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()

model = replicate(nn.Linear(1, 1, bias=False))
x = torch.full((1, 1), 1.0 + rank)
try:
    torch.func.functional_call(model, {"weight": torch.ones(1, 1, requires_grad=True)}, (x,))
    model(x).sum().backward()
    observed = model.weight.grad.item()
except RuntimeError as e:  # an error is right, too
    print(f"rank {rank}: {e}", flush=True)
    observed = 1.5
print(f"rank {rank}: expected 1.5 or an error, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(0 if observed == 1.5 else 1)
