# The gradient of a weight that two groups share misses the use in one of them, without an error
# unreported
# Seen with torch 2.11.0+cu130, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 fsdp_tied_groups.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()
model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
nn.init.ones_(model[0].weight)
model[1].weight = model[0].weight
expected = observed = [[4.0, 4.0], [4.0, 4.0]]
try:
    for module in (model[0], model[1], model):
        replicate(module)
    model(torch.ones(1, 2)).sum().backward()
    observed = model[0].weight.grad.full_tensor().tolist()
except (RuntimeError, ValueError, AssertionError):
    pass  # to refuse it is right, too
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(0 if observed == expected else 1)
