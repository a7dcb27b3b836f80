# After join(), a forward under DDP still sends what join() needs, which mixes up ranks' collectives
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 join_ended.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


model = DistributedDataParallel(nn.Linear(1, 1))
with model.join():
    for _ in range(1 + rank):
        model(torch.ones(1, 1)).sum().backward()
if rank == 0:
    model(torch.ones(1, 1))
numbers = torch.tensor([10.0])
dist.all_reduce(numbers)
if rank == 1 and numbers.item() != 20.0:
    for _ in range(2):
        dist.all_reduce(torch.zeros(1))  # for the other rank, which still waits
report(20.0, numbers.item())
