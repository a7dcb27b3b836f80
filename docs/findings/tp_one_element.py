# gradients of a flat parameter of one element, sharded, do not add up over backwards
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 tp_one_element.py
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


# Whole and shard have the same shape, so that the shard's gradient is taken for a whole one that is not reduced yet.
model = FullyShardedDataParallel(nn.Linear(1, 1, bias=False), device_id=torch.device("cpu"))
for first in (1.0, 2.0):  # averages over two ranks: 1.5 and 2.5
    model(torch.full((1, 1), first + rank)).sum().backward()
gradient = next(model.parameters()).grad
report(4.0 if rank == 0 else 0.0, gradient.item())
