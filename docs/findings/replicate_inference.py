# A model that replicate() was given cannot be trained where its first forward is in inference mode
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 replicate_inference.py
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
with torch.inference_mode():
    model(torch.ones(1, 1))  # makes DDP, whose buckets are inference tensors then
try:
    model(torch.full((1, 1), 1.0 + rank)).sum().backward()
    observed = model.weight.grad.item()
except RuntimeError as e:
    observed = f"RuntimeError: {e}"
print(f"rank {rank}: expected 1.5, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(0 if observed == 1.5 else 1)
