# summon_full_params of FSDP1 with_grads kills the process for float64 parameters beside a frozen one
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 fsdp_gradients_of_doubles.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)).double()
model[1].weight.requires_grad_(False)
model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
model(torch.ones(2, 8, dtype=torch.float64)).sum().backward()
print(f"rank {rank}: expected gradients of {torch.float64}", flush=True)
with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
    found = model.module[0].weight.grad.dtype
report(torch.float64, found)
