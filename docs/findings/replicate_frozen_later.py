# Gradients are not averaged in the step after a layer was frozen, without an error
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 replicate_frozen_later.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()

model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
for parameter in model.parameters():
    nn.init.ones_(parameter)
replicate(model)
model(torch.ones(1, 1)).sum().backward()
model.zero_grad()
model[1].requires_grad_(False)  # its bucket waits for a gradient that never comes
try:
    model(torch.full((1, 1), 1.0 + rank)).sum().backward()
    observed = model[0].weight.grad.item()
except RuntimeError as e:
    observed = f"RuntimeError: {e}"
print(f"rank {rank}: expected 1.5 or an error, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(0 if observed == 1.5 or isinstance(observed, str) else 1)
