# Of two backwards after two forwards, DDP averages only the first, without an error
# https://github.com/pytorch/pytorch/issues/47260
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 replicate_several_backwards.py
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
losses = [model(torch.full((1, 1), part * (1.0 + rank))).sum() for part in (1, 2)]
for loss in losses:
    loss.backward()
observed = model.module.weight.grad.item()  # ranks have 1 + 2 and 2 + 4
print(f"rank {rank}: expected 4.5, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(0 if observed == 4.5 else 1)
