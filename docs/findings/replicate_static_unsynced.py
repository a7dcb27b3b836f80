# with static_graph, a first backward that is not synchronized is an internal assertion
# https://github.com/pytorch/pytorch/issues/143580
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 replicate_static_unsynced.py
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


model = replicate(nn.Linear(2, 1, bias=False), static_graph=True)
model.set_requires_gradient_sync(False)
model(torch.full((1, 2), 1.0 + rank)).sum().backward()  # raises, and torchrun ends with 1
model.set_requires_gradient_sync(True)
model(torch.full((1, 2), 1.0 + rank)).sum().backward()
report([3.0, 3.0], model.weight.grad.flatten().tolist())
