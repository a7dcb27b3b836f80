# A communication hook that a replicated module is given after its first forward is never called
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 replicate_late_hook.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()

model = nn.Linear(1, 1, bias=False)
replicate(model)
model(torch.ones(1, 1)).sum().backward()
calls = []


def hook(state, bucket):
    calls.append(bucket.index())
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


model.register_comm_hook(None, hook)  # goes to a list that only the first forward reads
model(torch.ones(1, 1)).sum().backward()
print(f"rank {rank}: expected 1 call or an error, observed {len(calls)} calls", flush=True)
dist.destroy_process_group()
sys.exit(0 if len(calls) == 1 else 1)
