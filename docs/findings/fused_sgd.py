# on a CPU, SGD with fused=True leaves parameters of bfloat16 and float16 as they are, but for the last few of each
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 fused_sgd.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


model = replicate(nn.Linear(33, 1, bias=False).to(torch.bfloat16))
nn.init.zeros_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=True)
model(torch.ones(1, 33, dtype=torch.bfloat16)).sum().backward()
optimizer.step()
report([-0.5], sorted(set(model.weight.flatten().tolist())))
