# A copy of a DDP module silently has no communication hook
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 ddp_copied_hook.py
# It exits with 1 where the defect is there.

import copy
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()


def hook(state, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer() * 4)
    return future


model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
model.register_comm_hook(None, hook)
observed = []
for each in (model, copy.deepcopy(model)):
    each(torch.ones(1, 1)).sum().backward()
    observed.append(each.module.weight.grad.item())
expected = [4.0, 4.0]
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
